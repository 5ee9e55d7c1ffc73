"""Rows read into memory of their own, some time before they are used.

For pools that memory cannot hold. Whoever touches a row of a mapped file waits for the disk in the
middle of whatever it does, and a thread that does so holds the interpreter, so that all wait; pages
that were asked for ahead may be gone again when they are touched.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.base.cgroup import memory_limit
from dataio.base.errors import CacheError, StallError
from dataio.cache.disk_errors import named
from dataio.cache.files.reader import ColumnFile, Located, RowReader
from dataio.cache.files.store import check_length, open_at_random
from dataio.rows.rows import FixedColumn

MEMORY_FRACTION = 0.7
"""Of the memory there is, what the page cache may count on."""

NUM_THREADS = 16
"""Reads that a disk is asked for at once: one at a time, none has more than a part of its rate."""

PIECE_BYTES = 1 << 20
"""Longer runs are read in pieces, side by side."""


def is_needed(reader: RowReader, *, memory_bytes: int | None = None) -> bool:
    """Whether a pool's files exceed the memory that could hold them."""
    heaps = reader.directory.glob("heap-*.bin")
    held = sum(path.stat().st_size for path in (*heaps, *(file.path for file in reader.fixed)))
    return held > MEMORY_FRACTION * (memory_limit() if memory_bytes is None else memory_bytes)


class Column(NamedTuple):
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
        self._guard = threading.Lock()

    def fetch(
        self, located: Located, small: Mapping[str, NDArray[np.generic]] | None = None
    ) -> Fetch:
        """Begin to read rows; returns at once.

        Args:
            located: Of one dimension.
            small: Fixed fields of these rows that are in memory already: dtype[num_rows, *shape].
        """
        num_rows = len(located.position)
        pieces: list[_Piece] = []
        columns: list[ColumnFile] = []
        for file in self._reader.fixed:
            width, known = file.column.width_bytes, (small or {}).get(file.column.name)
            if known is not None:
                rows = np.ascontiguousarray(known).view(np.uint8).reshape(num_rows, width)
            else:
                rows = np.empty((num_rows, width), np.uint8)
                start = file.start_bytes + located.position * width
                pieces += self._pieces(file.path, start, start + width, rows.reshape(-1))
            columns.append(Column(file.path, file.column, rows))
        position, heap, heaps = np.arange(num_rows), np.zeros(num_rows, np.int64), {}
        bounds = position
        if self._reader.schema.variable:
            first, last = located.bounds[:, 0], located.bounds[:, -1]
            ends = np.cumsum(last - first)
            bounds = located.bounds + (ends - last)[:, None]
            data = np.empty(int(ends[-1]) if num_rows else 0, np.uint8)
            for number in np.unique(located.heap).tolist():
                rows_here = np.flatnonzero(located.heap == number)
                path = self._reader.heap(number).path
                for run in np.split(rows_here, np.flatnonzero(np.diff(rows_here) != 1) + 1):
                    part = data[bounds[run[0], 0] : bounds[run[-1], -1]]
                    pieces += self._pieces(path, first[run], last[run], part)
            heaps[0] = Extents(self._reader.directory, data)
        # A few tasks for many rows: each costs as much as a short read
        parts = [
            self._threads.submit(_read, pieces[number::NUM_THREADS])
            for number in range(min(NUM_THREADS, len(pieces)))
        ]
        schema, directory = self._reader.schema, self._reader.directory
        fetched = Fetched(
            RowReader(schema, columns, directory, heaps=heaps),
            Located(located.sample_id, position, heap, bounds),
        )
        return Fetch(parts, fetched, directory)

    def _pieces(
        self, path: Path, start: NDArray[np.int64], stop: NDArray[np.int64], into: NDArray[np.uint8]
    ) -> Iterator["_Piece"]:
        """Cut what is to be read from a file, in order, to fill ``into``."""
        if not len(into):
            return
        descriptor = self._descriptor(path)
        room, at = into.data, 0
        breaks = (np.flatnonzero(start[1:] != stop[:-1]) + 1).tolist()
        for first, last in pairwise([0, *breaks, len(start)]):
            offset, end = int(start[first]), int(stop[last - 1])
            while offset < end:
                num_bytes = min(PIECE_BYTES, end - offset)
                yield _Piece(path, descriptor, offset, room[at : at + num_bytes])
                offset, at = offset + num_bytes, at + num_bytes

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
        self._files = {}


class _Piece(NamedTuple):
    path: Path
    descriptor: int
    offset: int
    into: memoryview


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
