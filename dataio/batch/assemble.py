"""Located rows -> the values of a batch: copy, decode, transform, row by row, on any thread.

A `Job` is a batch being made. `prepare` allocates, `run` fills any range of rows, `complete` does
what only the loader's own thread may, `finish` closes. Threads that run the same job fill different
rows; nothing else is shared but the list of bad rows.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dataio.base.buffers import BufferRing
from dataio.base.errors import FieldError
from dataio.batch.fill import Filler
from dataio.batch.global_generators import globals_kept
from dataio.batch.job import Job, Work, num_rows
from dataio.batch.values import Array, OnError, Sample, Transform, Value
from dataio.batch.watch import ROWS_LOOKED_AT, How, Watch
from dataio.cache.files.reader import RowReader
from dataio.rows.fields import Field

Form = tuple[tuple[int, ...], np.dtype[np.generic]]


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
        watch: Looks at what the transform draws from.
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
        watch: Watch,
    ) -> None:
        self._fields = fields
        self._ring = ring
        self._transform = transform
        self._keep_samples = keep_samples
        self._seed = seed
        self._watch = watch
        self._filler = Filler(reader, fields, ring=ring, seed=seed, on_error=on_error)
        self._forms: dict[str, Form | None] | None = None
        # Rows are only worked on one by one where that takes time.
        self.by_row = transform is not None or keep_samples or self._filler.decodes

    def gather_small(self, position: NDArray[np.int64]) -> dict[str, Array]:
        """Copy the small fixed fields of positions of any shape: dtype[*position.shape, *shape]."""
        return self._filler.gather_small(position)

    def plain_columns(self) -> dict[str, Array] | None:
        """The large fixed fields, if a batch is nothing but copies of fixed fields; or None."""
        return None if self.by_row else self._filler.plain_columns()

    def prepare(self, work: Work) -> Job:
        """Allocate what a batch needs."""
        job = self._filler.prepare(work)
        count = num_rows(job)
        if self._keep_samples:
            job.samples = [None] * count
        elif self._forms is not None:
            job.results = self._columns(self._forms, count)
        if self._transform is not None:
            self._look(job)
        return job

    def _look(self, job: Job) -> None:
        """Transform the first rows here: what does it draw from; at first, what does it return?"""
        how = self._watch.plan()
        wanted = ROWS_LOOKED_AT if how == "look" else 0
        describes = job.results is None and job.samples is None
        for row in range(num_rows(job)):
            if not describes and (row >= wanted or how == "seeded"):
                break
            self._filler.fill(job, row, row + 1)
            job.done = row + 1
            if row in job.work.bad:
                continue
            sample = self._transformed(job, row, how)
            if describes:
                self._forms = {
                    # A field of varying length stays a list.
                    name: None if isinstance(job.values.get(name), list) else _form(value)
                    for name, value in sample.items()
                }
                job.results = self._columns(self._forms, num_rows(job))
                describes = False
            self._keep(job, row, sample)
            if self._watch.draws:
                how = "seeded"
        if describes:
            raise self._nothing_decodes(job, "to see what the transform returns")
        job.here = how == "seeded"

    def _columns(self, forms: Mapping[str, Form | None], num_rows: int) -> dict[str, Value]:
        return {
            name: [b""] * num_rows
            if form is None
            else self._ring.take((num_rows, *form[0]), form[1])
            for name, form in forms.items()
        }

    def _nothing_decodes(self, job: Job, why: str) -> FieldError:
        return FieldError(
            f"step {job.work.step}: none of its {num_rows(job)} rows decodes, expected one at "
            f"least {why}; look at the source"
        )

    def run(self, job: Job, start: int, stop: int) -> None:
        """Fill the rows [start, stop); any thread may call it."""
        start = max(start, job.done)
        if start < stop:
            self._filler.fill(job, start, stop)
            if not job.here:
                self._transform_rows(job, start, stop, "free")

    def complete(self, job: Job) -> None:
        """Transform what `run` has left to the loader's own thread; when all rows are filled."""
        if job.here:
            with globals_kept():
                self._transform_rows(job, job.done, num_rows(job), "seeded")

    def _transform_rows(self, job: Job, start: int, stop: int, how: How) -> None:
        if job.samples is None and job.results is None:
            return
        for row in range(start, stop):
            if row not in job.work.bad:
                self._keep(job, row, self._transformed(job, row, how))

    def _keep(self, job: Job, row: int, sample: Sample) -> None:
        if job.samples is not None:
            job.samples[row] = sample
        else:
            self._store(job, row, sample)

    def _transformed(self, job: Job, row: int, how: How) -> Sample:
        sample: Sample = {name: job.values[name][row] for name in self._fields}  # type: ignore[misc]
        for name in self._filler.decoded:
            value = sample[name]
            assert isinstance(value, np.ndarray)
            sample[name] = value.transpose(2, 0, 1)
        if self._transform is None:
            return sample
        sample_id = int(job.work.located.sample_id[row])
        stream = job.work.key_of(row, self._seed)
        try:
            changed = self._watch.call(self._transform, sample, stream, how)
        except Exception as error:
            error.add_note(f"in the transform of sample {sample_id}, epoch {job.work.epoch}")
            raise
        if not isinstance(changed, dict):
            raise FieldError(
                f"transform: returned {type(changed).__name__} for sample {sample_id}, expected "
                "the sample as a dict; return it at the end of the transform"
            )
        return changed

    def _store(self, job: Job, row: int, sample: Sample) -> None:
        results = job.results
        assert results is not None
        if sample.keys() != results.keys():
            self._refuse(job, row, "fields", sorted(sample), sorted(results))
        for name, column in results.items():
            value = sample[name]
            if isinstance(column, list):
                column[row] = value  # type: ignore[assignment]
                continue
            array = np.asarray(value)
            if array.shape != column.shape[1:] or array.dtype != column.dtype:
                found = f"{array.dtype}{list(array.shape)}"
                self._refuse(
                    job, row, f"field {name!r}", found, f"{column.dtype}{list(column.shape[1:])}"
                )
            column[row] = array

    def _refuse(self, job: Job, row: int, what: str, found: object, expected: object) -> None:
        raise FieldError(
            f"transform: sample {job.work.located.sample_id[row]}, {what}: returned {found}, "
            f"expected {expected} like the first; return one form, or put batches together with "
            "collate"
        )

    def finish(self, job: Job) -> dict[str, Value]:
        """Give the values by field; bad rows hold what a good one holds."""
        values = job.results
        if values is None:
            values = self._filler.values(job)
        if job.work.bad:
            _cover(values, job.work.bad, num_rows(job))
        return values

    def samples(self, job: Job) -> list[Sample]:
        """Give the samples that decoded, for a collate; padding repeats the first of them."""
        assert job.samples is not None
        good = next((sample for sample in job.samples if sample is not None), None)
        if good is None:
            raise self._nothing_decodes(job, "to collate")
        return [good if sample is None else sample for sample in job.samples]


def _form(value: object) -> Form | None:
    if isinstance(value, (bytes, str)):
        return None
    array = np.asarray(value)
    return array.shape, array.dtype


def _cover(values: dict[str, Value], bad: frozenset[int], num_rows: int) -> None:
    # A good row's values, so that a label stays in range and an image looks like one.
    good = next((row for row in range(num_rows) if row not in bad), None)
    for value in values.values():
        for row in bad:
            if good is not None:
                value[row] = value[good]  # type: ignore[assignment]
            elif isinstance(value, np.ndarray):
                value[row] = 0
