"""Slots -> batches: in blocks of steps, so that what a batch costs is one copy of its bytes.

Cheap batches are copied on the caller's thread; where rows are decoded, transformed or many bytes,
threads make the next ones meanwhile.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import chain, pairwise, repeat, starmap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dataio.arguments import Arguments, find_device
from dataio.base.buffers import BufferRing
from dataio.base.errors import DataioError, FieldError
from dataio.batch.assemble import Assembler
from dataio.batch.job import BatchJob, BatchWork, is_pictures_alone, num_rows
from dataio.batch.lookup import Lookup, Pending, Pick
from dataio.batch.prefetch import Prefetcher, UnderWay
from dataio.batch.process_transform import Made, WorkerArguments, WorkerProcesses
from dataio.batch.shape import Shaper
from dataio.batch.verify import RowVerifier
from dataio.batch.watch import How, TransformWatch
from dataio.rows import on_device
from dataio.rows.decode import are_pixels
from dataio.rows.fields import Array
from dataio.rows.image import Image
from dataio.rows.samples import Batch, NothingDecodesError, Sample, Value
from dataio.source.base import place_of
from dataio.store.files.fetch import Fetcher
from dataio.store.files.reader import RowReader, locate
from dataio.store.pool import Pool

if TYPE_CHECKING:
    from dataio.batch.feeders import offload
    from dataio.batch.unlocked import UnlockedThreads

INLINE_BYTES = 16 << 20
"""Up to this a batch is copied on the caller's thread: handing it over would cost more."""
PART_BYTES = 1 << 16
"""Compressed pictures that take about a millisecond: a smaller part of a batch costs too much."""


class Unfinished(NamedTuple):
    """A batch whose rows are filled; the rest of it is for the loader's own thread.

    Attributes:
        how: Its ``collate`` and ``batch_transform`` are called.
    """

    job: BatchJob
    pending: Pending
    how: How


class Undecodable(NamedTuple):
    """A batch of which no row decodes: the loader's own thread makes padding of it."""

    pending: Pending


Outcome = Batch | Unfinished | Undecodable


class Gather:
    """Makes batches of one pool's rows; the same for any number of threads or processes.

    Args:
        pool: The rows, and how each is stored.
        arguments: Those of the loader: its transforms, workers, and what to do about errors.
        pinned: Make batches in memory that a GPU copies from without waiting.

    Attributes:
        shaper: Puts batches together.
        feeders: Make rows elsewhere; None: nobody does.
    """

    def __init__(
        self,
        pool: Pool,
        arguments: Arguments,
        *,
        pinned: bool = False,
        replica: int | None = None,
    ) -> None:
        replica = pool.world.replica if replica is None else replica
        cache, fields, world, workers = pool.cache, pool.fields, pool.world, arguments.workers
        transform, collate, seed = arguments.transform, arguments.collate, arguments.seed
        trusts_pictures = arguments.staging.check == "none"
        self._cache, self._num_slots = cache, pool.num_slots
        self._begin = pool.checked_source.raise_refused
        self._place_of = partial(place_of, pool.source)
        self._fields = fields
        self._batch_transform = arguments.batch_transform
        self._collate = collate
        callables = transform, collate, arguments.batch_transform
        self._transforms = any(each is not None for each in callables)
        self._prefetch = workers.prefetch
        self._timeout_s = world.timeout_s
        self._ring = BufferRing(pinned=pinned)
        self._reader = RowReader(cache.schema, cache.files.fixed, cache.directory)
        verify = arguments.cache.verify
        # A checksum is that of a whole row, which nobody reads
        self._cuts = any(isinstance(kind, Array) and kind.patch for kind in fields.values())
        self._verifier = RowVerifier(
            cache,
            self._reader,
            num_slots=pool.num_slots,
            verify="never" if self._cuts and verify == "once" else verify,
            on_error=arguments.on_error,
            repair=pool.repair,
        )
        self.shaper = Shaper(
            collate=collate,
            batch_transform=arguments.batch_transform,
            seed=seed,
            replica=replica,
            place_of=self._place_of,
        )
        decoder = None
        if any(isinstance(kind, Image) and kind.decode == "device" for kind in fields.values()):
            decoder = on_device.find_decoder(find_device(arguments.device))()
        logs = replica == 0
        self._assembler = Assembler(
            self._reader,
            fields,
            ring=self._ring,
            transform=transform,
            keep_samples=collate is not None,
            seed=seed,
            on_error=arguments.on_error,
            trusts_pictures=trusts_pictures,
            decoder=decoder,
            watch=TransformWatch(
                "transform",
                unit="sample",
                cure="draw from its rng instead, or run it in processes: Workers(processes=...)",
                logs=logs,
            )
            if transform is not None
            else None,
        )
        num_threads = self._num_threads = workers.num_threads(local_size=world.local_size)
        self._threads = (
            ThreadPoolExecutor(num_threads, "tonari-decode") if num_threads > 0 else None
        )
        paths = tuple(file.path for file in cache.files.fixed)
        self._unlocked: UnlockedThreads | None = None
        for_workers = WorkerArguments(
            cache.schema, cache.directory, paths, fields, transform, collate is not None, seed,
            arguments.on_error, trusts_pictures, logs, cache.num_tiles,
        )  # fmt: skip
        self.feeders: offload.Feeders | None = None
        if workers.feeders is not None and self._threads is not None and self._assembler.by_row:
            from dataio.batch.feeders.offload import Feeders

            self.feeders = Feeders(
                Path(workers.feeders), for_workers, reader=self._reader, work=self._run_part,
                assembler=self._assembler, threads=self._threads, num_threads=num_threads,
                replica=replica,
            )  # fmt: skip
        self._workers: WorkerProcesses | None = None
        if workers.processes > 0:
            self._workers = WorkerProcesses(
                for_workers,
                num_processes=workers.processes,
                prefetch=workers.prefetch,
                timeout_s=world.timeout_s,
            )
        self._lookup = Lookup(
            cache, self._assembler, self._verifier, threads=self._threads,
            num_tiles=cache.num_tiles,
        )  # fmt: skip
        # Threads add to theirs, the caller's thread reads it; the lock guards it.
        self._inline_s = self._threads_s = 0.0
        self._disk_s = self._fill_s = self._transform_s = 0.0
        self._threads_lock = threading.Lock()
        self._fetcher: Fetcher | None = None
        self._running: Prefetcher[Pending, Outcome] | None = None

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
        self._begin()
        return self._placed(self._begun(pick, steps, epoch))

    def _placed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Say in an error about a sample where the source has it."""
        try:
            yield from batches
        except DataioError as error:
            if error.about is None:
                raise
            sample_id, key = error.about
            named = f", key {key!r}" if key else ""
            raise error.placed(f"{self._place_of(sample_id)}{named}") from error.__cause__

    def _begun(self, pick: Pick, steps: range, epoch: int) -> Iterator[Batch]:
        self._reader.check_files(self._cache.entries)
        self._fetcher = self._cache.find_fetcher()
        pending = self._lookup.pending(pick, steps, epoch=epoch, fetcher=self._fetcher)
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
        if not by_row and batch_bytes <= INLINE_BYTES:
            return self._inline(pending)
        running = Prefetcher(
            self._submit, pending, depth=self._prefetch, timeout_s=self._timeout_s,
            may_wait=lambda one: one.fetch is not None and not one.fetch.done(),
        )  # fmt: skip
        self._running = running
        batches = map(self._taken, running)
        return batches if self.feeders is None else self.feeders.paced(batches)

    def _inline(self, pending: Iterator[Pending]) -> Iterator[Batch]:
        """Make batches on the caller's thread."""
        columns = None if self._assembler.by_row else self._assembler.filler.plain_columns()
        if columns is None or self._batch_transform is not None or self._fetcher is not None:
            return self._timed(map(self._make, pending))
        return self._timed(map(self._copied, pending, repeat(columns)))

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self._inline_s += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def _run_part(self, job: BatchJob, start: int, stop: int) -> None:
        started = time.perf_counter()
        self._filled(job, start, stop)
        with self._threads_lock:
            self._threads_s += time.perf_counter() - started

    def _filled(self, job: BatchJob, start: int, stop: int) -> None:
        fill_s, transform_s = self._assembler.run(job, start, stop)
        with self._threads_lock:
            self._fill_s += fill_s
            self._transform_s += transform_s

    @property
    def num_skipped(self) -> int:
        """Rows that became padding because they could not be repaired or decoded."""
        return self.shaper.num_skipped

    @property
    def num_bytes(self) -> int:
        """Stored bytes of the rows of the batches begun."""
        return self._lookup.num_bytes

    @property
    def busy_s(self) -> float:
        """Seconds spent on making batches: of several threads the mean; of processes nothing."""
        return self._inline_s + self._threads_s / max(self._num_threads, 1)

    @property
    def spent_s(self) -> dict[str, float]:
        """Seconds by cause: see `WaitCauses.add`."""
        fill = "decode" if self._assembler.filler.decodes else "copy"
        transform_s = self._transform_s + self._assembler.looked_s
        spent = {"disk": self._disk_s, fill: self._fill_s}
        # Putting a batch together is a transform's share only where there is one.
        last = "transform" if self._transforms else fill
        spent[last] = spent.get(last, 0.0) + transform_s
        if self.feeders is not None:
            spent["feeder"] = self.feeders.busy_s
        # They do not say what they do: all that is left of a wait is theirs.
        return spent if self._workers is None else spent | {"processes": time.perf_counter()}

    @property
    def ready(self) -> int:
        """Batches that are ready now."""
        running = self._running
        return running.ready if running is not None else 0

    def stop(self) -> None:
        """Make no more of the batches asked for. Blocks until none is being made; idempotent."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Check the rows of some slots again: they hold other rows than before."""
        self._verifier.forget(slots)

    def close(self) -> None:
        """Stop threads and processes, and let go of the mapped rows; idempotent."""
        self.stop()
        if self.feeders is not None:
            self.feeders.close()
        if self._threads is not None:
            self._threads.shutdown()
        if self._unlocked is not None:
            self._unlocked.close()
        if self._workers is not None:
            self._workers.close()
        self._reader.close()

    def _checked(self, pending: Pending) -> Pending:
        """Check a batch's rows, on the caller's thread: a repair reads the source."""
        work, located, reader = pending.work, pending.work.located, None
        if pending.fetch is not None:
            started = time.perf_counter()
            fetched = pending.fetch.result(self._timeout_s)
            self._disk_s += time.perf_counter() - started
            if not self._cuts:
                located, reader = fetched.located, fetched.reader
            if self._workers is None:
                work.reader, work.located = fetched
            # Other processes read for themselves, from the page cache now
            pending.fetch = None
        if pending.unchecked is None:
            return pending
        found = self._verifier.check(pending.unchecked, located, reader)
        if found.relocated is not None:
            work.reader, work.located = None, found.relocated
            work.small = self._assembler.filler.gather_small(work.located.position)
        work.bad |= frozenset(found.bad)
        return pending

    def _make(self, pending: Pending) -> Batch:
        try:
            job = self._assembler.prepare(self._checked(pending).work)
        except NothingDecodesError:
            return self._padding(pending)
        self._filled(job, 0, len(pending.slot))
        return self._taken(Unfinished(job, pending, self.shaper.plan()))

    def _padding(self, pending: Pending) -> Batch:
        """Make a batch of which no row decodes: of other rows of the pool, as padding."""
        work, num_rows = pending.work, len(pending.slot)
        held = np.flatnonzero(self._cache.entries.present[: self._num_slots])
        for first in range(0, len(held), num_rows):
            slots = np.resize(held[first : first + num_rows], num_rows)
            located = locate(self._cache.entries, slots)
            found = self._verifier.check(slots, located)
            located = found.relocated or located
            small = self._assembler.filler.gather_small(located.position)
            other = BatchWork(work.epoch, work.step, located, small, frozenset(found.bad))
            try:
                job = self._assembler.prepare(other)
                self._assembler.run(job, 0, num_rows)
                self._assembler.complete(job)
                values, samples = self._values(job)
            except NothingDecodesError:
                continue
            if len(other.bad) < num_rows:
                work.bad = frozenset(range(num_rows))
                return self.shaper.batch(
                    pending, self.shaper.plan(), values=values, samples=samples
                )
        raise FieldError(
            f"{self._cache.directory}: none of the {len(held)} rows held there decodes, expected "
            'one at least to be padding, as on_error="skip" leaves it; look at the source'
        )

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

    def _submit(self, pending: Pending) -> UnderWay[Outcome]:
        """Give a batch's rows to the threads, a few at a time; the last to end puts it together.

        If it may.
        """
        assert self._threads is not None
        try:
            job = self._assembler.prepare(self._checked(pending).work)
        except NothingDecodesError:
            undecodable: Future[Outcome] = Future()
            undecodable.set_result(Undecodable(pending))
            return undecodable
        feeders = self.feeders
        sends = feeders is not None and feeders.may_send(num_rows(job))
        if not (sends or self._transforms) and is_pictures_alone(job):
            return self._delivered(job, pending)
        num_parts = self._num_parts(job, feeders.num_cores if feeders and sends else 0)
        bounds = [num_rows(job) * part // num_parts for part in range(num_parts + 1)]
        left = Unfinished(job, pending, self.shaper.plan())
        is_left = job.here or left.how != "free"
        parts = _BatchParts(num_parts, lambda: left if is_left else self._finish(*left))
        if feeders and sends:
            feeders.put(job, bounds, parts.run)
        else:
            work = self._run_part if feeders is None else feeders.run_here
            for start, stop in pairwise(bounds):
                self._threads.submit(parts.run, work, job, start, stop)
        return self._ended(parts.batch) if left.how == "look" else parts.batch

    def _delivered(self, job: BatchJob, pending: Pending) -> UnderWay[Outcome]:
        """Give a batch's pictures to threads that do not hold Python's lock."""
        if self._unlocked is None:
            from dataio.batch.unlocked import UnlockedThreads

            self._unlocked = UnlockedThreads(self._num_threads)
        filler, rows = self._assembler.filler, range(num_rows(job))
        calls = [call for one in job.images if (call := filler.call(job, one, rows)) is not None]

        def end(seconds: float, cpu_s: float) -> Outcome:
            with self._threads_lock:
                self._threads_s += seconds
                self._fill_s += seconds
            if self.feeders is not None:
                self.feeders.add_made(len(rows), cpu_s, seconds)
            return Unfinished(job, pending, self.shaper.plan())

        return self._unlocked.put(calls, partial(filler.fill_left, job), end)

    def _num_parts(self, job: BatchJob, others: int) -> int:
        """Choose in how many parts threads, and so many cores of feeders, work on a batch."""
        if not self._assembler.by_row:
            return 1
        most = min(4 * (self._num_threads + 2 * others), num_rows(job))
        is_slow = self._transforms or job.decodes or job.cuts
        if is_slow or not job.images or not all(one.at_once for one in job.images):
            return most
        # Pixels that were kept are delivered 16 times as fast as compressed ones of as many bytes.
        bytes_of = (
            int(one.lengths.sum()) // (16 if are_pixels(one.data[0]) else 1) for one in job.images
        )
        return max(min(most, sum(bytes_of) // PART_BYTES), 1)

    def _ended(self, batch: Future[Outcome]) -> Future[Outcome]:
        """Wait for a batch and end it, as the next are called the way it shows to be right."""
        wait([batch], self._timeout_s)
        if not batch.done():
            return batch  # whoever takes it says what hangs
        ended: Future[Outcome] = Future()
        try:
            ended.set_result(self._taken(batch.result()))
        except BaseException as error:  # handed to the caller, who raises it
            ended.set_exception(error)
        return ended

    def _taken(self, made: Outcome) -> Batch:
        if isinstance(made, Unfinished):
            made = self._finish(*made)
        return self._padding(made.pending) if isinstance(made, Undecodable) else made

    def _finish(self, job: BatchJob, pending: Pending, how: How) -> Batch | Undecodable:
        started = time.perf_counter()
        self._assembler.complete(job)
        if self.feeders is not None and job.here:
            self.feeders.add_completed(time.perf_counter() - started)
        try:
            values, samples = self._values(job)
        except NothingDecodesError:
            return Undecodable(pending)
        batch = self.shaper.batch(pending, how, values=values, samples=samples)
        with self._threads_lock:
            self._transform_s += time.perf_counter() - started
        return batch

    def _values(self, job: BatchJob) -> tuple[dict[str, Value], list[Sample]]:
        """Give what a batch is put together of: values by field, or samples for a collate."""
        if self._collate is not None:
            return {}, self._assembler.samples(job)
        return self._assembler.finish(job), []

    def _received(self, pending: Pending, made: Made) -> Batch:
        if made.failure is not None:
            return self._padding(pending)
        pending.work.bad |= made.bad
        return self.shaper.batch(
            pending, self.shaper.plan(), values=made.values or {}, samples=made.samples or ()
        )


class _BatchParts:
    """Counts the parts of a batch that threads work on; the lock guards the count and the error."""

    def __init__(self, num_parts: int, finish: Callable[[], Outcome]) -> None:
        self.batch: Future[Outcome] = Future()
        self._left = num_parts
        self._finish = finish
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def run(
        self, work: Callable[[BatchJob, int, int], None], job: BatchJob, start: int, stop: int
    ) -> None:
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
