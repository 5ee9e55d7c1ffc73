"""Slots -> batches: in blocks of steps, so that what a batch costs is one copy of its bytes.

Cheap batches are copied on the caller's thread; where rows are decoded, transformed or many bytes,
threads make the next ones meanwhile.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.assemble import Assembler, Job, OnError, Sample, Transform, Value, Work
from dataio.buffers import BufferRing
from dataio.cache import Cache
from dataio.fields import Field
from dataio.order import PADDING, Block
from dataio.prefetch import Prefetcher
from dataio.reader import RowReader, locate
from dataio.seeding import generator, key
from dataio.verify import Repair, RowVerifier, Verify

Batch = dict[str, torch.Tensor]
BatchTransform = Callable[[Batch, np.random.Generator], Batch]
Collate = Callable[[list[Sample]], object]
Pick = Callable[[int, int], Block]

BLOCK_ROWS = 32768
"""Rows that are decided and looked up at once."""

INLINE_BYTES = 16 << 20
"""Up to this a batch is copied on the caller's thread: handing it over would cost more."""


@dataclass(slots=True)
class Pending:
    """A batch on its way: what it is made of, and what is known already."""

    work: Work
    slot: NDArray[np.int64]
    sample_id: NDArray[np.int64]
    weight: NDArray[np.float32]


class Gather:
    """Makes batches of one pool's rows; the same for any number of threads or processes.

    Args:
        cache: The rows.
        fields: How each is decoded.
        num_threads: Threads that decode and transform; 0 does both on the calling thread.
        num_processes: Processes that decode and transform instead.
        transform: Changes one sample; its randomness is keyed by (seed, epoch, sample_id).
        batch_transform: Changes a batch; keyed by (seed, epoch, replica, step).
        collate: Makes a batch of a list of samples, instead of stacking them. ``weight``,
            ``sample_id`` and ``slot`` are added to a batch that is a dict.
        seed: The run's seed.
        replica: This rank's replica.
        verify: When a row's checksum is checked: ``"once"``, the first time this process reads it
            since it was written or opened; ``"always"``; ``"never"``.
        on_error: ``"skip"`` turns a row that cannot be repaired or decoded into padding.
        repair: Writes slots' rows anew from the source, once for each row found corrupt.
        prefetch: Batches made ahead on threads or processes.
        timeout_s: Longest wait for one batch.
        pinned: Make batches in memory that a GPU copies from without waiting.

    Attributes:
        num_skipped: Rows that became padding because they could not be repaired or decoded.
    """

    def __init__(
        self,
        cache: Cache,
        fields: Mapping[str, Field],
        *,
        num_threads: int,
        num_processes: int = 0,
        transform: Transform | None = None,
        batch_transform: BatchTransform | None = None,
        collate: Collate | None = None,
        seed: int = 0,
        replica: int = 0,
        verify: Verify = "once",
        on_error: OnError = "raise",
        repair: Repair | None = None,
        prefetch: int = 2,
        timeout_s: float = 600.0,
        pinned: bool = False,
    ) -> None:
        self._cache = cache
        self._fields = fields
        self._batch_transform = batch_transform
        self._collate = collate
        self._seed = seed
        self._replica = replica
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._ring = BufferRing(pinned=pinned)
        self._reader = RowReader(cache.schema, cache.fixed, cache.directory)
        self._verifier = RowVerifier(
            cache, self._reader, verify=verify, on_error=on_error, repair=repair
        )
        self._assembler = Assembler(
            self._reader,
            fields,
            ring=self._ring,
            transform=transform,
            keep_samples=collate is not None,
            seed=seed,
            on_error=on_error,
        )
        self._num_threads = num_threads
        self._threads = (
            ThreadPoolExecutor(num_threads, "tonari-decode") if num_threads > 0 else None
        )
        self._running: Stoppable | None = None
        self._lock = threading.Lock()
        self.num_skipped = 0

    def batches(self, pick: Pick, steps: range, *, epoch: int) -> Iterator[Batch]:
        """Make the batches of some steps, in order. Stops the batches that were asked for before.

        Args:
            pick: ``(first_step, num_steps)`` -> their slots and weights; called on this thread.
            steps: The steps, one after the other.
            epoch: For the transforms' randomness.

        Returns:
            Batches: the fields, and ``weight`` float32[batch], ``sample_id`` int64[batch], ``slot``
            int64[batch]; the last two are PADDING on rows that only keep the shape.
        """
        self.stop()
        pending = self._pending(pick, steps, epoch)
        if self._threads is None or not self._prefetch:
            return map(self._make, pending)
        first = next(pending, None)
        if first is None:
            return iter(())
        pending = _chain(first, pending)
        if self._is_cheap(len(first.slot)):
            return map(self._make, pending)
        running = Prefetcher(self._submit, pending, depth=self._prefetch, timeout_s=self._timeout_s)
        self._running = running
        return iter(running)

    def _is_cheap(self, batch_size: int) -> bool:
        batch_bytes = batch_size * self._cache.schema.fixed_bytes
        by_row = self._assembler.by_row or self._batch_transform is not None
        return not by_row and batch_bytes <= INLINE_BYTES

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        return self._running.ready if self._running is not None else 0

    def stop(self) -> None:
        """Make no more of the batches asked for. Blocks until none is being made; idempotent."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def close(self) -> None:
        """Stop threads and processes; idempotent."""
        self.stop()
        if self._threads is not None:
            self._threads.shutdown()

    def _pending(self, pick: Pick, steps: range, epoch: int) -> Iterator[Pending]:
        # A short block first, so that the first batch comes soon; then long ones.
        num_steps = 4
        while steps:
            block = pick(steps.start, min(num_steps, len(steps)))
            yield from self._located(block, steps.start, epoch)
            steps = steps[len(block.slots) :]
            num_steps = max(BLOCK_ROWS // block.slots.shape[1], 1)

    def _located(self, block: Block, first_step: int, epoch: int) -> Iterator[Pending]:
        slots = block.slots
        located = locate(self._cache.entries, slots)
        small = self._assembler.gather_small(located.position)
        padding = np.arange(slots.shape[1]) >= block.num_valid[:, None]
        sample_id = np.where(padding, PADDING, located.sample_id)
        slot = np.where(padding, PADDING, slots)
        unchecked = self._verifier.unchecked(slots)
        for number in range(len(slots)):
            work = Work(
                epoch,
                first_step + number,
                located[number],
                {name: column[number] for name, column in small.items()},
            )
            if unchecked is None or unchecked[number]:
                self._check(work, slots[number])
            yield Pending(work, slot[number], sample_id[number], block.weight[number])

    def _check(self, work: Work, slots: NDArray[np.int64]) -> None:
        found = self._verifier.check(slots, work.located)
        if found.relocated is not None:
            work.located = found.relocated
            work.small = self._assembler.gather_small(work.located.position)
        work.bad.update(found.bad)

    def _make(self, pending: Pending) -> Batch:
        job = self._assembler.prepare(pending.work)
        self._assembler.run(job, 0, len(pending.slot))
        return self._finish(job, pending)

    def _submit(self, pending: Pending) -> Future[Batch]:
        """Give a batch's rows to the threads, a few at a time; the last to end puts it together."""
        assert self._threads is not None
        job = self._assembler.prepare(pending.work)
        num_rows = len(pending.slot)
        num_parts = min(4 * self._num_threads, num_rows) if self._assembler.by_row else 1
        bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
        parts = _Parts(num_parts, lambda: self._finish(job, pending))
        for start, stop in pairwise(bounds):
            self._threads.submit(parts.run, self._assembler.run, job, start, stop)
        return parts.batch

    def _finish(self, job: Job, pending: Pending) -> Batch:
        if job.work.bad:
            self._pad(pending, sorted(job.work.bad))
        known = {
            "weight": torch.from_numpy(pending.weight),
            "sample_id": torch.from_numpy(pending.sample_id),
            "slot": torch.from_numpy(pending.slot),
        }
        if self._collate is not None:
            collated = self._collate(self._assembler.samples(job))
            batch: Batch = collated | known if isinstance(collated, dict) else collated  # type: ignore[assignment]
        else:
            values = self._assembler.finish(job)
            batch = {name: _tensor(value) for name, value in values.items()} | known
        if self._batch_transform is not None:
            stream = key(
                self._seed,
                "batch_transform",
                epoch=job.work.epoch,
                replica=self._replica,
                step=job.work.step,
            )
            batch = self._batch_transform(batch, generator(stream))
        return batch

    def _pad(self, pending: Pending, bad: list[int]) -> None:
        # Padding that is bad too was never going to be trained on.
        with self._lock:
            self.num_skipped += int((pending.slot[bad] != PADDING).sum())
        pending.slot[bad] = PADDING
        pending.sample_id[bad] = PADDING
        pending.weight[bad] = 0


class Stoppable(Protocol):
    """Batches under way."""

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        ...

    def close(self) -> None:
        """Begin nothing more, and wait for what is under way; idempotent."""
        ...


class _Parts:
    """Counts the parts of a batch that threads work on; the lock guards the count and the error."""

    def __init__(self, num_parts: int, finish: Callable[[], Batch]) -> None:
        self.batch: Future[Batch] = Future()
        self._left = num_parts
        self._finish = finish
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[Job, int, int], None], job: Job, start: int, stop: int) -> None:
        try:
            if self._error is None:
                work(job, start, stop)
        except BaseException as error:  # handed to the caller, who raises it
            self._error = error
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            if self._error is not None:
                raise self._error
            self.batch.set_result(self._finish())
        except BaseException as error:  # handed to the caller, who raises it
            self.batch.set_exception(error)


def _chain(first: Pending, rest: Iterator[Pending]) -> Iterator[Pending]:
    yield first
    yield from rest


def _tensor(value: Value) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    # Bytes and text have no tensor form: they stay a list, the one exception.
    if value and isinstance(value[0], np.ndarray):
        return [torch.from_numpy(row) for row in value]  # type: ignore[return-value]
    return value  # type: ignore[return-value]
