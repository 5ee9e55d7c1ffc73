"""Rows that are read soon are asked of the disk beforehand, where memory cannot hold them all."""

import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.base.cgroup import memory_limit
from dataio.cache.files.reader import Located, RowReader

PAGE_BYTES = mmap.PAGESIZE
MEMORY_FRACTION = 0.7
"""Of the memory there is, what the page cache may count on."""


def is_needed(reader: RowReader, *, memory_bytes: int | None = None) -> bool:
    """Whether a pool's files exceed the memory that could hold them."""
    heaps = reader.directory.glob("heap-*.bin")
    held = sum(path.stat().st_size for path in (*heaps, *(file.path for file in reader.fixed)))
    return held > MEMORY_FRACTION * (memory_limit() if memory_bytes is None else memory_bytes)


class SinglePages:
    """Has faults read their own page alone; others would bring in rows that nobody asked for.

    Any thread may call it. It concerns the mappings of one reader, in this process.

    Args:
        reader: The files.
    """

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._told: list[NDArray[np.uint8]] = []
        self._guard = threading.Lock()

    def of(self, located: Located) -> None:
        """Tell the kernel so of the files of some rows, the first time; cheap then."""
        with self._guard:
            for file in self._reader.fixed:
                self._tell(file.rows)
            if self._reader.schema.variable:
                for number in np.unique(located.heap).tolist():
                    end = int(located.bounds[located.heap == number, -1].max())
                    self._tell(self._reader.heap(number).view(end))

    def _tell(self, rows: NDArray[np.uint8]) -> None:
        if any(rows is known for known in self._told):
            return
        base: object = rows
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap):
            base.madvise(mmap.MADV_RANDOM)
        self._told.append(rows)


class Readahead:
    """Tells the kernel which pages come next. One thread makes the calls; nothing waits for them.

    Args:
        reader: The files.
    """

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._thread = ThreadPoolExecutor(1, "tonari-readahead")
        self._files: dict[Path, int] = {}
        self._single_pages = SinglePages(reader)

    def ask(self, located: Located) -> Future[None]:
        """Ask for the rows of a batch; returns at once. Any thread may call it."""
        # Before the thread comes to it: the rows may be read earlier.
        self._single_pages.of(located)
        return self._thread.submit(self._ask, located)

    def _ask(self, located: Located) -> None:
        for file in self._reader.fixed:
            start = file.start_bytes + located.position * file.column.width_bytes
            self._advise(file.path, start, start + file.column.width_bytes)
        if self._reader.schema.variable:
            for number in np.unique(located.heap).tolist():
                here = located.bounds[located.heap == number]
                self._advise(self._reader.heap(number).path, here[:, 0], here[:, -1])

    def _advise(self, path: Path, start: NDArray[np.int64], stop: NDArray[np.int64]) -> None:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        for first, last in merged(start, stop):
            os.posix_fadvise(
                self._files[path],
                first * PAGE_BYTES,
                (last - first) * PAGE_BYTES,
                os.POSIX_FADV_WILLNEED,
            )

    def close(self) -> None:
        """Stop asking; idempotent."""
        self._thread.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}


def merged(start: NDArray[np.int64], stop: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Turn extents in bytes into runs of pages, (first, past the last), ascending and disjoint."""
    some = stop > start
    first, last = start[some] // PAGE_BYTES, -(-stop[some] // PAGE_BYTES)
    order = np.argsort(first, kind="stable")
    first, last = first[order], np.maximum.accumulate(last[order])
    breaks = np.flatnonzero(first[1:] > last[:-1]) + 1
    if not len(first):
        return []
    starts = first[np.concatenate([[0], breaks])]
    stops = last[np.concatenate([breaks - 1, [len(last) - 1]])]
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
