"""Rows into free space, or again where they lie; then durable, and named by the manifest.

`RowWriter` writes. `StagedRows` are rows that were missing: they are named file by file.
`Arrivals` are rows of the next epoch: written beside training, and named by a delta.
"""

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import CorruptRowError
from dataio.base.filesystem import named
from dataio.rows.rows import Rows
from dataio.store.background import Background
from dataio.store.commit_log import CommitLog
from dataio.store.files.extents import find_claimed
from dataio.store.files.manifest import Entries, make_entries
from dataio.store.files.row_files import RowFiles
from dataio.store.room import Room


class RowWriter:
    """Writes rows of this local rank.

    Args:
        directory: The cache.
        files: Its rows.
        log: Its entries, and the space that they leave free.
        local_rank: Whose heap is written.
        guard: Held while rows are written: threads do that beside one another.
    """

    def __init__(
        self,
        directory: Path,
        files: RowFiles,
        log: CommitLog,
        *,
        local_rank: int,
        guard: threading.RLock,
    ) -> None:
        self._directory = directory
        self._files = files
        self._log = log
        self._local_rank = local_rank
        self._guard = guard

    def write(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        rows: Rows,
        *,
        offsets: NDArray[np.int64] | None = None,
    ) -> Entries:
        """Write rows into free space and return what the manifest is to say of them.

        Args:
            slots: int64[num_rows]: Where they belong.
            positions: int64[num_rows]: Of the fixed fields.
            rows: The rows.
            offsets: int64[num_rows]: Of the variable fields in this local rank's heap, where the
                caller divides a part of it; None: wherever it is free.
        """
        with self._guard, named(self._directory, "write rows"):
            if offsets is None and self._files.has_heap:
                offsets = self._log.space.extents.take(rows.lengths.sum(axis=1))
            elif offsets is None:
                offsets = np.zeros(len(rows), np.int64)
            self._log.tables.count_written(self._files.write(positions, offsets, rows))
        # Copies: the rows may lie in a buffer that is used again.
        return make_entries(
            slot=slots,
            sample_id=rows.sample_id.copy(),
            checksum=rows.checksum.copy(),
            position=positions,
            heap=np.full(len(slots), self._local_rank, np.int64),
            offset=offsets,
            lengths=rows.lengths.copy(),
        )

    def give_back(self, parts: Sequence[Entries]) -> None:
        """Free the variable fields of rows that this local rank wrote, and nothing names."""
        with self._guard:
            for part in parts:
                self._log.space.give_back(part.offset[:], part.extent_bytes)

    def repair(self, slots: NDArray[np.int64], rows: Rows, *, arrived: Sequence[Entries]) -> None:
        """Write rows again where they lie, because the disk damaged their bytes.

        Args:
            slots: int64[num_rows]: Where they belong.
            rows: The rows.
            arrived: Rows that are written and named by nothing yet.

        Raises:
            CorruptRowError: If another live row claims the place, or there is none: then the
                entries are wrong.
        """
        log = self._log
        with self._guard, named(self._directory, "repair rows"):
            live = [log.entries, log.surplus, *arrived]
            live += [log.undo] if log.undo is not None else []
            places = log.entries.take(slots)
            claimed = find_claimed(places, rows.lengths, live).tolist()
            outside = np.flatnonzero(~self._files.reach(places, rows.lengths)).tolist()
            for row in (claimed + outside)[:1]:
                found = "another row claims its place" if claimed else "no file has its place"
                raise CorruptRowError(
                    f"{self._directory}: the row of slot {slots[row]} (sample "
                    f"{rows.sample_id[row]}) does not match its checksum, and {found}, expected a "
                    "place of its own: where rows lie is no longer known; run `tonari cache "
                    "verify`, which finds them again"
                )
            log.tables.count_written(self._files.overwrite(log.entries, slots, rows))


class StagedRows:
    """What this local rank has staged since it last sealed.

    Args:
        files: The cache's.
        log: Its entries.
        writer: Writes the rows.
        room: What a quota lets stay.
    """

    def __init__(self, files: RowFiles, log: CommitLog, writer: RowWriter, room: Room) -> None:
        self._files = files
        self._log = log
        self._writer = writer
        self._room = room
        self._rows: list[Entries] = []
        # Beyond what may stay in the heap: sealed only if in the end all rows fit.
        self._held_back: list[Entries] = []

    def write(self, slots: NDArray[np.int64], positions: NDArray[np.int64], rows: Rows) -> int:
        """Write rows at positions that were set aside for them.

        Returns:
            How many, from the first, the budget has room for: the others were not written.
        """
        num_rows = len(rows)
        if self._room.budget is not None and self._files.has_heap:
            num_rows = self._room.count_fitting(self._room.budget, rows.lengths.sum(axis=1))
        if num_rows:
            part = rows if num_rows == len(rows) else rows.head(num_rows)
            self._rows.append(self._writer.write(slots[:num_rows], positions[:num_rows], part))
        return num_rows

    def seal(self) -> None:
        """Make the rows durable, but for those that may have to give way to windows."""
        budget = self._room.budget
        if budget is not None and self._files.has_heap:
            limit = budget.resident_heap_bytes
            for number, part in enumerate(self._rows):
                late = part.offset[:] + part.extent_bytes > limit
                if late.any():
                    self._held_back.append(part.take(late))
                    self._rows[number] = part.take(~late)
        self._seal()

    def flush(self, *, all_fit: bool) -> None:
        """Seal the rows that were held back, or drop them."""
        held, self._held_back = self._held_back, []
        if all_fit:
            self._rows += held
            self._seal()
        else:
            self._writer.give_back(held)

    def forget(self) -> None:
        """Begin anew: nothing is staged."""
        self._rows, self._held_back = [], []

    def _seal(self) -> None:
        rows, self._rows = self._rows, []
        if not sum(map(len, rows)):
            return
        self._files.sync()
        name = f"{self._log.staged_prefix()}{self._log.count_sealed()}.arrow"
        self._log.tables.write_table(name, self._log.joined(rows))


class Arrivals:
    """What this local rank's part of the pool will hold from the next epoch on.

    Args:
        log: The entries in force.
        writer: Writes the rows.
        background: Flushes and seals them.
        local_rank: This rank's number on the node.
        local_size: Ranks on the node.
        num_arriving: Rows that come to this rank in an epoch, where it is known: with the last of
            them the epoch is sealed beside training. -1: it is not.
        guard: Held while rows are written: those of copies come on a thread of their own.
    """

    def __init__(
        self,
        log: CommitLog,
        writer: RowWriter,
        background: Background,
        *,
        local_rank: int,
        local_size: int,
        num_arriving: int,
        guard: threading.RLock,
    ) -> None:
        self._log = log
        self._writer = writer
        self._background = background
        self._local_rank = local_rank
        self._local_size = local_size
        self._num_arriving = num_arriving
        self._guard = guard
        self.written: list[Entries] = []
        # Rows that only change slot.
        self.kept: list[Entries] = []
        # Epoch and rows of the delta that was last asked for.
        self._sealed = (-1, 0)

    def write(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write rows that will live in these slots; live rows stay as they are.

        Called again and again within an epoch, by any thread; takes this local rank's free
        positions in order.
        """
        with self._guard:
            free = self._log.space.positions
            first = self._local_rank * (len(free) // self._local_size)
            if self.written:
                # Behind the last: to count what came would take longer with every call.
                first = int(np.searchsorted(free, self.written[-1].position[-1:][0])) + 1
            positions = free[first : first + len(slots)]
            assert len(positions) == len(slots), "the pool was sized for fewer arrivals"
            self.written.append(self._writer.write(slots, positions, rows))
            self._background.sync()
            self._seal_if_whole()

    def keep(self, slots: NDArray[np.int64], *, held_in: NDArray[np.int64]) -> None:
        """Let the rows of ``held_in`` live in ``slots``; no byte moves. Any thread may call it."""
        held = self._log.entries.take(held_in)
        held.slot.put(np.arange(len(slots)), slots)
        with self._guard:
            self.kept.append(held)
            self._seal_if_whole()

    def ids(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Name the slots that these rows will live in, and their samples."""
        arrived = self._log.joined(self.written)
        return arrived.slot[:], arrived.sample_id[:]

    def seal(self, epoch: int) -> None:
        """Make the rows durable, and the delta that names them. Blocks on the disk."""
        if self._sealed != (epoch, sum(map(len, [*self.written, *self.kept]))):
            self._seal_later(epoch)
        self._background.await_seals()

    def drop(self) -> None:
        """Let go of the rows, and of the delta if there is one. Blocks on the disk."""
        self._background.await_seals()
        if self._sealed[0] >= 0:
            self._log.tables.unlink([self._log.deltas(self._sealed[0])[self._local_rank]])
        written = self.written
        self.forget()
        self._writer.give_back(written)

    def forget(self) -> None:
        """Begin an epoch in which nothing has arrived."""
        self.written, self.kept, self._sealed = [], [], (-1, 0)

    def _seal_if_whole(self) -> None:
        if self._num_arriving == sum(map(len, [*self.written, *self.kept])):
            self._seal_later(self._log.epoch + 1)

    def _seal_later(self, epoch: int) -> None:
        changed = self._log.joined([*self.written, *self.kept])
        self._sealed = epoch, len(changed)
        self._background.seal(partial(self._log.seal, epoch, changed))
