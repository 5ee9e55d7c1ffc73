"""Rows from Parquet shards, one row group at a time, column by column."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataio.errors import FieldError, SourceError
from dataio.fields import Field, row_schema
from dataio.rows import FixedColumn, Rows, make_rows
from dataio.source.base import Shard
from dataio.source.files import Storage, StorageFile
from dataio.source.row_block import BLOCK_BYTES


class ParquetFormat:
    """Parquet shards: a sample is a row, a field's key a column."""

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> None:
        return None

    def count(self, storage: Storage, path: str) -> int:
        with storage.open(path) as file:
            return int(_open(file).metadata.num_rows)

    def read(
        self,
        storage: Storage,
        shard: Shard,
        numbers: NDArray[np.int64],
        fields: Mapping[str, Field],
    ) -> Iterator[Rows]:
        """Read samples of a shard; row groups that hold none of them are left out."""
        with storage.open(shard.path) as file:
            parquet = _open(file)
            _check(parquet, shard, fields)
            columns = sorted({field.key for field in fields.values()})
            stop = 0
            for group in range(parquet.metadata.num_row_groups):
                start, stop = stop, stop + parquet.metadata.row_group(group).num_rows
                first, last = np.searchsorted(numbers, [start, stop])
                if first == last:
                    continue
                table = _read_group(parquet, group, columns, shard.path)
                table = _choose(table, numbers[first:last] - start)
                ids = shard.first + numbers[first:last]
                num_rows = max(1, int(BLOCK_BYTES * len(ids) // max(table.nbytes, 1)))
                for at in range(0, len(ids), num_rows):
                    part = slice(at, at + num_rows)
                    yield _rows(table.slice(at, num_rows), ids[part], fields, shard.path)


class _File(io.RawIOBase):
    """What pyarrow expects of a Python file, over counted reads."""

    def __init__(self, file: StorageFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        length = self._file.size - self._position if size is None or size < 0 else size
        data = self._file.read_at(self._position, length)
        self._position += len(data)
        return data


def _open(file: StorageFile) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(pa.PythonFile(_File(file), mode="r"), pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{file.path}: found {file.size} bytes that do not read as Parquet ({_said(error)}), "
            "expected a whole Parquet file; copy or write the shard again"
        ) from error


def _check(parquet: pq.ParquetFile, shard: Shard, fields: Mapping[str, Field]) -> None:
    if parquet.metadata.num_rows != shard.num_samples:
        raise SourceError(
            f"{shard.path}: found {parquet.metadata.num_rows} rows, expected {shard.num_samples} "
            "as when it was opened; something is writing to it: start again when it is whole"
        )
    names = parquet.schema_arrow.names
    for name, field in fields.items():
        if field.key not in names:
            raise FieldError(
                f"{shard.path}: found the columns {', '.join(names)}, expected {field.key!r} for "
                f"field {name!r}; name one of these columns, or add it to the shard"
            )


def _read_group(parquet: pq.ParquetFile, group: int, columns: Sequence[str], path: str) -> pa.Table:
    try:
        return parquet.read_row_group(group, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{path}: row group {group} does not read ({_said(error)}), expected "
            f"{', '.join(columns)} of its rows; the shard is damaged: copy or write it again"
        ) from error


def _choose(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    if rows[-1] - rows[0] + 1 == len(rows):
        return table.slice(int(rows[0]), len(rows))
    return table.take(pa.array(rows))


def _rows(table: pa.Table, ids: NDArray[np.int64], fields: Mapping[str, Field], path: str) -> Rows:
    fixed: list[NDArray[np.uint8]] = []
    lengths: list[NDArray[np.int64]] = []
    variable: list[NDArray[np.uint8]] = []
    for name, field in fields.items():
        values = _plain(table.column(field.key).combine_chunks())
        where = _Where(path, field.key, ids)
        if values.null_count:
            where.refuse("null", "a value", row=values.is_null().to_numpy(False).argmax())
        column = field.column(name)
        if column is not None:
            fixed.append(_fixed(values, field, column, where))
            continue
        offsets, data = _binary(values, where)
        lengths.append(np.diff(offsets))
        variable.append(data)
    # int64[num_rows, num_variable]
    widths = np.stack(lengths, axis=1) if lengths else np.empty((len(ids), 0), np.int64)
    return make_rows(row_schema(fields), ids, fixed, widths, variable)


class _Where:
    """Says where a value is, when it is refused."""

    def __init__(self, path: str, key: str, ids: NDArray[np.int64]) -> None:
        self._column = f"{path}: column {key!r}"
        self._ids = ids

    def row(self, row: int) -> str:
        return f"{self._column}, sample {self._ids[row]}"

    def refuse(self, found: str, expected: str, *, row: int | None = None) -> NoReturn:
        where = self._column if row is None else self.row(int(row))
        raise FieldError(
            f"{where}: found {found}, expected {expected}; declare the field as what the column "
            "holds, or repair the column"
        )


def _plain(values: pa.Array) -> pa.Array:
    """Undo dictionaries, extensions, and the struct of bytes and path that image datasets use."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_struct(values.type) and values.type.get_field_index("bytes") >= 0:
        values = pc.struct_field(values, "bytes")
    return values


def _binary(values: pa.Array, where: _Where) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Find the bounds, int64[num_rows + 1] from 0, and the bytes of all rows back to back."""
    try:
        values = values.cast(pa.large_binary())
    except pa.ArrowException:
        where.refuse(f"the type {values.type}", "bytes or text")
    _, bounds, data = values.buffers()
    offsets = np.frombuffer(bounds, np.int64)[values.offset : values.offset + len(values) + 1]
    held = (
        np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    )
    return offsets - offsets[0], held[offsets[0] : offsets[-1]]


def _fixed(values: pa.Array, field: Field, column: FixedColumn, where: _Where) -> NDArray[np.uint8]:
    """Turn a column into uint8[num_rows, width_bytes]."""
    num_rows = len(values)
    if not (_is_number(values.type) or _is_list(values.type)):
        offsets, data = _binary(values, where)
        view, cuts = memoryview(data.tobytes()), offsets.tolist()
        parts = [
            field.encode(view[cuts[row] : cuts[row + 1]], where.row(row)) for row in range(num_rows)
        ]
        return np.frombuffer(b"".join(parts), np.uint8).reshape(num_rows, column.width_bytes)
    values = _flatten(values, column, where)
    try:
        numbers = values.cast(pa.from_numpy_dtype(np.dtype(column.dtype))).to_numpy(False)
    except pa.ArrowException as error:
        where.refuse(
            f"{values.type} ({_said(error)})", f"what fits in {np.dtype(column.dtype).name}"
        )
    stored = np.ascontiguousarray(numbers.astype(column.dtype))
    return stored.view(np.uint8).reshape(num_rows, column.width_bytes)


def _flatten(values: pa.Array, column: FixedColumn, where: _Where) -> pa.Array:
    """Take lists apart, down to numbers, checking that every row has the field's shape."""
    shape: list[int] = []
    while _is_list(values.type):
        lengths = pc.list_value_length(values).to_numpy(False)
        uneven = np.flatnonzero(lengths != lengths[0])
        if len(uneven):
            # Inner lists have no sample of their own to name.
            row = None if shape else int(uneven[0])
            where.refuse(f"lists of {lengths[0]} and {lengths[uneven[0]]}", "one length", row=row)
        shape.append(int(lengths[0]))
        values = values.flatten()
        if values.null_count or not len(values):
            where.refuse("null or nothing in a list", "numbers")
    if tuple(shape) != column.shape and shape != [np.prod(column.shape)]:
        where.refuse(f"the shape {shape}", f"{list(column.shape)}")
    return values


def _is_list(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in kinds)


def _is_number(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(is_kind(kind) for is_kind in kinds)


def _said(error: Exception) -> str:
    """Bring what Arrow says to one line."""
    return " ".join(str(error).split())
