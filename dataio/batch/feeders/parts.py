"""Rows of a batch -> what is sent of them, and back: what a feeder makes, and where it goes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.batch.assemble import Assembler
from dataio.batch.feeders.wire import Piece
from dataio.batch.job import BatchJob, BatchWork
from dataio.batch.process_transform import WorkerArguments, make_assembler
from dataio.batch.stack import Form, forms
from dataio.rows.rows import RowSchema
from dataio.rows.samples import Sample, Value
from dataio.rows.views import Size
from dataio.store.files.fetch import Extents, FetchedColumn
from dataio.store.files.reader import Located, RowReader


class SentRows(NamedTuple):
    """Rows to be made; their bytes follow: each fixed field's, then the variable ones row by row.

    Attributes:
        epoch: As of `BatchWork`, as are step, bad and repeat.
        sample_id: int64[num_rows].
        bounds: int64[num_rows, num_variable + 1]: Of the variable fields, in their bytes.
        sizes: Of pictures whose field names none, as they were seen first.
    """

    epoch: int
    step: int
    sample_id: NDArray[np.int64]
    bounds: NDArray[np.int64]
    bad: frozenset[int]
    repeat: NDArray[np.int64] | None
    sizes: Mapping[str, Size]


class MadeRows(NamedTuple):
    """What became of them; the bytes of arrays follow.

    Attributes:
        bad: Of the rows, those that became padding.
        pictures: Form of a row, of each field of pictures whose rows follow.
        results: The same of each value that a transform, or a field's ``decode``, returned; None:
            it goes into a list.
        lists: Of these, the rows.
        samples: For a collate.
        failure: Why there is nothing: the error is the trainer's to find again.
        has_no_form: It is that a value cannot be sent, from no feeder.
    """

    bad: frozenset[int] = frozenset()
    pictures: Mapping[str, Form | None] = {}
    results: Mapping[str, Form | None] | None = None
    lists: Mapping[str, list[Any]] = {}
    samples: list[Sample | None] | None = None
    failure: str = ""
    has_no_form: bool = False


def sent_arguments(arguments: WorkerArguments) -> WorkerArguments:
    """Choose what a feeder needs: all fields for a transform or a collate, else what it decodes."""
    if arguments.transform is not None or arguments.keep_samples:
        return replace(arguments, logs=False)
    schema, fields = arguments.schema, arguments.fields
    decodes = make_assembler(arguments, RowReader(schema, (), arguments.directory)).filler.worked_on
    sent = RowSchema(
        tuple(column for column in schema.fixed if column.name in decodes),
        tuple(name for name in schema.variable if name in decodes),
    )
    kept = {name: kind for name, kind in fields.items() if name in decodes}
    return replace(arguments, schema=sent, fields=kept, logs=False)


class Packer:
    """Packs rows of batches that are being made. Thread-safe.

    Args:
        reader: The cache's files.
        sent: Fields that feeders need.
        sizes: Of pictures whose field names none: filled as they are seen.
    """

    def __init__(self, reader: RowReader, sent: RowSchema, sizes: Mapping[str, Size]) -> None:
        self._reader, self._sizes = reader, sizes
        names = [column.name for column in reader.schema.fixed]
        self._fixed = [(names.index(column.name), column.name) for column in sent.fixed]
        self._variable = [reader.schema.variable.index(name) for name in sent.variable]

    def pack(self, job: BatchJob, start: int, stop: int) -> tuple[SentRows, list[Piece]]:
        """Describe the rows [start, stop), and view their bytes where they lie."""
        work, part = job.work, slice(start, stop)
        located, reader = work.located.rows(np.arange(start, stop)), work.reader or self._reader
        pieces: list[Piece] = []
        for number, name in self._fixed:
            known = work.small.get(name)
            column = reader.column(number)
            pieces.append(known[part] if known is not None else column[located.position])
        bounds = np.zeros((len(located.position), len(self._variable) + 1), np.int64)
        if self._variable:
            starts, stops = (located.bounds[:, [v + s for v in self._variable]] for s in (0, 1))
            bounds[:, 1:] = stops - starts
            # int64[num_rows, num_variable + 1]: the end of each field, and the next row's begin
            ends = np.cumsum(bounds).reshape(bounds.shape)
            bounds = ends
            views = [
                reader.pieces(located.heap, starts[:, each], stops[:, each])
                for each in range(len(self._variable))
            ]
            pieces.extend(chain.from_iterable(zip(*views, strict=True)))
        bad = frozenset(row - start for row in work.bad if start <= row < stop)
        repeat = None if work.repeat is None else work.repeat[part]
        rows = SentRows(
            work.epoch, work.step, located.sample_id, bounds, bad, repeat, dict(self._sizes)
        )
        return rows, [np.ascontiguousarray(p) if isinstance(p, np.ndarray) else p for p in pieces]


class Maker:
    """Makes rows that were sent; one thread uses it.

    Args:
        arguments: What it makes of them.
    """

    def __init__(self, arguments: WorkerArguments) -> None:
        self._arguments = arguments
        self._assembler = make_assembler(
            arguments, RowReader(arguments.schema, (), arguments.directory)
        )

    def make(self, sent: SentRows, data: NDArray[np.uint8]) -> tuple[MadeRows, list[Piece]]:
        """Make rows.

        Args:
            sent: The rows.
            data: uint8[num_bytes]: Their bytes.

        Raises:
            Exception: Whatever a transform, or a field that does not decode, raises.
        """
        job = self._job(sent, data)
        num_rows = len(sent.sample_id)
        self._assembler.run(job, 0, num_rows)
        bad = job.work.bad
        if len(bad) == num_rows:
            return MadeRows(bad), []
        if job.samples is not None:
            return MadeRows(bad, samples=job.samples), []
        values: Mapping[str, Value] = {}
        if self._arguments.transform is None:
            values = {pictures.name: pictures.out for pictures in job.images}  # type: ignore[misc]
        results = None if job.results is None else job.results.values
        lists = {k: v for k, v in (results or {}).items() if isinstance(v, list)}
        arrays = [v for v in chain(values.values(), (results or {}).values())]
        return (
            MadeRows(bad, forms(values), None if results is None else forms(results), lists),
            [array for array in arrays if isinstance(array, np.ndarray)],
        )

    def _job(self, sent: SentRows, data: NDArray[np.uint8]) -> BatchJob:
        schema, directory = self._arguments.schema, self._arguments.directory
        num_rows, at, columns = len(sent.sample_id), 0, []
        for column in schema.fixed:
            end = at + num_rows * column.width_bytes
            rows = data[at:end].reshape(num_rows, column.width_bytes)
            columns.append(FetchedColumn(directory, column, rows))
            at = end
        reader = RowReader(schema, columns, directory, heaps={0: Extents(directory, data[at:])})
        position, heap = np.arange(num_rows), np.zeros(num_rows, np.int64)
        located = Located(sent.sample_id, position, heap, sent.bounds)
        filler = self._assembler.filler
        filler.sizes.update(sent.sizes)
        small = filler.gather_small(position, reader)
        return self._assembler.prepare(
            BatchWork(sent.epoch, sent.step, located, small, sent.bad, sent.repeat, reader)
        )


def find_room(
    assembler: Assembler, job: BatchJob, start: int, stop: int, made: MadeRows, num_bytes: int
) -> Sequence[NDArray[Any]] | None:
    """Find where the bytes behind `MadeRows` go in their batch; None if they are not its rows."""
    rows = frozenset(range(stop - start))
    if not all(type(row) is int for row in made.bad):
        return None
    if made.bad == rows:
        return [] if made == MadeRows(rows) and not num_bytes else None
    places: dict[str, Any] = {}
    if assembler.has_fields:
        places = {pictures.name: pictures.out for pictures in job.images}
    results = made.results or {}
    row_bytes = sum(
        math.prod(form[0]) * form[1].itemsize
        for form in chain(made.pictures.values(), results.values())
        if form is not None
    )
    if (
        not made.bad < rows
        or forms(places) != made.pictures
        or (made.results is None) != (job.results is None)
        or (made.samples is None) != (job.samples is None)
        or made.lists.keys() != {name for name, form in results.items() if form is None}
        or {len(rows), *map(len, made.lists.values()), len(made.samples or rows)} != {len(rows)}
        or any((type(s) is dict) == (row in made.bad) for row, s in enumerate(made.samples or ()))
        or row_bytes * len(rows) != num_bytes
    ):
        return None
    rooms = [*places.values()]
    if job.results is not None:
        if (columns := job.results.columns_of(results)) is None:
            return None
        rooms += [columns[name] for name in results]
    return [room[start:stop] for room in rooms if isinstance(room, np.ndarray)]


def take_in(assembler: Assembler, job: BatchJob, start: int, stop: int, made: MadeRows) -> None:
    """Enter what came with the bytes of rows, and do for these rows what no feeder does."""
    part = slice(start, stop)
    if made.samples is not None and job.samples is not None:
        job.samples[part] = made.samples
    for name, rows in made.lists.items():
        assert job.results is not None
        job.results.values[name][part] = rows
    assembler.take_in(job, start, stop, frozenset(row + start for row in made.bad))
