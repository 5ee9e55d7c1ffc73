"""Located rows -> the values of a batch: copy, decode, transform, row by row, on any thread.

A `Job` is a batch being made. `prepare` allocates, `run` fills any range of rows, `complete` does
what only the loader's own thread may, `finish` closes. Threads that run the same job fill different
rows; nothing else is shared but the list of bad rows.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dataio.base.buffers import BufferRing
from dataio.base.errors import FieldError
from dataio.base.seeding import key
from dataio.batch.global_generators import globals_kept
from dataio.batch.watch import ROWS_LOOKED_AT, How, Watch
from dataio.cache.files.reader import Located, RowReader
from dataio.rows.decode import decode_image, image_shape
from dataio.rows.fields import Field, Image, Text, Tokens

Array = NDArray[np.generic]
Value = Array | list[bytes] | list[str] | list[Array] | list[object]
Sample = dict[str, Array | bytes | str]
Transform = Callable[[Sample, np.random.Generator], Sample]
Form = tuple[tuple[int, ...], np.dtype[np.generic]]
OnError = Literal["raise", "skip"]

SMALL_BYTES = 64
"""Fixed fields up to this width are gathered for many batches at once."""


@dataclass(slots=True)
class Work:
    """A batch to be made.

    Attributes:
        epoch: For the transform's randomness.
        step: Likewise.
        located: The rows.
        small: Fixed fields that were gathered already.
        bad: Rows known to be corrupt.
    """

    epoch: int
    step: int
    located: Located
    small: Mapping[str, Array]
    bad: frozenset[int] = frozenset()


@dataclass(slots=True)
class Job:
    """A batch being made: `copies` and `images` say what `run` fills.

    Attributes:
        results: What the transform's samples go into.
        samples: The samples themselves, for a collate.
        done: The first rows, which `prepare` has transformed already.
        here: Whether all others are transformed by `complete`, on the loader's own thread.
    """

    work: Work
    values: dict[str, Value]
    copies: list[tuple[Array, Array]]
    images: list[tuple[str, Image, Sequence[memoryview], NDArray[np.uint8]]]
    results: dict[str, Value] | None = None
    samples: list[Sample | None] | None = None
    done: int = 0
    here: bool = False


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
        self._reader = reader
        self._fields = fields
        self._ring = ring
        self._transform = transform
        self._keep_samples = keep_samples
        self._seed = seed
        self._on_error = on_error
        self._watch = watch
        self._image_shapes: dict[str, tuple[int, int, int]] = {}
        self._forms: dict[str, Form | None] | None = None
        self._lock = threading.Lock()
        schema = reader.schema
        self._large = [
            (number, column.name)
            for number, column in enumerate(schema.fixed)
            if column.width_bytes > SMALL_BYTES
        ]
        self.small = [
            (number, column.name)
            for number, column in enumerate(schema.fixed)
            if column.width_bytes <= SMALL_BYTES
        ]
        self._decoded = [
            name
            for name, kind in fields.items()
            if isinstance(kind, Image) and name not in schema.variable
        ]
        # Rows are only worked on one by one where that takes time.
        self.by_row = (
            transform is not None
            or keep_samples
            or any(isinstance(fields[name], Image) for name in schema.variable)
        )

    def gather_small(self, position: NDArray[np.int64]) -> dict[str, Array]:
        """Copy the small fixed fields of positions of any shape: dtype[*position.shape, *shape]."""
        return {name: self._reader.column(number)[position] for number, name in self.small}

    def plain_columns(self) -> dict[str, Array] | None:
        """The large fixed fields, if a batch is nothing but copies of fixed fields; else None."""
        if self.by_row or self._decoded or self._reader.schema.variable:
            return None
        return {name: self._reader.column(number) for number, name in self._large}

    def prepare(self, work: Work) -> Job:
        """Allocate what a batch needs."""
        located, num_rows = work.located, len(work.located.position)
        job = Job(work, dict(work.small), [], [])
        for number, name in self._large:
            column = self._reader.column(number)
            out = self._ring.take((num_rows, *column.shape[1:]), column.dtype)
            job.copies.append((column, out))
            job.values[name] = out
        for number, name in enumerate(self._reader.schema.variable):
            bounds = located.bounds
            data = self._reader.extents(located.heap, bounds[:, number], bounds[:, number + 1])
            job.values[name] = self._variable(job, name, data)
        if self._keep_samples:
            job.samples = [None] * num_rows
        elif self._forms is not None:
            job.results = self._columns(self._forms, num_rows)
        if self._transform is not None:
            self._look(job)
        return job

    def _variable(self, job: Job, name: str, data: list[memoryview]) -> Value:
        kind = self._fields[name]
        if isinstance(kind, Image):
            return self._image(job, name, kind, data)
        if isinstance(kind, Tokens):
            return self._tokens(kind, data)
        if isinstance(kind, Text):
            return self._text(job, name, data)
        return [piece.tobytes() for piece in data]

    def _text(self, job: Job, name: str, data: list[memoryview]) -> list[str]:
        texts = []
        for row, piece in enumerate(data):
            try:
                texts.append(str(piece, "utf-8"))
            except UnicodeDecodeError as error:
                texts.append("")
                where = f"sample {job.work.located.sample_id[row]}, field {name!r}"
                self._bad(
                    job,
                    row,
                    FieldError(
                        f"{where}: {len(piece)} bytes beginning {bytes(piece[:8])!r} are not UTF-8 "
                        f"({error}), expected text; repair the sample, or declare Bytes"
                    ),
                )
        return texts

    def _tokens(self, kind: Tokens, data: list[memoryview]) -> Array | list[Array]:
        dtype = np.dtype(kind.dtype).newbyteorder("<")
        if kind.length is None:
            ends = np.cumsum([0, *map(len, data)]).tolist()
            flat = self._ring.take((ends[-1] // dtype.itemsize,), dtype)
            target = flat.view(np.uint8).data
            for piece, start in zip(data, ends, strict=False):
                target[start : start + len(piece)] = piece
            return np.split(flat, np.array(ends[1:-1]) // dtype.itemsize)
        out = self._ring.take((len(data), kind.length), dtype)
        out.fill(kind.pad)
        width = kind.length * dtype.itemsize
        target = out.reshape(-1).view(np.uint8).data
        for start, piece in zip(range(0, len(data) * width, width), data, strict=True):
            cut = piece[:width]
            target[start : start + len(cut)] = cut
        return out

    def _image(self, job: Job, name: str, kind: Image, data: list[memoryview]) -> Array:
        shape = self._image_shape(name, kind, data)
        out = self._ring.take((len(data), *shape), np.uint8).view(np.uint8)
        job.images.append((name, kind, data, out))
        # uint8[batch, channels, height, width], channels last in memory
        return out.transpose(0, 3, 1, 2)

    def _image_shape(self, name: str, kind: Image, data: list[memoryview]) -> tuple[int, int, int]:
        if name not in self._image_shapes:
            size = (kind.size, kind.size) if isinstance(kind.size, int) else kind.size
            if size is None:
                size = self._first_shape(name, data)
            self._image_shapes[name] = (*size, kind.channels)
        return self._image_shapes[name]

    def _first_shape(self, name: str, data: list[memoryview]) -> tuple[int, int]:
        for row, piece in enumerate(data):
            try:
                return image_shape(piece, where=f"field {name!r}")
            except FieldError:
                if self._on_error == "raise" or row + 1 == len(data):
                    raise
        raise AssertionError("a batch has rows")

    def _look(self, job: Job) -> None:
        """Transform the first rows here: what does it draw from; at first, what does it return?"""
        how = self._watch.plan()
        wanted = ROWS_LOOKED_AT if how == "look" else 0
        describes = job.results is None and job.samples is None
        for row in range(num_rows(job)):
            if not describes and (row >= wanted or how == "seeded"):
                break
            self._fill(job, row, row + 1)
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
            self._fill(job, start, stop)
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

    def _fill(self, job: Job, start: int, stop: int) -> None:
        position = job.work.located.position[start:stop]
        for column, out in job.copies:
            # mode="clip" because the default checks by way of a second buffer
            column.take(position, 0, out[start:stop], "clip")
        for name, kind, data, out in job.images:
            for row in range(start, stop):
                if row not in job.work.bad:
                    self._decode(job, row, name, kind, data[row], out[row])

    def _decode(
        self, job: Job, row: int, name: str, kind: Image, data: memoryview, out: NDArray[np.uint8]
    ) -> None:
        where = f"sample {job.work.located.sample_id[row]}, field {name!r}"
        try:
            decode_image(data, out, where=where, resize=kind.size is not None)
        except FieldError as error:
            self._bad(job, row, error)

    def _bad(self, job: Job, row: int, error: FieldError) -> None:
        if self._on_error == "raise":
            raise error
        with self._lock:
            job.work.bad |= {row}

    def _transformed(self, job: Job, row: int, how: How) -> Sample:
        sample: Sample = {name: job.values[name][row] for name in self._fields}  # type: ignore[misc]
        for name in self._decoded:
            value = sample[name]
            assert isinstance(value, np.ndarray)
            sample[name] = value.transpose(2, 0, 1)
        if self._transform is None:
            return sample
        sample_id = int(job.work.located.sample_id[row])
        stream = key(self._seed, "transform", epoch=job.work.epoch, sample_id=sample_id)
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
            values = {name: job.values[name] for name in self._fields}
            for name in self._decoded:
                stored = values[name]
                assert isinstance(stored, np.ndarray)
                # [batch, channels, height, width], channels last in memory
                values[name] = stored.transpose(0, 3, 1, 2)
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


def num_rows(job: Job) -> int:
    """Count a job's rows."""
    return len(job.work.located.position)


def _cover(values: dict[str, Value], bad: frozenset[int], num_rows: int) -> None:
    # A good row's values, so that a label stays in range and an image looks like one.
    good = next((row for row in range(num_rows) if row not in bad), None)
    for value in values.values():
        for row in bad:
            if good is not None:
                value[row] = value[good]  # type: ignore[assignment]
            elif isinstance(value, np.ndarray):
                value[row] = 0
