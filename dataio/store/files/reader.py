"""Where rows lie -> their bytes, in mapped files; in any process of the node."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.cgroup import memory_limit
from dataio.rows.rows import FixedColumn, Rows, RowSchema, bind_checksums, row_offsets
from dataio.store.files.manifest import Entries
from dataio.store.files.store import HeapFile, check_length

MEMORY_FRACTION = 0.7
"""Of the memory there is, what the page cache may count on."""


class Located(NamedTuple):
    """Where the rows of a batch lie, and whose they are: all that reading them takes.

    Attributes:
        sample_id: int64[batch].
        position: int64[batch]: Row of the fixed fields' arrays.
        heap: int64[batch]: Heap file of the variable fields.
        bounds: int64[batch, num_variable + 1]: Where each variable field begins there, and its end.
    """

    sample_id: NDArray[np.int64]
    position: NDArray[np.int64]
    heap: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def rows(self, rows: NDArray[np.int64]) -> "Located":
        """Pick rows by number."""
        return Located(*(column[rows] for column in self))


def locate(entries: Entries, slots: NDArray[np.int64]) -> Located:
    """Look up the rows of slots of any shape; the fields then have that shape."""
    sample_id, position = entries.sample_id[slots], entries.position[slots]
    num_variable = len(entries.lengths.columns)
    if not num_variable:
        return Located(sample_id, position, position, position)
    # int64[..., num_variable + 1]
    bounds = np.empty((*slots.shape, num_variable + 1), np.int64)
    bounds[..., 0] = entries.offset[slots]
    np.cumsum(entries.lengths[slots], axis=-1, out=bounds[..., 1:])
    bounds[..., 1:] += bounds[..., :1]
    return Located(sample_id, position, entries.heap[slots], bounds)


class ColumnFile(Protocol):
    """A fixed field: a mapped file, or rows in memory.

    Attributes:
        start_bytes: Where its rows begin in the file.
    """

    @property
    def path(self) -> Path: ...
    @property
    def column(self) -> FixedColumn: ...
    @property
    def start_bytes(self) -> int: ...
    @property
    def rows(self) -> NDArray[np.uint8]: ...


class ExtentFile(Protocol):
    """Variable fields: a mapped file, or rows in memory."""

    @property
    def path(self) -> Path: ...
    def view(self, end: int) -> NDArray[np.uint8]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class RowPieces:
    """Bytes of rows, in place, as a sequence of them.

    Attributes:
        mapped: Heaps by number.
        heap: int64[num_rows]: Of each row; there from start to stop.
        addresses: uint64[num_rows]: Where it lies, as long as this is kept.
    """

    mapped: Mapping[int, memoryview]
    heap: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    addresses: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.heap)

    def __getitem__(self, row: int) -> memoryview:
        return self.mapped[int(self.heap[row])][int(self.start[row]) : int(self.stop[row])]

    def __iter__(self) -> Iterator[memoryview]:
        places = zip(self.heap.tolist(), self.start.tolist(), self.stop.tolist(), strict=True)
        return (self.mapped[heap][start:stop] for heap, start, stop in places)


class RowReader:
    """Reads a pool's files. Thread-safe.

    Args:
        schema: Stored form of the rows.
        fixed: The mapped files of the fixed fields.
        directory: Where the heap files lie.
        heaps: Of these numbers others take their place.
    """

    def __init__(
        self,
        schema: RowSchema,
        fixed: Sequence[ColumnFile],
        directory: Path,
        *,
        heaps: Mapping[int, ExtentFile] | None = None,
    ) -> None:
        self.schema = schema
        self.fixed = fixed
        self.directory = directory
        self._heaps: dict[int, ExtentFile] = dict(heaps or {})
        self._columns: dict[int, tuple[NDArray[np.uint8], NDArray[np.generic]]] = {}

    def column(self, number: int) -> NDArray[np.generic]:
        """View a fixed field of all positions: dtype[num_positions, *shape]."""
        file = self.fixed[number]
        mapped, column = self._columns.get(number, (None, file.rows))
        if mapped is not file.rows:
            column = file.rows.view(file.column.dtype).reshape(len(file.rows), *file.column.shape)
            self._columns[number] = file.rows, column
        return column

    def pieces(
        self, heap: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64]
    ) -> RowPieces:
        """View an extent for each row, in place."""
        addresses, mapped = start.astype(np.uint64), {}
        numbers = set(heap.tolist())
        for number in numbers:
            its = heap == number if len(numbers) > 1 else slice(None)
            view = self.heap(number).view(int(stop[its].max()))
            mapped[number] = view.data
            addresses[its] += np.uint64(view.ctypes.data)
        return RowPieces(mapped, heap, start, stop, addresses)

    def close(self) -> None:
        """Let go of the mappings."""
        self._columns.clear()
        for heap in self._heaps.values():
            heap.close()

    def check_files(self, entries: Entries) -> None:
        """Look, as batches are begun, whether anything has cut or removed what is to be read.

        Args:
            entries: Say where the pool's rows lie.

        Raises:
            CacheError: If so. Touching a mapped part that is gone would end the process.
        """
        for file in self.fixed:
            if file.rows.nbytes:
                check_length(file.path, file.start_bytes + file.rows.nbytes)
        if not self.schema.variable:
            return
        present = np.flatnonzero(entries.present)
        heaps = entries.heap[present]
        ends = entries.offset[present] + entries.lengths[present].sum(axis=-1)
        for number in np.unique(heaps).tolist():
            path = self.directory / f"heap-{number}.bin"
            check_length(path, int(ends[heaps == number].max()))

    def heap(self, number: int) -> ExtentFile:
        """Open a heap file."""
        if number not in self._heaps:
            self._heaps[number] = HeapFile(self.directory / f"heap-{number}.bin")
        return self._heaps[number]

    def read_into(self, located: Located, into: Rows) -> None:
        """Copy the fields of rows to where there is room for rows of their lengths."""
        copy_out(self.fixed, self.heap, located, into)

    def checksums(self, located: Located) -> NDArray[np.uint64]:
        """Hash rows where they lie, without a copy: uint64[num_rows]."""
        pieces = []
        for file in self.fixed:
            width, data = file.column.width_bytes, file.rows.reshape(-1).data
            pieces.append([data[p * width : (p + 1) * width] for p in located.position.tolist()])
        if self.schema.variable:
            # A row's variable fields lie back to back: one piece.
            bounds = located.bounds
            pieces.append([*self.pieces(located.heap, bounds[:, 0], bounds[:, -1])])
        hashed = map(xxhash.xxh3_64_intdigest if len(pieces) == 1 else _digest, *pieces)
        sums = np.fromiter(hashed, np.uint64, len(located.position))
        return bind_checksums(sums, located.sample_id)


def _digest(first: memoryview, *rest: memoryview) -> int:
    digest = xxhash.xxh3_64(first)
    for piece in rest:
        digest.update(piece)
    return digest.intdigest()


def copy_out(
    fixed: Sequence[ColumnFile],
    heap_of: Callable[[int], ExtentFile],
    located: Located,
    into: Rows,
) -> None:
    """Copy the fields of rows to where there is room for rows of their lengths."""
    for file, column in zip(fixed, into.fixed, strict=True):
        # "wrap" alone copies straight into the room.
        np.take(file.rows, located.position, axis=0, out=column, mode="wrap")
    if not into.variable or not len(into):
        return
    heaps, bounds = located.heap, located.bounds
    views = {
        heap: heap_of(heap).view(int(bounds[heaps == heap, -1].max())).data
        for heap in np.unique(heaps).tolist()
    }
    for number, column in enumerate(into.variable):
        room = column.data
        places = zip(
            heaps.tolist(), bounds[:, number].tolist(), bounds[:, number + 1].tolist(),
            pairwise(row_offsets(into.lengths[:, number]).tolist()), strict=True,
        )  # fmt: skip
        # Slices of plain memory: half the time of views of arrays.
        for heap, begin, end, (start, stop) in places:
            room[start:stop] = views[heap][begin:end]


def exceeds_memory(
    reader: RowReader, *, memory_bytes: int | None = None, num_tiles: int = 1
) -> bool:
    """Whether a pool's files exceed the memory that could hold them, and those of other tiles."""
    heaps = reader.directory.glob("heap-*.bin")
    held = sum(path.stat().st_size for path in (*heaps, *(file.path for file in reader.fixed)))
    limit = memory_limit() if memory_bytes is None else memory_bytes
    return num_tiles * held > MEMORY_FRACTION * limit
