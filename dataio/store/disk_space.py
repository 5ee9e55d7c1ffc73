"""Space of the disk that is claimed before rows are written: a full disk is noticed early."""

import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.store.disk_errors import named
from dataio.store.files.row_files import RowFiles
from dataio.store.room import Room
from dataio.store.space import Space


class DiskSpace:
    """Claims space for rows beside those of the pool, and gives back what staging did not use.

    Args:
        directory: The cache.
        files: Its rows.
        space: What no manifest mentions.
        room: What a quota lets stay.
        num_positions: Rows that the fixed fields have room for once rows move.
        local_rank: Whose heap is claimed.
        guard: Held while files grow: threads write beside one another.
    """

    def __init__(
        self,
        directory: Path,
        files: RowFiles,
        space: Space,
        room: Room,
        *,
        num_positions: int,
        local_rank: int,
        guard: threading.RLock,
    ) -> None:
        self._directory = directory
        self._files = files
        self._space = space
        self._room = room
        self._num_positions = num_positions
        self._local_rank = local_rank
        self._guard = guard
        self._has_claimed_arrivals = False

    def claim_spare(self) -> None:
        """Let the fixed fields have room beside the pool. Every local rank.

        Raises:
            CacheError: If the disk is full.
        """
        with self._guard, named(self._directory, "make room for rows of other nodes"):
            self._files.reserve(self._num_positions)
            self.map_growth()

    def claim_arrivals(self) -> None:
        """Claim the space of an exchange's arrivals, before any row moves.

        Raises:
            CacheError: If the disk is full.
        """
        if self._has_claimed_arrivals:
            return
        with self._guard, named(self._directory, "make room for arrivals"):
            self._files.reserve(self._num_positions)
            self.map_growth()
            if self._files.has_heap:
                self._files.heap.reserve(self._space.extents.end + self._room.arrivals_bytes())
            self._has_claimed_arrivals = True

    def claim_windows(self) -> None:
        """Claim the space beside the rows that stay. Leader only."""
        assert self._room.budget is not None
        with named(self._directory, "make room for windows"):
            self._files.reserve(self._room.budget.positions)

    def find_windows(self) -> tuple[NDArray[np.int64], range]:
        """Find what this local rank may use beside the rows that stay; see `Room.window_space`."""
        with named(self._directory, "make room for windows"):
            return self._room.window_space(local_rank=self._local_rank)

    def trim(self) -> None:
        """Give back what staging claimed ahead, on this local rank's heap."""
        end = self._space.heap_end
        if end is not None and not self._has_claimed_arrivals:
            self._files.heap.trim(end)

    def map_growth(self) -> None:
        """See the positions that any local rank added to the files."""
        before = self._files.num_positions
        if before < self._num_positions:
            self._files.map()
            self._space.grow(before)
