"""A cache's rows in its files: where entries say that they lie, bytes are read and written.

Every position has a *header* beside its fixed fields, which says whose row lies there, its
checksum, and where its variable fields lie. It is written with the row and read by nothing but
`headers`: so a row can prove itself, whatever became of the manifest.
"""

import contextlib
import faulthandler
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.rows.rows import Rows, RowSchema, corrupt_rows, empty_rows, row_offsets
from dataio.store.files.manifest import Entries, make_entries
from dataio.store.files.reader import copy_out, locate
from dataio.store.files.store import FixedFile, HeapFile

HEAP_SHIFT = np.int64(48)
"""In a header the heap's number stands above the offset: heaps are few, and below 2**48 bytes."""


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
        headers: The file of headers.
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
        self.headers = FixedFile(directory / "headers.npy", schema.header)
        self._heaps: dict[int, HeapFile] = {}

    @property
    def by_position(self) -> list[FixedFile]:
        """Every file that has a row for each position."""
        return [*self.fixed, self.headers]

    @property
    def num_positions(self) -> int:
        """Positions that every file has, as it is mapped: of one that was cut there are fewer."""
        return min(len(file.rows) for file in self.by_position)

    def reserve(self, num_positions: int) -> None:
        """Claim disk space for so many positions."""
        for file in self.by_position:
            file.reserve(num_positions)

    def map(self, *, writable: bool = True) -> None:
        """Map every file that has a row for each position.

        Whatever cuts a mapped file ends the process that touches it by SIGBUS: from here on Python
        prints where, if nothing else does.
        """
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, RuntimeError, ValueError, AttributeError):
                faulthandler.enable()  # there may be no stderr
        for file in self.by_position:
            file.map(writable=writable)

    def expect_no_neighbours(self) -> None:
        """Have a page of a fixed field that is touched read without those around it."""
        for file in self.fixed:
            file.expect_no_neighbours()

    @property
    def has_heap(self) -> bool:
        """Whether there are variable fields."""
        return bool(self._schema.variable)

    def heap_sizes(self) -> list[int]:
        """List the bytes of every local rank's heap."""
        return [path.stat().st_size for path in self._directory.glob("heap-*")]

    def names(self) -> list[str]:
        """Name the files that are there."""
        kinds = ("fixed-*", "headers.npy", "heap-*")
        return [path.name for kind in kinds for path in self._directory.glob(kind)]

    def close(self) -> None:
        """Let go of the mappings, so that the kernel may drop their pages."""
        for file in self.by_position:
            file.close()
        for heap in self._heaps.values():
            heap.close()

    @property
    def heap(self) -> HeapFile:
        """This local rank's heap."""
        return self._heap(self._local_rank)

    def read(self, entries: Entries, slots: NDArray[np.int64]) -> Rows:
        """Copy rows out, in the order of ``slots``."""
        rows = empty_rows(self._schema, entries.lengths[slots])
        self.read_into(entries, slots, rows)
        return rows

    def read_into(self, entries: Entries, slots: NDArray[np.int64], into: Rows) -> None:
        """Copy rows to where there is room for rows of their lengths. Any thread may call it."""
        into.sample_id[:] = entries.sample_id[slots]
        into.checksum[:] = entries.checksum[slots]
        copy_out(self.fixed, self._heap, locate(entries, slots), into)

    def write(self, positions: NDArray[np.int64], offsets: NDArray[np.int64], rows: Rows) -> int:
        """Write rows at positions of the fixed fields and offsets in this local rank's heap.

        Returns:
            Bytes written.
        """
        heaps = np.full(len(rows), self._local_rank, np.int64)
        num_bytes = self._write_positions(positions, heaps, offsets, rows)
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
        heaps, offsets = entries.heap[slots], entries.offset[slots]
        num_bytes = self._write_positions(entries.position[slots], heaps, offsets, rows)
        if not self._schema.variable:
            return num_bytes
        data, bounds = _interleave(rows), row_offsets(rows.lengths.sum(axis=1))
        for row, heap in enumerate(heaps.tolist()):
            extent = data[bounds[row] : bounds[row + 1]]
            self._heap(heap).write(offsets[row : row + 1], np.array([len(extent)]), extent)
        return num_bytes + len(data)

    def sync(self) -> None:
        """Make durable what this local rank wrote. Blocks on the disk."""
        for file in self.by_position:
            file.sync()
        if self.has_heap:
            self.heap.sync()

    def _write_positions(
        self,
        positions: NDArray[np.int64],
        heaps: NDArray[np.int64],
        offsets: NDArray[np.int64],
        rows: Rows,
    ) -> int:
        for file, column in zip(self.fixed, rows.fixed, strict=True):
            file.write(positions, column)
        headers = self._headers(rows.sample_id, rows.checksum, heaps, offsets, rows.lengths)
        self.headers.write(positions, headers)
        return sum(column.nbytes for column in rows.fixed) + headers.nbytes

    def _headers(
        self,
        sample_id: NDArray[np.int64],
        checksum: NDArray[np.uint64],
        heaps: NDArray[np.int64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[np.uint8]:
        """Make headers: uint8[num_rows, width_bytes]."""
        headers = np.empty((len(sample_id), *self.headers.column.shape), "<i8")
        headers[:, 0], headers[:, 1] = sample_id, checksum.view(np.int64)
        if self._schema.variable:
            headers[:, 2], headers[:, 3:] = heaps << HEAP_SHIFT | offsets, lengths
        return headers.view(np.uint8).reshape(len(headers), self.headers.column.width_bytes)

    def repair_headers(self, entries: Entries, *, dry_run: bool) -> int:
        """Write the headers of these rows again where they are not what the entries say.

        Returns:
            How many were not.
        """
        position = entries.position[:]
        headers = self._headers(
            entries.sample_id[:],
            entries.checksum[:],
            entries.heap[:],
            entries.offset[:],
            entries.lengths[:],
        )
        wrong = np.flatnonzero((self.headers.rows[position] != headers).any(axis=1))
        if len(wrong) and not dry_run:
            order = wrong[np.argsort(position[wrong])]
            self.headers.write(position[order], headers[order])
        return len(wrong)

    def read_headers(self, positions: slice | NDArray[np.int64]) -> Entries:
        """Read what positions say of themselves, proved or not; slots are numbers from 0 on."""
        header = np.ascontiguousarray(self.headers.rows[positions]).view("<i8")
        num_rows, zeros = len(header), np.zeros(len(header), np.int64)
        at = np.arange(num_rows) + positions.start if isinstance(positions, slice) else positions
        begin = header[:, 2] if self._schema.variable else zeros
        return make_entries(
            slot=np.arange(num_rows),
            sample_id=header[:, 0].copy(),
            checksum=header[:, 1].copy().view(np.uint64),
            position=at,
            heap=begin >> HEAP_SHIFT,
            offset=begin & (1 << HEAP_SHIFT) - 1,
            lengths=header[:, 3:].copy(),
        )

    def prove(self, entries: Entries) -> NDArray[np.bool_]:
        """bool[n]: Whether these rows lie where entries say, whatever they say."""
        proved = (entries.sample_id[:] >= 0) & self.reach(entries, entries.lengths[:])
        rows = np.flatnonzero(proved)
        proved[rows[corrupt_rows(self.read(entries, rows))]] = False
        return proved

    def reach(self, entries: Entries, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[n]: Whether the files hold the places of entries, for fields of these lengths."""
        position, offsets, heaps = entries.position[:], entries.offset[:], entries.heap[:]
        held = (position >= 0) & (position < self.num_positions)
        held &= (lengths >= 0).all(axis=1) & (offsets >= 0)
        if self._schema.variable:
            # Floats, because damaged numbers may be beyond what their sum could hold.
            ends = offsets.astype(np.float64) + lengths.astype(np.float64).sum(axis=1)
            for heap in np.unique(heaps[held & (ends > offsets)]).tolist():
                path = self._heap_path(heap)
                size = path.stat().st_size if heap >= 0 and path.exists() else 0
                held &= (heaps != heap) | (ends <= size) | (ends == offsets)
        return held

    def _heap(self, number: int) -> HeapFile:
        if number not in self._heaps:
            limit = self._heap_bytes if number == self._local_rank else None
            self._heaps[number] = HeapFile(self._heap_path(number), limit_bytes=limit)
        return self._heaps[number]

    def _heap_path(self, number: int) -> Path:
        return self._directory / f"heap-{number}.bin"


class RowView:
    """Rows by slot, of whatever entries; a `RowStore` to read from.

    Args:
        files: Where they lie.
        entries: Of each slot.
    """

    def __init__(self, files: RowFiles, entries: Entries) -> None:
        self._files = files
        self.entries = entries

    def lengths(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[len(slots), num_variable]: Bytes of the variable fields."""
        return self.entries.lengths[slots]

    def read_rows(self, slots: NDArray[np.int64]) -> Rows:
        """Copy rows out, in the order of ``slots``."""
        return self._files.read(self.entries, slots)


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
