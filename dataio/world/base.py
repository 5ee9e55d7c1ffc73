"""What a medium must offer: non-blocking bytes between two ranks, and a way to end the job.

A ``Transport`` moves bytes between two ranks on one medium (threads, MPI, torch.distributed).
Everything else, collectives included, is built on it in one place: the same code, the same time
limits and the same messages on every medium.
"""

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
