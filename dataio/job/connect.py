"""Connect ranks that have agreed on who they are, without the launcher's store."""

import contextlib
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dataio.base.atomic import write_file
from dataio.base.errors import WorldError
from dataio.job.meeting import POLL_S
from dataio.world import World
from dataio.world.discover import torch_world

SOON_S = 30.0
"""Longest wait for a rank that was alive a moment ago."""


def connect(file: Path, *, rank: int, world_size: int, timeout_s: float) -> World:
    """Make torch's default group and a world of it. Collective.

    Args:
        file: In which rank 0 writes where its store is; all ranks see it, and nobody else uses it.
        rank: In this world.
        world_size: Ranks of it.
        timeout_s: Longest wait for another rank later on.

    Raises:
        WorldError: If rank 0 does not write the file.
        RuntimeError: If torch cannot connect them.
    """
    soon = timedelta(seconds=min(timeout_s, SOON_S))
    if rank == 0:
        host = _own_name()
        store = TCPStore(host, 0, world_size, is_master=True, timeout=soon, wait_for_workers=False)
        write_file(file, f"{host} {store.port}".encode())
    else:
        host, port = _read(file, soon.total_seconds()).split()
        store = TCPStore(host, int(port), world_size, timeout=soon)
    # Who has died since the list was made is missed here, not after `timeout_s`.
    store.set(f"here-{rank}", "")
    store.wait([f"here-{each}" for each in range(world_size)], soon)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    return torch_world(timeout_s=timeout_s)


def _own_name() -> str:
    """Name this machine to the others, if its name leads to it."""
    name = socket.gethostname()
    try:
        with socket.socket() as made:
            made.bind((name, 0))
    except OSError:
        return "127.0.0.1"
    return name


def _read(file: Path, timeout_s: float) -> str:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        with contextlib.suppress(FileNotFoundError):
            return file.read_text()
        time.sleep(POLL_S)
    raise WorldError(f"live: the first rank has not written {file} within {timeout_s:.0f} s")
