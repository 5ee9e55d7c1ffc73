"""Rows into free space, or again where they lie."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import CorruptRowError
from dataio.rows.rows import Rows
from dataio.store.commit_log import CommitLog
from dataio.store.disk_errors import named
from dataio.store.files.extents import find_claimed
from dataio.store.files.manifest import Entries, make_entries
from dataio.store.files.row_files import RowFiles


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
            if offsets is None:
                offsets = self._log.space.extents.take(rows.lengths.sum(axis=1))
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
