"""What a medium must offer: non-blocking bytes between two ranks, and a way to end the job.

A ``Transport`` moves bytes between two ranks on one medium (threads, MPI, torch.distributed).
Everything else, collectives included, is built on it in one place: the same code, the same time
limits and the same messages on every medium. Some ranks of a transport are one too.
"""

from collections.abc import Sequence
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Request(Protocol):
    """A send or receive under way."""

    def test(self) -> bool:
        """Say whether it has completed. Never blocks; progresses the transport."""
        ...


class Transport(Protocol):
    """Non-blocking verbs between two ranks of one medium."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def threaded(self) -> bool:
        """Whether several threads may send, receive and test at once, each its own requests."""
        ...

    def isend(self, data: Bytes, *, dest: int, tag: int) -> Request:
        """Start to send ``data`` (contiguous, >= 1 byte), to stay unchanged until done."""
        ...

    def irecv(self, into: Bytes, *, source: int, tag: int) -> Request:
        """Start to receive exactly ``len(into)`` bytes; one (source, tag) keeps its order."""
        ...

    def abort(self, message: str) -> NoReturn:
        """End the whole job, every rank of it, with this message on stderr."""
        ...

    def close(self) -> None:
        """Give back what the transport holds. Never blocks on other ranks."""
        ...


class PartTransport:
    """Ranks of another transport, numbered anew; it stays that one's to close.

    Args:
        whole: The other transport.
        ranks: Of it, ascending; this rank is one of them.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self._whole = whole
        self._ranks = tuple(ranks)
        self._rank = self._ranks.index(whole.rank)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    @property
    def threaded(self) -> bool:
        return self._whole.threaded

    def isend(self, data: Bytes, *, dest: int, tag: int) -> Request:
        return self._whole.isend(data, dest=self._ranks[dest], tag=tag)

    def irecv(self, into: Bytes, *, source: int, tag: int) -> Request:
        return self._whole.irecv(into, source=self._ranks[source], tag=tag)

    def abort(self, message: str) -> NoReturn:
        self._whole.abort(message)

    def close(self) -> None:
        return None
