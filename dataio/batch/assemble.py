"""Located rows -> the values of a batch: copy, decode, transform, row by row, on any thread.

A `BatchJob` is a batch being made. `prepare` allocates, `run` fills any range of rows, `complete`
does what only the loader's own thread may, `finish` closes. Threads that run the same job fill
different rows; nothing else is shared but the list of bad rows.
"""

import time
from collections.abc import Mapping
from typing import cast

import numpy as np

from dataio.base.buffers import BufferRing
from dataio.base.errors import FieldError, WorkerError
from dataio.batch.fill import Filler
from dataio.batch.global_generators import globals_kept
from dataio.batch.job import BatchJob, BatchWork, num_rows
from dataio.batch.stack import Form, StackedColumns, blank, forms
from dataio.batch.watch import ROWS_LOOKED_AT, How, TransformWatch
from dataio.rows.fields import Field
from dataio.rows.on_device import DeviceDecoder
from dataio.rows.samples import (
    AsList,
    NothingDecodesError,
    OnError,
    Sample,
    Transform,
    Value,
)
from dataio.store.files.reader import RowReader


class Assembler:
    """Makes the values of batches; the same for any number of threads or processes.

    Args:
        reader: The files.
        fields: How each is decoded.
        ring: Where buffers come from.
        transform: Changes one sample.
        keep_samples: Leave the samples of a batch as they are, for a collate.
        seed: The run's seed.
        on_error: What to do with a row that does not decode.
        trusts_pictures: Whether pictures that were refused while staging are decoded all the same.
        decoder: Of the device that decodes pictures; None: no field asks for it.
        watch: Looks at what the transform draws from, if there is one.

    Attributes:
        filler: Copies and decodes the fields.
        by_row: Whether rows are worked on one by one: only where that takes time.
        looked_s: Seconds for which rows were made to see what the transform draws from.
    """

    def __init__(
        self,
        reader: RowReader,
        fields: Mapping[str, Field],
        *,
        ring: BufferRing,
        transform: Transform | None,
        keep_samples: bool,
        seed: int,
        on_error: OnError,
        trusts_pictures: bool = False,
        decoder: DeviceDecoder | None = None,
        watch: TransformWatch | None,
    ) -> None:
        self._fields = fields
        self._ring = ring
        self._transform = transform
        self._keep_samples = keep_samples
        self._seed = seed
        self._watch = watch
        self.filler = Filler(
            reader,
            fields,
            ring=ring,
            seed=seed,
            on_error=on_error,
            trusts_pictures=trusts_pictures,
            decoder=decoder,
        )
        self._forms: dict[str, Form | None] | None = None
        self.looked_s = 0.0
        self.by_row = transform is not None or keep_samples or self.filler.decodes

    @property
    def has_fields(self) -> bool:
        """Whether a batch has the fields as they are: no transform or collate changes them."""
        return self._transform is None and not self._keep_samples

    def prepare(self, work: BatchWork) -> BatchJob:
        """Allocate what a batch needs."""
        job = self.filler.prepare(work)
        if self._keep_samples:
            job.samples = [None] * num_rows(job)
        elif self._transform is not None or self.filler.own:
            maker = "transform" if self._transform is not None else "decode"
            job.results = StackedColumns(self._ring, work.located.sample_id, maker=maker)
        if self._transform is not None:
            started = time.perf_counter()
            self._look(job)
            self.looked_s += time.perf_counter() - started
        return job

    def _look(self, job: BatchJob) -> None:
        """Transform the first rows of some batches here: what does the transform draw from?"""
        watch = self._watch
        assert watch is not None
        how = watch.plan()
        for row in range(min(ROWS_LOOKED_AT, num_rows(job)) if how == "look" else 0):
            self.filler.fill(job, row, row + 1)
            job.done = row + 1
            self._add_rows(job, row, row + 1, "look")
            if watch.draws:
                how = "seeded"
                break
        job.here = how == "seeded"

    def _nothing_decodes(self, job: BatchJob, why: str) -> NothingDecodesError:
        return NothingDecodesError(
            f"step {job.work.step}: none of its {num_rows(job)} rows decodes, expected one at "
            f"least {why}; look at the source"
        )

    def run(self, job: BatchJob, start: int, stop: int) -> tuple[float, float]:
        """Fill the rows [start, stop); any thread may call it.

        Returns:
            Seconds of filling fields, and of transforming.
        """
        start, began = max(start, job.done), time.perf_counter()
        if start < stop:
            self.filler.fill(job, start, stop)
        filled = time.perf_counter()
        if start < stop and not job.here:
            self._add_rows(job, start, stop, "free")
        return filled - began, time.perf_counter() - filled

    def take_in(self, job: BatchJob, start: int, stop: int, bad: frozenset[int]) -> None:
        """Note that feeders made the rows [start, stop), but for what is copied as it lies."""
        if self.has_fields:
            position = job.work.located.position[start:stop]
            for column, out in job.copies:
                column.take(position, 0, out[start:stop], "clip")
        self.filler.add_bad(job, bad)
        job.fed.update(range(start, stop))

    def complete(self, job: BatchJob) -> None:
        """Transform what `run` has left to the loader's own thread; when all rows are filled."""
        if job.here:
            with globals_kept():
                self._add_rows(job, job.done, num_rows(job), "seeded")

    def _add_rows(self, job: BatchJob, start: int, stop: int, how: How) -> None:
        """Make samples of rows that are filled, and write them where the batch has them."""
        if job.samples is None and job.results is None:
            return
        for row in range(start, stop):
            if row in job.work.bad or row in job.fed:
                continue
            sample = self._made(job, row, how)
            if sample is None:
                continue
            if job.results is not None:
                job.results.add(row, sample)
            elif job.samples is not None:
                job.samples[row] = cast("Sample", sample)

    def _made(self, job: BatchJob, row: int, how: How) -> Mapping[str, object] | None:
        """Make a row's sample, or what of it is not in the batch yet; None if it is refused."""
        if self.has_fields:
            return {name: job.values[name][row] for name in self.filler.own}
        sample = self._sample(job, row)
        return sample if self._transform is None else self._transformed(job, row, sample, how)

    def _sample(self, job: BatchJob, row: int) -> Sample:
        sample: Sample = {name: job.values[name][row] for name in self._fields}
        for name in self.filler.decoded:
            value = sample[name]
            assert isinstance(value, np.ndarray)
            sample[name] = value.transpose(2, 0, 1)
        for name in self.filler.own:
            value = sample[name]
            if isinstance(value, AsList):
                sample[name] = value.value  # type: ignore[assignment]
        return sample

    def _transformed(
        self, job: BatchJob, row: int, sample: Sample, how: How
    ) -> Mapping[str, object] | None:
        """Transform a sample; None if the transform refuses it, and it becomes padding."""
        assert self._transform is not None
        assert self._watch is not None
        epoch, sample_id = job.work.epoch, int(job.work.located.sample_id[row])
        stream = job.work.key_of(row, self._seed)
        varying: dict[str, object] = {}
        if self.filler.varying and job.results is not None:
            # What of these comes back as it is goes into a list. It may be changed in place.
            varying = {
                name: sample[name]
                for name in self.filler.varying
                if name not in self.filler.own or isinstance(job.values[name][row], AsList)
            }
        try:
            changed = self._watch.call(self._transform, sample, stream, how)
        except FieldError as error:
            refused = FieldError(f"transform: sample {sample_id}, epoch {epoch}: {error}")
            refused.__cause__ = error
            self.filler.refuse(job, row, refused)
            return None
        except Exception as error:
            raise WorkerError(
                f"transform: sample {sample_id}, epoch {epoch}: raised {type(error).__name__}: "
                f"{error}, expected the sample; repair it, or let it raise FieldError, which "
                'on_error="skip" passes over',
                about=self.filler.about(job, row),
            ) from error
        if not isinstance(changed, Mapping):
            raise FieldError(
                f"transform: returned {type(changed).__name__} for sample {sample_id}, expected "
                "the sample as a dict; return it at the end of the transform"
            )
        if not varying:
            return changed
        return {
            name: AsList(value) if name in varying and value is varying[name] else value
            for name, value in changed.items()
        }

    def finish(self, job: BatchJob) -> dict[str, Value]:
        """Give the values by field; bad rows hold what a good one holds."""
        values = {} if self._transform is not None else self.filler.values(job)
        if job.results is not None:
            values |= self._results(job, job.results)
        if job.work.bad:
            _cover(values, job.work.bad, num_rows(job))
        return values

    def _results(self, job: BatchJob, results: StackedColumns) -> dict[str, Value]:
        """Give what the rows were made into; of a batch without any, as of the batch before it."""
        if results.values or not len(job.work.bad):
            self._forms = forms(results.values)
            return results.values
        if self._forms is None:
            raise self._nothing_decodes(job, "to see what becomes of it")
        return blank(self._forms, num_rows(job))

    def samples(self, job: BatchJob) -> list[Sample]:
        """Give the samples that decoded, for a collate; padding repeats the first of them."""
        assert job.samples is not None
        good = next((sample for sample in job.samples if sample is not None), None)
        if good is None:
            raise self._nothing_decodes(job, "to collate")
        return [good if sample is None else sample for sample in job.samples]


def _cover(values: dict[str, Value], bad: frozenset[int], num_rows: int) -> None:
    # A good row's values, so that a label stays in range and an image looks like one.
    good = next((row for row in range(num_rows) if row not in bad), None)
    for value in values.values():
        for row in bad:
            if good is not None:
                value[row] = value[good]
            elif not isinstance(value, list):
                value[row] = 0
