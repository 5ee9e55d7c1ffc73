"""What a quota leaves a cache room for: rows that stay, windows beside them, arrivals.

`DiskSpace` claims it on the disk before rows are written: a full disk is noticed early.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.base.filesystem import named
from dataio.rows.rows import RowSchema
from dataio.store.commit_log import CommitLog
from dataio.store.files.extents import Space
from dataio.store.files.row_files import RowFiles
from dataio.store.quota import Budget
from dataio.store.state import Head


class Room:
    """Measures a node's rows against its budget.

    Args:
        budget: What the files may take; None: what the disk has.
        files: The cache's.
        log: Its entries.
        schema: Stored form of the fields.
        num_positions: Rows the fixed fields have room for once rows move.
        local_size: Ranks on the node.
        guard: Held while free extents are looked at.
    """

    def __init__(
        self,
        budget: Budget | None,
        files: RowFiles,
        log: CommitLog,
        schema: RowSchema,
        *,
        num_positions: int,
        local_size: int,
        guard: threading.RLock,
    ) -> None:
        self.budget = budget
        self._files = files
        self._log = log
        self._schema = schema
        self._num_positions = num_positions
        self._local_size = local_size
        self._guard = guard

    @property
    def quota_bytes(self) -> int | None:
        """Of the budget, if there is one."""
        return self.budget.quota_bytes if self.budget is not None else None

    @property
    def is_filled(self) -> bool:
        """Whether as many rows are there as the budget lets stay."""
        head = self._log.head
        return (
            self.budget is not None
            and head is not None
            and head.is_filled
            and head.quota_bytes == self.budget.quota_bytes
        )

    def count_fitting(self, budget: Budget, extents: NDArray[np.int64]) -> int:
        """Count the rows, from the first, whose variable fields have room.

        Args:
            budget: What the files may take.
            extents: int64[n]: Bytes of each row's.
        """
        all_may_fit = budget.resident_rows >= len(self._log.entries)
        limit = budget.heap_bytes if all_may_fit else budget.resident_heap_bytes
        with self._guard:
            free = self._log.space.extents
            if free.end + int(extents.sum()) <= limit:
                return len(extents)
            offsets = free.take(extents)
            free.give_back(offsets, extents)
        over = np.flatnonzero((offsets + extents > limit) & (extents > 0))
        return int(over[0]) if len(over) else len(extents)

    @property
    def may_seal(self) -> bool:
        """Whether there is room for one more file of staged rows, and then the last."""
        if self.budget is None:
            return True
        return self._log.count_sealed() < self.budget.num_seals - 2

    def window_space(self, *, local_rank: int) -> tuple[NDArray[np.int64], range]:
        """Find what this local rank may use beside the rows that stay, once it is reserved.

        Returns:
            Positions of the fixed fields, and bytes of its heap.
        """
        assert self.budget is not None
        space = self._log.space
        self._files.map()
        space.forget()
        mine = np.array_split(space.positions, self._local_size)[local_rank]
        heap = range(0)
        if self._schema.variable:
            heap = range(space.extents.end, self.budget.heap_bytes)
            self._files.heap.reserve(heap.stop)
        return mine, heap

    def has_room_to_move(self) -> bool:
        """Whether arrivals may lie beside all rows, to judge by the mean row."""
        if self.budget is None:
            return True
        if self._log.num_missing or not self.budget.has_room_to_move:
            return False
        if not self._schema.variable:
            return True
        # A tenth more, for what does not fit into the gaps.
        spare = self.arrivals_bytes() * 11 // 10
        with self._guard:
            return self._log.space.extents.end + spare <= self.budget.heap_bytes

    def may_have_room_to_move(self) -> bool:
        """Guess `has_room_to_move` of rows that are staged, before they are in the manifest."""
        if self.budget is None or not self.budget.has_room_to_move:
            return self.budget is None
        with self._guard:
            end = self._log.space.extents.end
        num_slots = len(self._log.entries)
        spare = end * (self._num_positions - num_slots) // num_slots
        return end + spare * 11 // 10 <= self.budget.heap_bytes

    def arrivals_bytes(self) -> int:
        """Guess the bytes that an epoch's arrivals add to this local rank's heap."""
        entries = self._log.entries
        spare = (self._num_positions - len(entries)) // max(self._local_size, 1)
        return spare * -(-entries.extents_total_bytes // max(len(entries), 1))

    @property
    def heaps_bytes(self) -> int:
        """What the heaps of all local ranks may take together."""
        assert self.budget is not None
        return self.budget.heap_bytes * self._local_size

    def fits(self, head: Head, *, disk_bytes: Callable[[], int]) -> bool:
        """Whether a cache that was begun under another quota, or none, may stay as it is.

        Args:
            head: Its manifest.
            disk_bytes: Counts what it takes.
        """
        budget, begun_under = self.budget, head.quota_bytes
        if budget is None:
            return True
        begun_within = begun_under is not None and begun_under <= budget.quota_bytes
        if begun_within and self._sized_within(budget):
            return True
        return not head.missing and disk_bytes() + budget.spare_bytes <= budget.quota_bytes

    def _sized_within(self, budget: Budget) -> bool:
        """Whether no file is larger than it could become; jobs of one quota may divide it anew."""
        positions = max(file.count_positions() for file in self._files.by_position)
        heaps = self._files.heap_sizes()
        return positions <= budget.positions and max(heaps, default=0) <= budget.heap_bytes


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
