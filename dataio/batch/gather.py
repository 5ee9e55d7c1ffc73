"""Slots -> batches: in blocks of steps, so that what a batch costs is one copy of its bytes.

Cheap batches are copied on the caller's thread; where rows are decoded, transformed or many bytes,
threads make the next ones meanwhile.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, pairwise, repeat, starmap
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.base.buffers import BufferRing
from dataio.base.errors import CorruptRowError
from dataio.base.seeding import key
from dataio.batch.assemble import Assembler, Job, OnError, Sample, Transform, Value, Work
from dataio.batch.global_generators import globals_kept
from dataio.batch.prefetch import Prefetcher
from dataio.batch.process_transform import Made, Recipe, WorkerProcesses
from dataio.batch.verify import Repair, RowVerifier, Verify
from dataio.batch.watch import How, Watch
from dataio.cache.cache import Cache
from dataio.cache.files.readahead import Readahead, is_needed
from dataio.cache.files.reader import Located, RowReader, locate
from dataio.plan.order import PADDING, Block
from dataio.rows.fields import Field

Batch = dict[str, torch.Tensor]
BatchTransform = Callable[[Batch, np.random.Generator], Batch]
Collate = Callable[[list[Sample]], object]
Pick = Callable[[int, int], Block]

BLOCK_ROWS = 32768
"""Rows that are decided and looked up at once."""

ASKED_AHEAD = 8
"""Batches whose rows are asked of the disk before they are read."""

INLINE_BYTES = 16 << 20
"""Up to this a batch is copied on the caller's thread: handing it over would cost more."""


@dataclass(slots=True)
class Pending:
    """A batch on its way: what it is made of, and what is known already.

    Attributes:
        unchecked: Slots of its rows, if their checksums are to be checked.
    """

    work: Work
    slot: NDArray[np.int64]
    sample_id: NDArray[np.int64]
    weight: NDArray[np.float32]
    unchecked: NDArray[np.int64] | None


class Unfinished(NamedTuple):
    """A batch whose rows are filled; the rest of it is for the loader's own thread.

    Attributes:
        how: Its ``collate`` and ``batch_transform`` are called.
    """

    job: Job
    pending: Pending
    how: How


class LookedUp(NamedTuple):
    """A block of steps, and where its rows lie; all arrays begin with [steps, batch]."""

    first_step: int
    block: Block
    located: Located
    small: dict[str, NDArray[np.generic]]
    slot: NDArray[np.int64]
    sample_id: NDArray[np.int64]


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
        num_bytes: Stored bytes of the rows of the batches begun.
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
        speaks = replica == 0
        self._watch = Watch(
            "batch_transform" if collate is None else "collate" if batch_transform is None
            else "collate or batch_transform",
            unit="batch", cure="draw from the rng of batch_transform instead", speaks=speaks,
        )  # fmt: skip
        self._assembler = Assembler(
            self._reader,
            fields,
            ring=self._ring,
            transform=transform,
            keep_samples=collate is not None,
            seed=seed,
            on_error=on_error,
            watch=Watch(
                "transform",
                unit="sample",
                cure="draw from its rng instead, or run it in processes: Workers(processes=...)",
                speaks=speaks,
            ),
        )
        self._num_threads = num_threads
        self._threads = (
            ThreadPoolExecutor(num_threads, "tonari-decode") if num_threads > 0 else None
        )
        recipe = Recipe(
            cache.schema,
            cache.directory,
            tuple(file.path for file in cache.fixed),
            fields,
            transform,
            collate is not None,
            seed,
            on_error,
            speaks,
        )
        self._workers = (
            WorkerProcesses(
                recipe, num_processes=num_processes, prefetch=prefetch, timeout_s=timeout_s
            )
            if num_processes > 0
            else None
        )
        self._readahead: Readahead | None = None
        self._running: Prefetcher[Pending, Batch | Unfinished] | None = None
        self._lock = threading.Lock()
        self.num_skipped = self.num_bytes = 0

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
        if self._readahead is None and is_needed(self._reader):
            self._readahead = Readahead(self._reader)
            self._cache.read_ahead_by(self._readahead)
        pending = self._pending(pick, steps, epoch)
        if self._workers is not None:
            made = self._workers.make(map(self._checked, pending))
            return starmap(self._received, made)
        if self._threads is None or not self._prefetch:
            return self._inline(pending)
        first = next(pending, None)
        if first is None:
            return iter(())
        pending = chain([first], pending)
        batch_bytes = len(first.slot) * self._cache.schema.fixed_bytes
        by_row = self._assembler.by_row or self._batch_transform is not None
        if not by_row and batch_bytes <= INLINE_BYTES and self._readahead is None:
            return self._inline(pending)
        running = Prefetcher(self._submit, pending, depth=self._prefetch, timeout_s=self._timeout_s)
        self._running = running
        return map(self._taken, running)

    def _inline(self, pending: Iterator[Pending]) -> Iterator[Batch]:
        """Make batches on the caller's thread."""
        columns = self._assembler.plain_columns()
        if columns is None or self._batch_transform is not None:
            return map(self._make, pending)
        return map(self._copied, pending, repeat(columns))

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        return self._running.ready if self._running is not None else 0

    def stop(self) -> None:
        """Make no more of the batches asked for. Blocks until none is being made; idempotent."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Take notice that slots hold other rows than before."""
        self._verifier.forget(slots)

    def close(self) -> None:
        """Stop threads and processes, and let go of the mapped rows; idempotent."""
        self.stop()
        if self._threads is not None:
            self._threads.shutdown()
        if self._workers is not None:
            self._workers.close()
        if self._readahead is not None:
            self._cache.read_ahead_by(None)
            self._readahead.close()
            self._readahead = None
        self._reader.close()

    def _pending(self, pick: Pick, steps: range, epoch: int) -> Iterator[Pending]:
        for block in self._ahead(self._looked_up(pick, steps)):
            pending = self._cut(block, epoch)
            yield from pending if self._readahead is None else self._asked(pending)

    def _asked(self, pending: Iterator[Pending]) -> Iterator[Pending]:
        """Ask the disk for some batches before the first of them is made."""
        assert self._readahead is not None
        waiting: deque[Pending] = deque()
        for one in pending:
            self._readahead.ask(one.work.located)
            waiting.append(one)
            if len(waiting) > ASKED_AHEAD:
                yield waiting.popleft()
        yield from waiting

    def _ahead(self, blocks: Iterator[LookedUp]) -> Iterator[LookedUp]:
        """Look up the next block on another thread meanwhile, if there is one."""
        if self._threads is None:
            yield from blocks
            return
        coming = self._threads.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = self._threads.submit(next, blocks, None)
            yield block

    def _looked_up(self, pick: Pick, steps: range) -> Iterator[LookedUp]:
        # Short blocks first: no batch waits long for the look-up of the next.
        num_steps = 4
        while steps:
            block = pick(steps.start, min(num_steps, len(steps)))
            located = locate(self._cache.entries, block.slots)
            try:
                small = self._assembler.gather_small(located.position)
            except IndexError as error:
                raise CorruptRowError(
                    f"{self._cache.directory}: a row of steps from {steps.start} on lies in no "
                    f"file ({error}), expected where the manifest said when it was opened: run "
                    "`tonari cache verify`, which finds its rows again"
                ) from error
            slot, sample_id = block.slots, located.sample_id
            if block.num_valid.min() < slot.shape[1]:
                padding = np.arange(slot.shape[1]) >= block.num_valid[:, None]
                slot, sample_id = np.where(padding, PADDING, [slot, sample_id])
            yield LookedUp(steps.start, block, located, small, slot, sample_id)
            steps = steps[len(slot) :]
            num_steps = min(4 * num_steps, max(BLOCK_ROWS // slot.shape[1], 1))

    def _cut(self, block: LookedUp, epoch: int) -> Iterator[Pending]:
        slots, weight = block.block.slots, block.block.weight
        unchecked = self._verifier.unchecked(slots)
        columns = zip(*block.small.values(), strict=True) if block.small else repeat(())
        rows = zip(
            map(Located, *block.located), columns, block.slot, block.sample_id, weight, strict=False
        )
        num_bytes = self._stored_bytes(block.located)
        for number, (located, small, slot, sample_id, weights) in enumerate(rows):
            self.num_bytes += num_bytes[number]
            work = Work(
                epoch,
                block.first_step + number,
                located,
                dict(zip(block.small, small, strict=True)),
            )
            todo = slots[number] if unchecked[number] else None
            yield Pending(work, slot, sample_id, weights, todo)

    def _stored_bytes(self, located: Located) -> list[int]:
        """Bytes of each batch of a block, as they lie in the cache's files."""
        num_steps, num_rows = located.position.shape
        fixed_bytes = num_rows * self._cache.schema.fixed_bytes
        if not self._cache.schema.variable:
            return [fixed_bytes] * num_steps
        extents = located.bounds[..., -1] - located.bounds[..., 0]
        return (fixed_bytes + extents.sum(axis=1)).tolist()  # type: ignore[no-any-return]

    def _checked(self, pending: Pending) -> Pending:
        """Check a batch's rows, on the caller's thread: a repair reads the source."""
        if pending.unchecked is None:
            return pending
        work = pending.work
        found = self._verifier.check(pending.unchecked, work.located)
        if found.relocated is not None:
            work.located = found.relocated
            work.small = self._assembler.gather_small(work.located.position)
        work.bad |= frozenset(found.bad)
        return pending

    def _make(self, pending: Pending) -> Batch:
        job = self._assembler.prepare(self._checked(pending).work)
        self._assembler.run(job, 0, len(pending.slot))
        return self._finish(job, pending, self._plan())

    def _plan(self) -> How:
        """Decide how the next batch's ``collate`` and ``batch_transform`` are called."""
        shapes = self._collate is not None or self._batch_transform is not None
        return self._watch.plan() if shapes else "free"

    def _copied(self, pending: Pending, columns: Mapping[str, NDArray[np.generic]]) -> Batch:
        """Make a batch that is nothing but copies: as `_make` does, in a third of its own time."""
        if pending.unchecked is not None:
            return self._make(pending)
        position, small = pending.work.located.position, pending.work.small
        batch = {}
        for name in self._fields:
            value = small.get(name)
            if value is None:
                column = columns[name]
                value = self._ring.take((len(position), *column.shape[1:]), column.dtype)
                column.take(position, 0, value, "clip")
            batch[name] = torch.from_numpy(value)
        batch["weight"] = torch.from_numpy(pending.weight)
        batch["sample_id"] = torch.from_numpy(pending.sample_id)
        batch["slot"] = torch.from_numpy(pending.slot)
        return batch

    def _submit(self, pending: Pending) -> Future[Batch | Unfinished]:
        """Give a batch's rows to the threads, a few at a time; the last to end puts it together.

        If it may.
        """
        assert self._threads is not None
        job = self._assembler.prepare(self._checked(pending).work)
        num_rows = len(pending.slot)
        num_parts = min(4 * self._num_threads, num_rows) if self._assembler.by_row else 1
        bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
        left = Unfinished(job, pending, self._plan())
        is_left = job.here or left.how != "free"
        parts = _Parts(num_parts, lambda: left if is_left else self._finish(*left))
        for start, stop in pairwise(bounds):
            self._threads.submit(parts.run, self._assembler.run, job, start, stop)
        return self._ended(parts.batch) if left.how == "look" else parts.batch

    def _ended(self, batch: Future[Batch | Unfinished]) -> Future[Batch | Unfinished]:
        """Wait for a batch and end it, as the next are called the way it shows to be right."""
        wait([batch], self._timeout_s)
        if not batch.done():
            return batch  # whoever takes it says what hangs
        ended: Future[Batch | Unfinished] = Future()
        try:
            ended.set_result(self._taken(batch.result()))
        except BaseException as error:  # handed to the caller, who raises it
            ended.set_exception(error)
        return ended

    def _taken(self, made: Batch | Unfinished) -> Batch:
        return self._finish(*made) if isinstance(made, Unfinished) else made

    def _finish(self, job: Job, pending: Pending, how: How) -> Batch:
        self._assembler.complete(job)
        if self._collate is not None:
            return self._batch(pending, how, samples=self._assembler.samples(job))
        return self._batch(pending, how, values=self._assembler.finish(job))

    def _received(self, pending: Pending, made: Made) -> Batch:
        pending.work.bad |= made.bad
        return self._batch(
            pending, self._plan(), values=made.values or {}, samples=made.samples or ()
        )

    def _batch(
        self,
        pending: Pending,
        how: How,
        *,
        values: Mapping[str, Value] | None = None,
        samples: Sequence[Sample] = (),
    ) -> Batch:
        work = pending.work
        if work.bad:
            self._pad(pending, sorted(work.bad))
        known = {
            "weight": torch.from_numpy(pending.weight),
            "sample_id": torch.from_numpy(pending.sample_id),
            "slot": torch.from_numpy(pending.slot),
        }
        if self._collate is None and self._batch_transform is None:
            return {name: _tensor(value) for name, value in (values or {}).items()} | known
        stream = key(
            self._seed, "batch_transform", epoch=work.epoch, replica=self._replica, step=work.step
        )

        def shape(parts: tuple[Batch, list[Sample]], rng: np.random.Generator) -> Batch:
            return self._shaped(*parts, known, rng)

        parts = ({name: _tensor(value) for name, value in (values or {}).items()}, list(samples))
        with globals_kept() if how == "seeded" else nullcontext():
            return self._watch.call(shape, parts, stream, how)

    def _shaped(
        self, values: Batch, samples: list[Sample], known: Batch, rng: np.random.Generator
    ) -> Batch:
        batch = dict(values)
        if self._collate is not None:
            batch = self._collate(samples)  # type: ignore[assignment]
        if isinstance(batch, dict):
            batch.update(known)
        return batch if self._batch_transform is None else self._batch_transform(batch, rng)

    def _pad(self, pending: Pending, bad: list[int]) -> None:
        # Padding that is bad too was never going to be trained on.
        with self._lock:
            self.num_skipped += int((pending.slot[bad] != PADDING).sum())
        pending.slot[bad] = PADDING
        pending.sample_id[bad] = PADDING
        pending.weight[bad] = 0


class _Parts:
    """Counts the parts of a batch that threads work on; the lock guards the count and the error."""

    def __init__(self, num_parts: int, finish: Callable[[], Batch | Unfinished]) -> None:
        self.batch: Future[Batch | Unfinished] = Future()
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


def _tensor(value: Value) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    # Bytes and text have no tensor form: they stay a list, the one exception.
    if value and isinstance(value[0], np.ndarray):
        return [torch.from_numpy(row) for row in value]  # type: ignore[return-value]
    return value  # type: ignore[return-value]
