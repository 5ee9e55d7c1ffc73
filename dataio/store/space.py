"""Where rows may be written: positions and heap extents that no manifest in use mentions."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.store.files.extents import (
    FreeExtents,
    find_free_extents,
    find_free_positions,
    join_positions,
)
from dataio.store.files.manifest import Entries
from dataio.store.files.row_files import RowFiles


class Space:
    """Free positions, the same on all local ranks, and the gaps of this local rank's heap.

    Both are derived from the manifests when they are first asked for, then kept up to date.

    Args:
        files: The cache's.
        local_rank: Whose heap.
        in_use: Names every manifest in use, as entries.
    """

    def __init__(
        self, files: RowFiles, *, local_rank: int, in_use: Callable[[], Sequence[Entries]]
    ) -> None:
        self._files = files
        self._local_rank = local_rank
        self._in_use = in_use
        self._positions: NDArray[np.int64] | None = None
        self._extents: FreeExtents | None = None

    @property
    def positions(self) -> NDArray[np.int64]:
        """int64[n]: Positions that no manifest in use mentions, ascending."""
        if self._positions is None:
            used = [entries.position for entries in self._in_use()]
            self._positions = find_free_positions(self._files.num_positions, used)
        return self._positions

    @property
    def extents(self) -> FreeExtents:
        """The gaps of this local rank's heap."""
        if self._extents is None:
            self._extents = find_free_extents(self._in_use(), heap=self._local_rank)
        return self._extents

    @property
    def heap_end(self) -> int | None:
        """Where live extents end; None where nobody has asked for any yet."""
        return None if self._extents is None else self._extents.end

    def forget(self) -> None:
        """Derive both anew: other manifests are in use."""
        self._positions = self._extents = None

    def forget_positions(self) -> None:
        """Derive the free positions anew."""
        self._positions = None

    def set_aside(self, num_positions: int) -> NDArray[np.int64]:
        """Take the first free positions for rows to be staged."""
        free = self.positions
        self._positions = free[num_positions:]
        return free[:num_positions]

    def take_positions(self, positions: NDArray[np.int64]) -> None:
        """Rows lie there from now on."""
        if self._positions is not None:
            self._positions = np.setdiff1d(self._positions, positions, assume_unique=True)

    def grow(self, before: int) -> None:
        """Positions from ``before`` on were added to the files."""
        if self._positions is not None:
            more = np.arange(before, self._files.num_positions)
            self._positions = np.concatenate([self._positions, more])

    def release(self, entries: Entries | None) -> None:
        """Give back the space of entries that no manifest in use mentions any more."""
        if entries is None:
            return
        if self._positions is not None:
            gone = entries.position[:]
            self._positions = join_positions(self._positions, gone[gone >= 0])
        mine = entries.heap[:] == self._local_rank
        self.give_back(entries.offset[:][mine], entries.extent_bytes[mine])

    def give_back(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Free extents of this local rank's heap."""
        if self._extents is not None:
            self._extents.give_back(offsets, lengths)
