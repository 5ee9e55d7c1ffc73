"""A cache's rows in its files: where books say that they lie, bytes are read and written."""

from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.manifest import Entries
from dataio.rows import Rows, RowSchema, empty_rows, row_offsets
from dataio.store import FixedFile, HeapFile


class RowFiles:
    """The arrays of a node's fixed fields, and the heaps of its variable ones.

    Knows nothing of which rows are live: every call is given the entries that say where they lie.

    Args:
        directory: The cache.
        schema: Stored form of the fields.
        local_rank: Whose heap is written.
        heap_bytes: What that heap may never exceed; None: it may grow.

    Attributes:
        fixed: One file for each fixed field.
    """

    def __init__(
        self, directory: Path, schema: RowSchema, *, local_rank: int, heap_bytes: int | None
    ) -> None:
        self._directory = directory
        self._schema = schema
        self._local_rank = local_rank
        self._heap_bytes = heap_bytes
        self.fixed = [
            FixedFile(directory / f"fixed-{number}.npy", column)
            for number, column in enumerate(schema.fixed)
        ]
        self._heaps: dict[int, HeapFile] = {}

    @property
    def heap(self) -> HeapFile:
        """This local rank's heap."""
        return self._heap(self._local_rank)

    def views(self, entries: Entries, slots: NDArray[np.int64]) -> list[list[NDArray[np.uint8]]]:
        """View variable fields in place: for each row, uint8[length] of each field."""
        bounds = np.concatenate(
            [np.zeros((len(slots), 1), np.int64), np.cumsum(entries.lengths[slots], axis=1)], axis=1
        )
        bounds += entries.offset[slots][:, None]
        views = []
        for heap, bound in zip(entries.heap[slots].tolist(), bounds.tolist(), strict=True):
            mapped = self._heap(heap).view(bound[-1])
            views.append([mapped[a:b] for a, b in pairwise(bound)])
        return views

    def read(self, entries: Entries, slots: NDArray[np.int64]) -> Rows:
        """Copy rows out, in the order of ``slots``."""
        rows = empty_rows(self._schema, entries.lengths[slots])
        self.read_into(entries, slots, rows)
        return rows

    def read_into(self, entries: Entries, slots: NDArray[np.int64], into: Rows) -> None:
        """Copy rows to where there is room for rows of their lengths. Any thread may call it."""
        into.sample_id[:] = entries.sample_id[slots]
        into.checksum[:] = entries.checksum[slots]
        positions = entries.position[slots]
        for file, column in zip(self.fixed, into.fixed, strict=True):
            # "wrap" alone copies straight into the room.
            np.take(file.rows, positions, axis=0, out=column, mode="wrap")
        if self._schema.variable and len(slots):
            self._read_extents(entries, slots, into)

    def write(self, positions: NDArray[np.int64], offsets: NDArray[np.int64], rows: Rows) -> int:
        """Write rows at positions of the fixed fields and offsets in this local rank's heap.

        Returns:
            Bytes written.
        """
        num_bytes = self._write_fixed(positions, rows)
        if not self._schema.variable:
            return num_bytes
        extents = rows.lengths.sum(axis=1)
        self.heap.write(offsets, extents, _interleave(rows))
        return num_bytes + int(extents.sum())

    def overwrite(self, entries: Entries, slots: NDArray[np.int64], rows: Rows) -> int:
        """Write rows again where they lie, in whatever heap.

        Returns:
            Bytes written.
        """
        num_bytes = self._write_fixed(entries.position[slots], rows)
        if not self._schema.variable:
            return num_bytes
        data, bounds = _interleave(rows), row_offsets(rows.lengths.sum(axis=1))
        for row, heap in enumerate(entries.heap[slots].tolist()):
            extent = data[bounds[row] : bounds[row + 1]]
            offset = entries.offset[slots[row : row + 1]]
            self._heap(heap).write(offset, np.array([len(extent)]), extent)
        return num_bytes + len(data)

    def sync(self) -> None:
        """Make durable what this local rank wrote. Blocks on the disk."""
        for file in self.fixed:
            file.sync()
        self.heap.sync()

    def _write_fixed(self, positions: NDArray[np.int64], rows: Rows) -> int:
        for file, column in zip(self.fixed, rows.fixed, strict=True):
            file.write(positions, column)
        return sum(column.nbytes for column in rows.fixed)

    def _read_extents(self, entries: Entries, slots: NDArray[np.int64], into: Rows) -> None:
        heaps, begins = entries.heap[slots], entries.offset[slots]
        ends = begins + into.lengths.sum(axis=1)
        views = {
            heap: self._heap(heap).view(int(ends[heaps == heap].max())).data
            for heap in np.unique(heaps).tolist()
        }
        for number, column in enumerate(into.variable):
            lengths, room = into.lengths[:, number], column.data
            bounds = row_offsets(lengths).tolist()
            # Slices of plain memory: half the time of views of arrays.
            places = zip(
                heaps.tolist(), begins.tolist(), (begins + lengths).tolist(), pairwise(bounds),
                strict=True,
            )  # fmt: skip
            for heap, begin, end, (start, stop) in places:
                room[start:stop] = views[heap][begin:end]
            begins = begins + lengths

    def _heap(self, number: int) -> HeapFile:
        if number not in self._heaps:
            limit = self._heap_bytes if number == self._local_rank else None
            path = self._directory / f"heap-{number}.bin"
            self._heaps[number] = HeapFile(path, limit_bytes=limit)
        return self._heaps[number]


def _interleave(rows: Rows) -> NDArray[np.uint8]:
    """Lay each row's variable fields side by side: uint8[sum of all lengths]."""
    if len(rows.variable) <= 1:
        return rows.variable[0] if rows.variable else np.empty(0, np.uint8)
    bounds = [row_offsets(rows.lengths[:, field]).tolist() for field in range(len(rows.variable))]
    parts = [
        column[bound[row] : bound[row + 1]]
        for row in range(len(rows))
        for column, bound in zip(rows.variable, bounds, strict=True)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)
