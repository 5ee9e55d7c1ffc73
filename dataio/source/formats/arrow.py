"""Rows from Arrow shards: files (Feather), and streams, as Hugging Face datasets are kept."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.fields import Field
from dataio.rows.rows import Rows
from dataio.source.base import SampleCounts, Shard, ShardFormat
from dataio.source.formats.arrow_messages import BATCH, DICTIONARY, ArrowMessage, list_messages
from dataio.source.formats.columns import check_columns, check_units, one_line, table_rows
from dataio.source.formats.hugging_face import class_names
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.window import merge_extents

Parsed = TypeVar("Parsed")

READ_BYTES = 8 << 20
OFFSETS_AND_DATA = (
    pa.types.is_binary,
    pa.types.is_string,
    pa.types.is_large_binary,
    pa.types.is_large_string,
)
DATA = (
    pa.types.is_primitive,
    pa.types.is_decimal,
    pa.types.is_fixed_size_binary,
    pa.types.is_dictionary,
)
NESTED = (
    (pa.types.is_list, 2),
    (pa.types.is_large_list, 2),
    (pa.types.is_fixed_size_list, 1),
    (pa.types.is_struct, 1),
)
END = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowFormat(ShardFormat):
    """Arrow shards: a sample is a row, a field's key a column, a piece a record batch."""

    def count(self, storage: Storage, path: str) -> SampleCounts:
        """Count the rows of each record batch, by the headers."""
        with storage.open(path) as file:
            messages = list_messages(file)
        return SampleCounts([m.num_rows for m in messages if m.kind == BATCH and m.num_rows])

    def class_names(self, storage: Storage, path: str, key: str) -> list[str] | None:
        """Name the classes of a column, where Hugging Face wrote them."""
        return class_names(_read_schema(storage, path).metadata, key)

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples of a shard; batches and columns that hold none of them are left out."""
        with storage.open(shard.path) as file:
            messages = list_messages(file)
            stops = np.cumsum([message.num_rows for message in messages])
            if stops[-1] != shard.num_samples:
                raise SourceError(
                    f"{shard.path}: found {stops[-1]} rows, expected {shard.num_samples} as when "
                    "it was opened; something is writing to it: start again when it is whole"
                )
            reader = _BatchReader(file, messages, fields)
            keys = [field.key for field in fields.values()]
            check_units(
                shard.path, reader.schema, keys, shard.like,
                lambda: _read_schema(storage, shard.like),
            )  # fmt: skip
            cuts = np.searchsorted(numbers, stops)
            wanted = np.flatnonzero(np.diff(cuts, prepend=0))
            for run in _runs(messages, wanted):
                start = int(stops[run.start]) - messages[run.start].num_rows
                chosen = numbers[cuts[run.start - 1] : cuts[run.stop - 1]] - start
                table = reader.read(run)
                at = shard.first + start
                yield from table_rows(table, chosen, fields, first=at, path=shard.path)


def _runs(messages: Sequence[ArrowMessage], wanted: NDArray[np.int64]) -> Iterator[range]:
    """Join batches that follow one another, dictionaries between them included, up to 8 MiB."""
    run: range | None = None
    for number in wanted.tolist():
        if run is not None:
            between = messages[run.stop : number]
            small = messages[number].stop - messages[run.start].offset <= READ_BYTES
            if small and all(message.kind == DICTIONARY for message in between):
                run = range(run.start, number + 1)
                continue
            yield run
        run = range(number, number + 1)
    if run is not None:
        yield run


class _BatchReader:
    """Reads runs of messages, of the batches only the columns that the fields need."""

    def __init__(
        self, file: StorageFile, messages: Sequence[ArrowMessage], fields: Mapping[str, Field]
    ) -> None:
        self._file = file
        self._messages = messages
        schema_message = self._raw(messages[0])
        schema, names = self._parsed(lambda: _schema(schema_message + END))
        check_columns(file.path, names, fields)
        self.schema = schema
        keys = {field.key for field in fields.values()}
        self._columns = [i for i, name in enumerate(names) if name in keys]
        self._buffers = _needed_buffers(schema, self._columns)
        self._begin = [schema_message]
        self._next_dictionary = 1

    def read(self, run: range) -> pa.Table:
        """Read a run of messages, the dictionaries before it first."""
        for message in self._messages[self._next_dictionary : run.start]:
            if message.kind == DICTIONARY:
                self._begin.append(self._raw(message))
        self._next_dictionary = max(self._next_dictionary, run.start)
        chosen = [self._messages[number] for number in run]
        begin = b"".join(self._begin)
        size = chosen[-1].stop - chosen[0].offset
        # Pages of columns that are not needed are never touched.
        stream = np.zeros(len(begin) + size + len(END), np.uint8)
        stream[: len(begin)] = np.frombuffer(begin, np.uint8)
        stream[len(begin) + size :] = np.frombuffer(END, np.uint8)
        shift = len(begin) - chosen[0].offset
        extents = merge_extents(np.concatenate([self._extents(message) for message in chosen]))
        for low, high in extents.tolist():
            part = self._file.read_at(low, high - low)
            stream[shift + low : shift + high] = np.frombuffer(part, np.uint8)
        options = pa.ipc.IpcReadOptions(included_fields=self._columns, use_threads=False)
        held = pa.py_buffer(stream)

        def read() -> pa.Table:
            table = pa.ipc.open_stream(held, options=options).read_all()
            # Arrow takes offsets at their word: damaged ones would end the process.
            table.validate(full=True)
            return table

        return self._parsed(read)

    def _parsed(self, read: Callable[[], Parsed]) -> Parsed:
        try:
            return read()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise SourceError(
                f"{self._file.path}: its schema or a record batch does not read "
                f"({one_line(error)}), expected columns of its rows; the shard is damaged: copy "
                "or write it again"
            ) from error

    def _raw(self, message: ArrowMessage) -> bytes:
        return self._file.read_at(message.offset, message.stop - message.offset)

    def _extents(self, message: ArrowMessage) -> NDArray[np.int64]:
        """Say what to read of a message: int64[n, 2], [start, stop) in the file."""
        body = message.offset + message.header_bytes
        if message.kind != BATCH or len(self._buffers) != len(message.buffers):
            return np.array([[message.offset, message.stop]])
        starts, lengths = message.buffers[self._buffers].T
        parts = np.stack([starts, starts + lengths], axis=1) + body
        return np.concatenate([[[message.offset, body]], parts])


def _read_schema(storage: Storage, path: str) -> pa.Schema:
    with storage.open(path) as file:
        first = list_messages(file)[0]
        return _schema(file.read_at(first.offset, first.stop - first.offset) + END)[0]


def _schema(stream: bytes) -> tuple[pa.Schema, list[str]]:
    schema = pa.ipc.open_stream(stream).schema
    return schema, list(schema.names)


def _needed_buffers(schema: pa.Schema, columns: Sequence[int]) -> NDArray[np.bool_]:
    """Say which buffers of a batch belong to these columns; of no length where that is unknown."""
    counts = [_num_buffers(field.type) for field in schema]
    if None in counts:
        return np.empty(0, np.bool_)
    needed = np.isin(np.arange(len(counts)), columns)
    return np.repeat(needed, np.array(counts, np.int64))


def _num_buffers(kind: pa.DataType) -> int | None:
    """Count the buffers of a column; None for a kind that lays them out in another way."""
    if isinstance(kind, pa.BaseExtensionType):
        return _num_buffers(kind.storage_type)
    if any(is_kind(kind) for is_kind in OFFSETS_AND_DATA):
        return 3
    if any(is_kind(kind) for is_kind in DATA):
        return 2
    own = [number for is_kind, number in NESTED if is_kind(kind)]
    children = [_num_buffers(kind.field(i).type) for i in range(kind.num_fields)]
    if not own or None in children:
        return None
    return own[0] + sum(count for count in children if count is not None)
