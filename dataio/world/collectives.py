"""Wait with a limit, and one collective that carries all others: gather, combine, broadcast.

Built on ``isend`` and ``irecv`` alone. Every rank sends rank 0 a header, then what it is doing and
its data; rank 0 sees who did not come or came for something else, and the outcome, error or result,
goes down a binomial tree.
"""

import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from dataio.base.errors import StallError, WorldError
from dataio.world.base import Bytes, Request, Transport

NUM_USER_TAGS = 2**20
UP_HEADER, UP_BODY, DOWN_HEADER, DOWN_BODY = range(NUM_USER_TAGS, NUM_USER_TAGS + 4)
# Up: sequence, bytes of text, bytes of data. Down: sequence, 1 if it failed, bytes of outcome.
HEADER = np.dtype("<u8")
SPINS = 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 500e-6

Combine = Callable[[list[bytes]], bytes]


class Collectives:
    """Waits and collectives of one rank. Used by one thread at a time.

    Args:
        transport: Moves bytes between ranks.
        timeout_s: Longest wait for another rank.
        names: Number of each rank in messages, where the job numbers them otherwise.
    """

    def __init__(
        self, transport: Transport, *, timeout_s: float, names: Sequence[int] | None = None
    ) -> None:
        self._transport = transport
        self._names = range(transport.world_size) if names is None else names
        self._timeout_s = timeout_s
        self._sequence = 0
        self._abandoned: list[Request] = []

    def wait(
        self, requests: Sequence[Request], *, peers: Sequence[int], doing: str, timeout_s: float
    ) -> None:
        """Poll the requests until all are done. Blocks for ``timeout_s`` at most."""
        pending = list(zip(requests, peers, strict=True))
        start, polls, pause_s = time.monotonic(), 0, FIRST_PAUSE_S
        while True:
            left = [(request, peer) for request, peer in pending if not request.test()]
            if not left:
                return
            if len(left) < len(pending):
                pending, polls, pause_s = left, 0, FIRST_PAUSE_S
            if time.monotonic() - start > timeout_s:
                # The medium may still write into their buffers: they must outlive this call.
                self._abandoned += [request for request, _ in pending]
                raise self._stall({peer for _, peer in pending}, doing, timeout_s)
            polls += 1
            # Cores are often oversubscribed: spinning takes time from the rank waited for.
            time.sleep(0 if polls < SPINS else pause_s)
            pause_s = pause_s if polls < SPINS else min(pause_s * 1.5, LONGEST_PAUSE_S)

    def combine(self, data: bytes, *, doing: str, combine: Combine) -> bytes:
        """Hand every rank what ``combine`` makes on rank 0 of all data, in rank order. Collective.

        Raises:
            StallError: If a rank does not come in time. Rank 0 names exactly the missing ones.
            WorldError: On every rank alike, if ranks are doing different things or ``combine``
                raises it.
        """
        self._sequence += 1
        if self._transport.world_size == 1:
            return combine([data])
        if self._transport.rank == 0:
            failed, outcome = self._gather(data, doing, combine)
        else:
            failed, outcome = self._send_up(data, doing)
        self._send_down(failed, outcome, doing)
        if failed:
            raise WorldError(outcome.decode())
        return outcome

    def _gather(self, data: bytes, doing: str, combine: Combine) -> tuple[bool, bytes]:
        ranks = range(1, self._transport.world_size)
        headers = np.empty((len(ranks), 3), HEADER)
        self._receive([_raw(row) for row in headers], ranks, UP_HEADER, doing)
        bodies = [np.empty(int(header[1] + header[2]), np.uint8) for header in headers]
        self._receive(bodies, ranks, UP_BODY, doing)
        texts = [
            body[: int(header[1])].tobytes().decode()
            for body, header in zip(bodies, headers, strict=True)
        ]
        try:
            self._check_same(doing, [int(header[0]) for header in headers], texts)
            parts = [
                body[int(header[1]) :].tobytes()
                for body, header in zip(bodies, headers, strict=True)
            ]
            return False, combine([data, *parts])
        except WorldError as error:
            # Raised again by ``combine`` above once every rank has received it.
            return True, str(error).encode()

    def _receive(
        self, buffers: Sequence[Bytes], ranks: Sequence[int], tag: int, doing: str
    ) -> None:
        requests = [
            self._transport.irecv(buffer, source=rank, tag=tag)
            for buffer, rank in zip(buffers, ranks, strict=True)
        ]
        self.wait(requests, peers=ranks, doing=doing, timeout_s=self._timeout_s)

    def _check_same(self, doing: str, sequences: list[int], texts: list[str]) -> None:
        mine = (self._sequence, doing)
        differ = [
            rank for rank, its in enumerate(zip(sequences, texts, strict=True), 1) if its != mine
        ]
        if differ:
            number, text = sequences[differ[0] - 1], texts[differ[0] - 1]
            raise WorldError(
                f"world: rank {self._names[0]} is at collective {self._sequence}, {doing!r}, but "
                f"{self.named(differ[:1])} is at collective {number}, {text!r} (ranks that differ "
                f"from rank {self._names[0]}: {self.named(differ)}); every rank must make the same "
                "collective calls in the same order: look for one under `if rank == ...`"
            )

    def _send_up(self, data: bytes, doing: str) -> tuple[bool, bytes]:
        text, rank = doing.encode(), self._transport.rank
        parent, limit_s = rank & (rank - 1), self._timeout_s + self._grace_s()
        send, receive = self._transport.isend, self._transport.irecv
        # Writable copies: media take no read-only buffers.
        body = np.frombuffer(bytearray(text + data), np.uint8)
        up, down = np.array([self._sequence, len(text), len(data)], HEADER), np.empty(3, HEADER)
        requests = [
            send(_raw(up), dest=0, tag=UP_HEADER),
            send(body, dest=0, tag=UP_BODY),
            receive(_raw(down), source=parent, tag=DOWN_HEADER),
        ]
        self.wait(requests, peers=[0, 0, parent], doing=doing, timeout_s=limit_s)
        outcome = np.empty(int(down[2]), np.uint8)
        if outcome.size:
            last = receive(outcome, source=parent, tag=DOWN_BODY)
            self.wait([last], peers=[parent], doing=doing, timeout_s=limit_s)
        return bool(down[1]), outcome.tobytes()

    def _send_down(self, failed: bool, outcome: bytes, doing: str) -> None:
        children = tree_children(self._transport.rank, self._transport.world_size)
        header = _raw(np.array([self._sequence, failed, len(outcome)], HEADER))
        body = np.frombuffer(bytearray(outcome), np.uint8)
        requests, peers = [], []
        for child in children:
            requests.append(self._transport.isend(header, dest=child, tag=DOWN_HEADER))
            if body.size:
                requests.append(self._transport.isend(body, dest=child, tag=DOWN_BODY))
            peers += [child] * (1 + bool(body.size))
        self.wait(requests, peers=peers, doing=doing, timeout_s=self._timeout_s + self._grace_s())

    def _grace_s(self) -> float:
        # Nearer to rank 0, sooner to give up: the first message is the most exact one.
        return self._transport.rank.bit_count() * max(0.05, min(5.0, 0.2 * self._timeout_s))

    def _stall(self, missing: set[int], doing: str, limit_s: float) -> StallError:
        return self.stall_error(missing, doing=doing, limit_s=limit_s)

    def stall_error(self, missing: Collection[int], *, doing: str, limit_s: float) -> StallError:
        """Name the ranks that this one waited for in vain."""
        rank, absent = self._names[self._transport.rank], self.named(missing)
        return StallError(
            f"rank {rank}: waited {limit_s:g} s for {absent} "
            f"while {doing}; each was expected to take part within the limit, and has ended, "
            "hangs, or itself waits for another; look at its last log lines, or raise timeout_s "
            "if it was only slow"
        )

    def named(self, ranks: Collection[int]) -> str:
        """Write some ranks by their names."""
        return name_ranks(sorted(self._names[rank] for rank in ranks))


def tree_children(rank: int, world_size: int) -> list[int]:
    """List a rank's children, largest first; a parent is its child without the lowest bit."""
    low_bits = (rank & -rank).bit_length() - 1 if rank else (world_size - 1).bit_length()
    children = [rank | 1 << bit for bit in reversed(range(low_bits))]
    return [child for child in children if child < world_size]


def name_ranks(ranks: Sequence[int]) -> str:
    """Write sorted ranks as ``rank 3`` or ``ranks 1, 4-6``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"


def _raw(header: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> Bytes:
    return header.view(np.uint8)
