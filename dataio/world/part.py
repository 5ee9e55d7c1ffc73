"""Some ranks of a world, as a world of their own."""

from collections.abc import Sequence
from typing import NoReturn

from dataio.world.base import Bytes, Request, Transport


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
