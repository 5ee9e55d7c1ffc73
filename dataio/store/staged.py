"""Rows that were missing: written, then made durable and named, file by file."""

import numpy as np
from numpy.typing import NDArray

from dataio.rows.rows import Rows
from dataio.store.commit_log import CommitLog
from dataio.store.files.manifest import Entries
from dataio.store.files.row_files import RowFiles
from dataio.store.room import Room
from dataio.store.writer import RowWriter


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
        num_rows = self._room.count_fitting(rows.lengths.sum(axis=1))
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
