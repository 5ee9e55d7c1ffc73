"""Rows that do not stay in the cache: read from the source just before their batches.

The order of an epoch is known, so a thread reads the missing rows of the next *window* of steps
while the batches of this one are made: each row once, in the source's own order. A window lies in
one half of the space that this rank has beside the rows that stay. The thread reads the source and
writes files; the caller's thread alone changes the manifest in memory; a queue lies between them.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import QuotaError, SourceError, StallError
from dataio.rows.fields import Field
from dataio.rows.rows import Rows
from dataio.source.base import Source
from dataio.store.cache import Cache
from dataio.store.files.manifest import Entries, join_entries

FIRST_WINDOW_BYTES = 32 << 20
"""The first window of an epoch is short, so that its first batch comes soon; the next double."""

LOOK_S = 0.2
"""For which a look for the next window waits."""
FILL = 0.9
"""Of a window's heap, what is planned for: the rows' sizes are only guessed."""

MOST_STEPS = 1 << 16

SlotsOf = Callable[[int, int], NDArray[np.int64]]
"""(first_step, num_steps) -> int64[num_steps, batch]."""


@dataclass
class Streamed:
    """What was read beside the rows that stay.

    Attributes:
        rows: How many.
        bytes: Theirs, as they are stored.
        wait_s: Seconds that their batches waited for them.
        read_s: Seconds that the source took, on the thread that reads.
        keeps_sizes: Whether to note what each row takes.
        sizes: Slots and their rows' bytes, int64[n] each, until somebody takes them. The thread
            that reads appends; the loader's own takes, when that thread has ended.
    """

    rows: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    read_s: float = 0.0
    keeps_sizes: bool = False
    sizes: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=list)


@dataclass(frozen=True)
class WindowHalf:
    """Where a window's rows may lie: positions of the fixed fields, bytes of this rank's heap."""

    positions: NDArray[np.int64]
    heap: range


@dataclass(frozen=True)
class WindowRows:
    """Rows that a window needs, in the order of their samples.

    Attributes:
        slots: int64[n]: Distinct.
        sample_ids: int64[n]: Ascending.
        steps: int64[n]: The first step that needs each.
    """

    slots: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    steps: NDArray[np.int64]

    def until(self, step: int) -> "WindowRows":
        """Keep what the steps before this one need."""
        needed = self.steps < step
        return WindowRows(self.slots[needed], self.sample_ids[needed], self.steps[needed])


@dataclass(frozen=True)
class Window:
    """Rows that were read, and the steps that can be trained with them."""

    steps: range
    entries: list[Entries] = field(default_factory=list)
    num_halves: int = 1


class Streaming:
    """The windows of some steps, one after the other.

    Args:
        source: Where the rows come from.
        fields: What is kept of a sample.
        cache: Their files.
        halves: Space for two windows.
        sample_ids: int64[num_slots]: Of every slot.
        slots_of: The order.
        steps: Those to train.
        timeout_s: Longest wait for a window.
        streamed: Counts what is read.
    """

    def __init__(
        self,
        source: Source,
        fields: Mapping[str, Field],
        cache: Cache,
        *,
        halves: tuple[WindowHalf, WindowHalf],
        sample_ids: NDArray[np.int64],
        slots_of: SlotsOf,
        steps: range,
        timeout_s: float,
        streamed: Streamed,
    ) -> None:
        self._source = source
        self._fields = fields
        self._cache = cache
        self._halves = halves
        self._sample_ids = sample_ids
        self._slots_of = slots_of
        self._steps = steps
        self._timeout_s = timeout_s
        self._streamed = streamed
        self._missing = ~cache.entries.present
        num_missing = max(int(self._missing.sum()), 1)
        self._missing_fraction = num_missing / len(self._missing)
        present = len(self._missing) - num_missing
        total = cache.entries.extents_total_bytes
        self._mean_extent = total / present if present > 0 else 0.0
        self._free = threading.Semaphore(len(halves))
        self._ready: queue.Queue[Window | BaseException] = queue.Queue()
        self._stopped = threading.Event()
        self._current: Window | None = None
        self._thread = threading.Thread(target=self._load_all, name="tonari-window", daemon=True)

    def windows(self) -> Iterator[range]:
        """Yield runs of steps, each when its rows lie in the cache; asking for more drops them."""
        self._thread.start()
        step = self._steps.start
        while step < self._steps.stop:
            window = self._await()
            if window is None:
                return
            for part in window.entries:
                self._cache.entries.put(part)
            self._current = window
            step = window.steps.stop
            yield window.steps
            if self._stopped.is_set():
                return
            self._drop()
            self._free.release(window.num_halves)

    def _await(self) -> Window | None:
        started, num_looks = time.perf_counter(), 0
        try:
            while not self._stopped.is_set():
                try:
                    found = self._ready.get(timeout=LOOK_S)
                except queue.Empty:
                    # Not seconds: a process that was stopped takes no source for slow.
                    num_looks += 1
                    if num_looks * LOOK_S >= self._timeout_s:
                        raise self._stalled() from None
                    continue
                if isinstance(found, BaseException):
                    raise found
                return found
            return None
        finally:
            self._streamed.wait_s += time.perf_counter() - started

    def _stalled(self) -> StallError:
        return StallError(
            f"{self._source.name}: the rows of the next steps were not read within "
            f"{self._timeout_s:.0f} s, expected them while the steps before were trained; look for "
            "a slow or broken source, or raise the quota so that more rows stay"
        )

    def _drop(self) -> None:
        if self._current is None:
            return
        for part in self._current.entries:
            self._cache.entries.forget(part.slot[:])
        self._current = None

    def close(self) -> None:
        """Stop reading, and forget the rows that are there; idempotent."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._free.release(len(self._halves))
        if self._thread.ident is not None:
            self._thread.join(self._timeout_s)
        self._drop()

    def _load_all(self) -> None:
        try:
            step, number = self._steps.start, 0
            row_bytes = self._cache.schema.fixed_bytes + self._mean_extent
            most_rows = int(FIRST_WINDOW_BYTES / max(row_bytes, 1.0))
            while step < self._steps.stop:
                self._free.acquire()
                if self._stopped.is_set():
                    return
                window = self._load(step, self._halves[number % 2], most_rows)
                if window is None:
                    return
                self._ready.put(window)
                step, number, most_rows = window.steps.stop, number + 1, 2 * most_rows
        except BaseException as error:  # handed to the caller, who raises it
            self._ready.put(error)

    def _load(self, first_step: int, half: WindowHalf, most_rows: int) -> Window | None:
        """Read a window; shorter than planned, if its rows are larger; None if stopped."""
        num_halves = 1
        most_rows = min(most_rows, rows_for(half, self._mean_extent))
        missing, stop = self._plan(first_step, most_rows)
        while not self._stopped.is_set():
            needed = missing.until(stop)
            if len(needed.slots) <= len(half.positions):
                window = Window(range(first_step, stop), num_halves=num_halves)
                if self._read(needed, half, window):
                    return window
                if self._stopped.is_set():
                    return None
            if stop == first_step + 1 and num_halves == 1:
                # One large batch: nothing is read ahead of it.
                self._free.acquire()
                half, num_halves = _joined(self._halves), 2
                continue
            if stop == first_step + 1:
                raise QuotaError(
                    f"{self._cache.directory}: the rows of step {first_step} do not fit beside "
                    "those that stay, expected room for a batch; raise the quota "
                    "or lower batch_size"
                )
            # The rows that were read show how large rows are.
            likely = self._plan(first_step, rows_for(half, self._mean_extent))[1]
            stop = max(min(first_step + (stop - first_step) // 2, likely), first_step + 1)
        return None

    def _plan(self, first_step: int, most_rows: int) -> tuple[WindowRows, int]:
        """Find the rows of as many steps as are expected to fit, and where these steps end."""
        batch = self._slots_of(first_step, 1).size
        guess = int(1.2 * most_rows / (batch * self._missing_fraction)) + 2
        num_steps = min(guess, self._steps.stop - first_step, MOST_STEPS)
        slots = self._slots_of(first_step, num_steps)
        missing = self._missing[slots]
        counts = np.cumsum(missing.sum(axis=1))
        stop = first_step + max(int(np.searchsorted(counts, most_rows, side="right")), 1)
        steps = np.repeat(np.arange(first_step, first_step + num_steps), batch)
        unique, first = np.unique(slots[missing], return_index=True)
        steps = steps[missing.reshape(-1)][first]
        ids = self._sample_ids[unique]
        order = np.argsort(ids, kind="stable")
        return WindowRows(unique[order], ids[order], steps[order]).until(stop), stop

    def _read(self, needed: WindowRows, half: WindowHalf, window: Window) -> bool:
        """Read rows into a half; False if it is too small for them, or nobody wants them."""
        done, offset = 0, half.heap.start
        for rows in self._timed(self._source.read(needed.sample_ids, self._fields)):
            extents = rows.lengths.sum(axis=1)
            num_bytes = int(extents.sum())
            if self._streamed.keeps_sizes:
                slots = needed.slots[done : done + len(rows)]
                self._streamed.sizes.append((slots, extents + self._cache.schema.fixed_bytes))
            self._streamed.rows += len(rows)
            self._streamed.bytes += num_bytes + sum(column.nbytes for column in rows.fixed)
            if self._stopped.is_set() or offset + num_bytes > max(half.heap.stop, offset):
                self._learn(window, rows.lengths)
                return False
            here = slice(done, done + len(rows))
            positions = half.positions[here]
            offsets = np.where(extents > 0, offset + np.cumsum(extents) - extents, 0)
            window.entries.append(
                self._cache.writer.write(needed.slots[here], positions, rows, offsets=offsets)
            )
            done, offset = done + len(rows), offset + num_bytes
        if done != len(needed.slots):
            raise SourceError(
                f"{self._source.name}: {done} of {len(needed.slots)} rows could be read; the "
                "source is not what its index says: remove the index or write it again"
            )
        if window.entries:
            window.entries[:] = [join_entries(window.entries, len(self._cache.schema.variable))]
        self._learn(window, np.empty((0, 0), np.int64))
        return True

    def _timed(self, blocks: Iterator[Rows]) -> Iterator[Rows]:
        while True:
            started = time.perf_counter()
            rows = next(blocks, None)
            self._streamed.read_s += time.perf_counter() - started
            if rows is None:
                return
            yield rows

    def _learn(self, window: Window, more: NDArray[np.int64]) -> None:
        """Guess the next rows' sizes by the largest mean seen so far."""
        lengths = [part.extent_bytes for part in window.entries] + [more.sum(axis=1)]
        seen = np.concatenate(lengths)
        if len(seen):
            self._mean_extent = max(self._mean_extent, float(seen.mean()))


def rows_for(half: WindowHalf, mean_extent: float) -> int:
    """Count the rows that a window is planned to hold, by what one takes of a heap on average."""
    rows = len(half.positions)
    return min(rows, int(FILL * len(half.heap) / mean_extent)) if mean_extent else rows


def planned_windows(
    num_rows: float, *, of_batch: float, most_rows: float, row_bytes: float
) -> Iterator[tuple[int, float]]:
    """Plan an epoch's windows of a rank, which hold whole batches, in runs of equal ones.

    Args:
        num_rows: That do not stay.
        of_batch: How many of them a batch has, on average.
        most_rows: That fit into a window.
        row_bytes: Mean.

    Yields:
        How many windows, and the rows of each.
    """
    most, left = max(int(FIRST_WINDOW_BYTES / max(row_bytes, 1.0)), 1), float(num_rows)
    while left > 1e-6 + 1e-12 * num_rows:
        batches = max(min(most, most_rows) // of_batch, 1)
        rows = min(batches * of_batch, left)
        # From here on none is larger
        count = max(int(left // rows), 1) if most >= most_rows else 1
        yield count, rows
        left, most = left - count * rows, 2 * most


def _joined(halves: tuple[WindowHalf, WindowHalf]) -> WindowHalf:
    first, second = halves
    positions = np.concatenate([first.positions, second.positions])
    return WindowHalf(positions, range(first.heap.start, second.heap.stop))


def halve(positions: NDArray[np.int64], heap: range) -> tuple[WindowHalf, WindowHalf]:
    """Cut a rank's space in two."""
    middle, between = len(positions) // 2, heap.start + len(heap) // 2
    return (
        WindowHalf(positions[:middle], range(heap.start, between)),
        WindowHalf(positions[middle:], range(between, heap.stop)),
    )
