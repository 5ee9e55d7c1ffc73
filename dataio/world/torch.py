"""Ranks as torch.distributed processes, over a gloo group of their own.

Gloo's requests never report completion before ``wait`` (seen with torch 2.13), and a ``wait`` that
times out closes the connection. So each request has a thread that waits without limit and then sets
an event, which ``test`` reads.

Gloo ends the process when a message is longer than its receive; a shorter one passes unnoticed.
"""

import os
import threading
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from dataio.base.errors import WorldError
from dataio.world.abort import print_last
from dataio.world.base import Bytes, Request

# Receives are posted long before their bytes are sent; World.wait is what sets a limit.
NO_LIMIT = timedelta(days=365)


class _TorchRequest:
    """Its thread alone writes ``_error``, before it sets ``_done``."""

    def __init__(self, work: dist.Work, buffer: torch.Tensor, words: str) -> None:
        self._work, self._buffer, self._words = work, buffer, words
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._wait, daemon=True, name=f"tonari {words}").start()

    def test(self) -> bool:
        if self._error is not None:
            raise WorldError(
                f"torch.distributed: {self._words} failed: {self._error}; the other rank has "
                "probably ended: look at its last lines"
            ) from self._error
        return self._done.is_set()

    def _wait(self) -> None:
        try:
            self._work.wait(NO_LIMIT)
        except RuntimeError as error:
            self._error = error
        self._done.set()


class TorchTransport:
    """One rank of a gloo group derived from torch's. Construction is collective.

    Args:
        group: Which ranks; defaults to torch's own group, which the caller has initialised.
        timeout_s: Longest wait for the other ranks while the group is made.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        if not dist.is_initialized():
            raise WorldError(
                "torch.distributed: no default process group; call "
                "torch.distributed.init_process_group first"
            )
        made = dist.new_group(
            ranks=None if group is None else dist.get_process_group_ranks(group),
            timeout=timedelta(seconds=timeout_s),
            backend="gloo",
            use_local_synchronization=group is not None,
        )
        assert isinstance(made, dist.ProcessGroup), "a member of the group makes it"
        self._group = made

    @property
    def rank(self) -> int:
        return self._group.rank()

    @property
    def world_size(self) -> int:
        return self._group.size()

    @property
    def threaded(self) -> bool:
        return True

    def isend(self, data: Bytes, *, dest: int, tag: int) -> Request:
        # torch takes no read-only memory.
        buffer = torch.from_numpy(data if data.flags.writeable else data.copy())
        return _TorchRequest(self._group.send([buffer], dest, tag), buffer, f"send to rank {dest}")

    def irecv(self, into: Bytes, *, source: int, tag: int) -> Request:
        buffer = torch.from_numpy(into)
        work = self._group.recv([buffer], source, tag)
        return _TorchRequest(work, buffer, f"receive from rank {source}")

    def abort(self, message: str) -> NoReturn:
        # The launcher (torchrun, srun --kill-on-bad-exit) ends the other ranks when this one leaves
        # with an error.
        print_last(message)
        os._exit(1)

    def close(self) -> None:
        # Destroying a group may wait for its other ranks; torch does it with the default group.
        return None
