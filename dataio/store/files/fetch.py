"""Rows read into memory of their own, some time before they are used.

For pools that memory cannot hold. Whoever touches a row of a mapped file waits for the disk in the
middle of whatever it does, and a thread that does so holds the interpreter, so that all wait; pages
that were asked for ahead may be gone again when they are touched.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import CacheError, StallError
from dataio.base.filesystem import named
from dataio.rows.patch import Patches
from dataio.rows.rows import FixedColumn
from dataio.store.files.reader import ColumnFile, Located, RowReader
from dataio.store.files.store import HeapFile, check_length, open_at_random

NUM_THREADS = 16
"""Reads that a disk is asked for at once: one at a time, none has more than a part of its rate."""

PIECE_BYTES = 1 << 20
"""Longer runs are read in pieces, side by side."""

SHORT_BYTES = 16 << 10
"""Rows up to this, on average, are copied from mapped pages, many in one call: where each is read
by itself, handing over the interpreter's lock takes longer than the read."""

PAGE_BYTES = 4096
"""A page of most machines; where they are larger, more than one of these is in each."""

LEAST_TAKEN = 16
"""Rows or pages that are worth a task of their own."""


class FetchedColumn(NamedTuple):
    """A fixed field of fetched rows: uint8[num_rows, width_bytes]."""

    path: Path
    column: FixedColumn
    rows: NDArray[np.uint8]
    start_bytes: int = 0


class Extents(NamedTuple):
    """The variable fields of fetched rows, back to back: uint8[num_bytes]."""

    path: Path
    data: NDArray[np.uint8]

    def view(self, end: int) -> NDArray[np.uint8]:
        """View them up to ``end`` at least."""
        return self.data

    def close(self) -> None:
        """Do nothing: memory goes with whoever holds it last."""


class Fetched(NamedTuple):
    """Rows in memory.

    Attributes:
        reader: Reads them.
        located: Where they lie there.
    """

    reader: RowReader
    located: Located


class Fetch:
    """Rows on their way to memory.

    Args:
        parts: What reads them.
        fetched: What they are then.
        directory: For messages.
    """

    def __init__(self, parts: Sequence[Future[None]], fetched: Fetched, directory: Path) -> None:
        self._parts, self._fetched, self._directory = parts, fetched, directory

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return all(part.done() for part in self._parts)

    def cancel(self) -> None:
        """Read nothing that was not begun; of a cancelled fetch there is no result."""
        for part in self._parts:
            part.cancel()

    def result(self, timeout_s: float | None = None) -> Fetched:
        """Wait for the rows.

        Raises:
            CacheError: If a file ends before, or the disk fails.
            StallError: If it takes longer.
        """
        if wait(self._parts, timeout_s).not_done:
            raise StallError(
                f"{self._directory}: rows did not come from the disk within {timeout_s:.0f} s, "
                "expected in milliseconds; look at the disk, or raise timeout_s"
            )
        for part in self._parts:
            part.result()
        return self._fetched


class Fetcher:
    """Reads rows on threads of its own. Any thread may call it.

    Args:
        reader: The files.
    """

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tonari-fetch")
        self._files: dict[Path, int] = {}
        self._heaps: dict[int, HeapFile] = {}
        self._guard = threading.Lock()

    def fetch(
        self,
        located: Located,
        small: Mapping[str, NDArray[np.generic]] | None = None,
        cuts: Mapping[str, Patches] | None = None,
    ) -> Fetch:
        """Begin to read rows; returns at once.

        Args:
            located: Of one dimension.
            small: Fixed fields of these rows that are in memory already: dtype[num_rows, *shape].
            cuts: Fixed fields of which patches are read, and nothing else.
        """
        schema, directory = self._reader.schema, self._reader.directory
        num_rows = len(located.position)
        tasks = _Tasks()
        columns: list[ColumnFile] = []
        for number, file in enumerate(self._reader.fixed):
            known = (small or {}).get(file.column.name)
            if cuts and (part := cuts.get(file.column.name)):
                columns.append(self._patches(number, located.position, part, tasks))
                continue
            if known is not None:
                rows = np.ascontiguousarray(known).view(np.uint8)
                rows = rows.reshape(num_rows, file.column.width_bytes)
            else:
                rows = self._fixed(file, located.position, tasks)
            columns.append(FetchedColumn(file.path, file.column, rows))
        position, heap = np.arange(num_rows), np.zeros(num_rows, np.int64)
        bounds, heaps = position, {}
        if schema.variable:
            data, bounds = self._variable(located, tasks)
            heaps[0] = Extents(directory, data)
        fetched = Fetched(
            RowReader(schema, columns, directory, heaps=heaps),
            Located(located.sample_id, position, heap, bounds),
        )
        parts = [self._threads.submit(task) for task in tasks.all()]
        return Fetch(parts, fetched, directory)

    def _fixed(
        self, file: ColumnFile, position: NDArray[np.int64], tasks: "_Tasks"
    ) -> NDArray[np.uint8]:
        """Read a fixed field: uint8[num_rows, width_bytes]."""
        width = file.column.width_bytes
        rows = np.empty((len(position), width), np.uint8)
        if width <= SHORT_BYTES:
            tasks.take(file.rows, position, rows)
        else:
            start = file.start_bytes + position * width
            tasks.read(self._descriptor(file.path), file.path, start, start + width, rows.ravel())
        return rows

    def _patches(
        self, number: int, position: NDArray[np.int64], part: Patches, tasks: "_Tasks"
    ) -> FetchedColumn:
        """Read patches of a fixed field, each row of them as dtype[num, *lead, *patch]."""
        file, rows = self._reader.fixed[number], self._reader.column(number)
        shape = (part.corner.shape[1], *part.whole[: -len(part.shape)], *part.shape)
        out = np.empty((len(position), *shape), rows.dtype)
        descriptor = self._descriptor(file.path)

        def read(row: int, at: int) -> None:
            # All that is wanted is asked for at once: a page fault asks for one page
            row_start = file.start_bytes + at * file.column.width_bytes
            for start, num_bytes in part.extents(row, rows.itemsize):
                os.posix_fadvise(descriptor, row_start + start, num_bytes, os.POSIX_FADV_WILLNEED)
            part.copy(row, rows[at], out[row])

        tasks.add(partial(read, row, at) for row, at in enumerate(position.tolist()))
        column = FixedColumn(file.column.name, file.column.dtype, shape)
        return FetchedColumn(file.path, column, out.reshape(len(out), -1).view(np.uint8))

    def _variable(
        self, located: Located, tasks: "_Tasks"
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Read variable fields: their bytes, and the bounds of each row there."""
        first, last = located.bounds[:, 0], located.bounds[:, -1]
        numbers = np.unique(located.heap).tolist()
        rows_of = {number: np.flatnonzero(located.heap == number) for number in numbers}
        ends = {number: int(last[rows].max()) for number, rows in rows_of.items()}
        pages = {}
        if int((last - first).sum()) <= SHORT_BYTES * len(first):
            pages = {number: _whole_pages(self._heap(number).view(ends[number])) for number in ends}
        # What is read of a row, and where it goes: whole pages, where rows are short
        is_short = all(number in pages and ends[number] <= pages[number].size for number in ends)
        unit = PAGE_BYTES if is_short else 1
        start = first // unit
        num_units = np.where(last > first, -(-last // unit) - start, 0)
        at = np.empty_like(start)
        data = np.empty((int(num_units.sum()), unit), np.uint8)
        done = 0
        for number, rows in rows_of.items():
            at[rows] = np.cumsum(num_units[rows]) - num_units[rows] + done
            into = data[done : (done := done + int(num_units[rows].sum()))]
            if is_short:
                tasks.take(pages[number], _each(start[rows], num_units[rows]), into)
            else:
                path = self._heap(number).path
                tasks.read(self._descriptor(path), path, first[rows], last[rows], into.ravel())
        return data.ravel(), located.bounds + (unit * (at - start))[:, None]

    def _heap(self, number: int) -> HeapFile:
        with self._guard:
            if number not in self._heaps:
                heap = self._heaps[number] = HeapFile(self._reader.heap(number).path)
                heap.expect_no_neighbours()
            return self._heaps[number]

    def _descriptor(self, path: Path) -> int:
        with self._guard:
            if path not in self._files:
                with named(path.parent, f"read {path.name}"):
                    self._files[path] = open_at_random(path)
            return self._files[path]

    def close(self) -> None:
        """Stop reading; idempotent."""
        self._threads.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)
        for heap in self._heaps.values():
            heap.close()
        self._files, self._heaps = {}, {}


class _Piece(NamedTuple):
    path: Path
    descriptor: int
    offset: int
    into: memoryview


class _Tasks:
    """Collects what is to be read, and divides it among threads."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._takes: list[Callable[[], None]] = []

    def read(
        self,
        descriptor: int,
        path: Path,
        start: NDArray[np.int64],
        stop: NDArray[np.int64],
        into: NDArray[np.uint8],
    ) -> None:
        """Read extents of a file, one behind the other."""
        room, at = into.data, 0
        breaks = (np.flatnonzero(start[1:] != stop[:-1]) + 1).tolist()
        for first, last in pairwise([0, *breaks, len(start)] if len(start) else []):
            offset, end = int(start[first]), int(stop[last - 1])
            while offset < end:
                num_bytes = min(PIECE_BYTES, end - offset)
                self._pieces.append(_Piece(path, descriptor, offset, room[at : at + num_bytes]))
                offset, at = offset + num_bytes, at + num_bytes

    def take(
        self, rows: NDArray[np.uint8], numbers: NDArray[np.int64], into: NDArray[np.uint8]
    ) -> None:
        """Copy rows of a mapped file."""
        step = max(-(-len(numbers) // NUM_THREADS), LEAST_TAKEN)
        for first in range(0, len(numbers), step):
            part = slice(first, first + step)
            self._takes.append(partial(take_rows, rows, numbers[part], into[part]))

    def add(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Do what else is to be done."""
        self._takes.extend(tasks)

    def all(self) -> Iterator[Callable[[], None]]:
        """List the tasks: few, as each costs as much as a short read."""
        yield from self._takes
        for number in range(min(NUM_THREADS, len(self._pieces))):
            yield partial(_read, self._pieces[number::NUM_THREADS])


def take_rows(rows: NDArray[np.uint8], numbers: NDArray[np.int64], into: NDArray[np.uint8]) -> None:
    """Copy rows by number, without the interpreter's lock."""
    # "clip" alone without a second buffer
    rows.take(numbers, 0, into, "clip")


def _whole_pages(mapped: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """View a file: uint8[num_pages, PAGE_BYTES], without what is left at its end."""
    num_pages = len(mapped) // PAGE_BYTES
    return mapped[: num_pages * PAGE_BYTES].reshape(num_pages, PAGE_BYTES)


def _each(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """List the numbers of runs: first, first + 1 and so on, ``count`` of them, of each."""
    shift = np.repeat(first - (np.cumsum(count) - count), count)
    return shift + np.arange(len(shift))


def _read(pieces: Sequence[_Piece]) -> None:
    for path, descriptor, offset, into in pieces:
        done = 0
        with named(path.parent, f"read {path.name}"):
            while done < len(into):
                num_bytes = os.preadv(descriptor, [into[done:]], offset + done)
                if not num_bytes:
                    check_length(path, offset + len(into))
                    raise CacheError(f"{path}: ended while it was read")
                done += num_bytes
