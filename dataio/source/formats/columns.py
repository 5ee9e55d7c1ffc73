"""Arrow tables -> rows: what Parquet, Arrow files and Hugging Face datasets have in common."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataio.base.errors import FieldError, SourceError
from dataio.rows.encoding import converted
from dataio.rows.fields import (
    Array,
    Bytes,
    Field,
    Float,
    Image,
    Int,
    Mask,
    Stored,
    Text,
    Tokens,
    other_for,
    row_schema,
)
from dataio.rows.rows import FixedColumn, Rows, make_rows, row_offsets
from dataio.source.formats.records import refuse_twice
from dataio.source.row_block import BLOCK_BYTES
from dataio.source.values import raw_value, refuse_letters

MOST_BYTES = 8 * BLOCK_BYTES
"""Rows that together have more are divided further: their sizes are not alike."""

VaryingColumn = tuple[NDArray[np.int64], NDArray[np.uint8]]
"""Bounds, int64[num_rows + 1] from 0, and the bytes of all rows back to back."""


def check_columns(path: str, names: Sequence[str], fields: Mapping[str, Field]) -> None:
    """Refuse a shard that lacks the column of a field, or has two of its name.

    Raises:
        FieldError: If it does.
    """
    for name, field in fields.items():
        if field.key not in names:
            raise FieldError(
                f"{path}: found the columns {', '.join(names)}, expected {field.key!r} for "
                f"field {name!r}; name one of these columns, or add it to the shard"
            )
        if names.count(field.key) > 1:
            refuse_twice(path, field.key, name)


def check_units(
    path: str, schema: pa.Schema, keys: Iterable[str], like: str, read_like: Callable[[], pa.Schema]
) -> None:
    """Refuse a shard whose times are in another unit than those of the source's first.

    Args:
        path: Of the shard.
        schema: Of the shard.
        keys: The columns that fields are read from.
        like: Path of the first shard; "" if it is this.
        read_like: Reads the schema of that.

    Raises:
        SourceError: If a number would stand for two times.
    """
    units = {key: _unit(schema.field(key).type) for key in sorted(set(keys))}
    if not like or not any(units.values()):
        return
    first = read_like()
    for key, unit in units.items():
        its = _unit(first.field(key).type) if first.get_field_index(key) >= 0 else ""
        if unit and its and unit != its:
            raise SourceError(
                f"{path}: column {key!r} holds {schema.field(key).type}, and "
                f"{first.field(key).type} in {like}, so that one number stands for two times, "
                "expected one unit in all shards; write one of them again, cast to the other's "
                "type"
            )


def _unit(kind: pa.DataType) -> str:
    """Name the unit of times, or of lists of them; "" of what is none."""
    while _is_list(kind):
        kind = kind.value_type
    if not _is_time(kind):
        return ""
    if pa.types.is_date(kind):
        return "days" if kind.bit_width == 32 else "ms"
    return str(kind.unit)


def table_rows(
    table: pa.Table,
    rows: NDArray[np.int64],
    fields: Mapping[str, Field],
    *,
    first: int,
    path: str,
) -> Iterator[Rows]:
    """Turn some rows of a table into blocks of about 8 MiB.

    Args:
        table: Holds every field's key as a column.
        rows: int64[n]: Which rows, sorted, distinct, n >= 1.
        fields: What to keep.
        first: Number of the table's first row as a sample.
        path: Of the shard, for messages.
    """
    if rows[-1] - rows[0] + 1 == len(rows):
        table = table.slice(int(rows[0]), len(rows))
    else:
        table = _taken(table, rows)
    ids = first + rows
    num_bytes = _num_bytes(table)
    num_rows = max(1, int(BLOCK_BYTES * len(ids) // max(num_bytes, 1)))
    for at in range(0, len(ids), num_rows):
        block = table.slice(at, num_rows)
        parts = _divided(block, at) if num_bytes > MOST_BYTES else [(at, block)]
        for start, part in parts:
            yield _rows(part, ids[start : start + len(part)], fields, path)


def _taken(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """Take rows out of each chunk by itself: Arrow joins no more than 2 GiB."""
    batches = table.to_batches()
    cuts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    bounds = np.searchsorted(rows, cuts)
    parts = [
        batch.take(pa.array(rows[low:high] - start))
        for batch, start, low, high in zip(batches, cuts[:-1], bounds[:-1], bounds[1:], strict=True)
        if low < high
    ]
    return pa.Table.from_batches(parts)


def _divided(table: pa.Table, at: int) -> Iterator[tuple[int, pa.Table]]:
    """Halve a part of a table, and again, until no piece of several rows is far above its size."""
    if len(table) == 1 or _num_bytes(table) <= MOST_BYTES:
        yield at, table
        return
    half = len(table) // 2
    yield from _divided(table.slice(0, half), at)
    yield from _divided(table.slice(half), at + half)


def _num_bytes(table: pa.Table) -> int:
    try:
        return int(table.nbytes)
    except pa.ArrowTypeError:  # Arrow 17, of string views
        return int(table.get_total_buffer_size())


def one_line(error: Exception) -> str:
    """Bring what Arrow says to one line."""
    return " ".join(str(error).split())


def _rows(table: pa.Table, ids: NDArray[np.int64], fields: Mapping[str, Field], path: str) -> Rows:
    fixed: list[NDArray[np.uint8]] = []
    lengths: list[NDArray[np.int64]] = []
    variable: list[NDArray[np.uint8]] = []
    for name, field in fields.items():
        where = _Where(path, name, field, ids)
        values = _plain(table.column(field.key).combine_chunks(), where)
        column = field.column(name)
        if column is not None:
            fixed.append(_fixed(values, field, column, where))
            continue
        offsets, data = _variable(values, field, where)
        lengths.append(np.diff(offsets))
        variable.append(data)
    # int64[num_rows, num_variable]
    widths = np.stack(lengths, axis=1) if lengths else np.empty((len(ids), 0), np.int64)
    return make_rows(row_schema(fields), ids, fixed, widths, variable)


class _Where:
    """Says where a value is, when it is refused."""

    def __init__(self, path: str, name: str, field: Field, ids: NDArray[np.int64]) -> None:
        self.name, self.field = name, field
        self._column = f"{path}: field {name!r}, column {field.key!r}"
        self._ids = ids

    def row(self, row: int) -> str:
        return f"{self._column}, sample {self._ids[row]}"

    def refuse(self, found: str, expected: str, *, row: int = 0, cure: str = "") -> NoReturn:
        cure = cure or "declare the field as what the column holds"
        raise FieldError(
            f"{self.row(int(row))}: found {found}, expected {expected}; {cure}, or repair the "
            "column"
        )

    def refuse_number(
        self, kind: pa.DataType, number: object, dtype: np.dtype[np.generic], *, row: int
    ) -> NoReturn:
        kept = f"{type(self.field).__name__}({self.field.key!r})"
        cure = f"declare {other_for(self.field, number)} instead of {kept}"
        self.refuse(f"{kind} {number!s:.40}", f"what fits in {dtype.name}", row=row, cure=cure)


def _plain(values: pa.Array, where: _Where) -> pa.Array:
    """Undo dictionaries, extensions, and the struct of bytes and path that image datasets use."""
    paths: pa.Array | None = None
    if isinstance(values, pa.ExtensionArray):
        values = _storage(values, where)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_struct(values.type) and values.type.get_field_index("bytes") >= 0:
        if values.type.get_field_index("path") >= 0:
            paths = _member(values, "path")
        values = _member(values, "bytes")
    if pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type):
        values = _without_views(values)
    if values.null_count:
        row = _first(values.is_null())
        held = paths[row].as_py() if paths is not None else None
        if held is not None:
            where.refuse(f"only the path {held!r}", "the bytes of the file in the column", row=row)
        where.refuse("null", "a value", row=row)
    return values


def _storage(values: pa.ExtensionArray, where: _Where) -> pa.Array:
    """Find what an extension is stored as: tensors as lists of their shape."""
    storage = values.storage
    if not isinstance(values.type, pa.FixedShapeTensorType) or storage.null_count:
        return storage
    order = values.type.permutation
    if order is not None and list(order) != sorted(order):
        where.refuse(f"tensors whose axes are permuted by {order}", "none that are")
    inner = storage.flatten()
    for length in reversed(values.type.shape):
        inner = pa.FixedSizeListArray.from_arrays(inner, length)
    return inner


def _without_views(values: pa.Array) -> pa.Array:
    kind = pa.large_string() if pa.types.is_string_view(values.type) else pa.large_binary()
    try:
        return values.cast(kind)
    except pa.ArrowNotImplementedError:  # Arrow 17
        return pa.array(values.to_pylist(), kind)


def _variable(values: pa.Array, field: Field, where: _Where) -> VaryingColumn:
    if isinstance(field, Tokens) and _is_list(values.type):
        return _tokens(values, field, where)
    if type(field) not in (Bytes, Text, Image, Mask):
        parts = _encoded(values, field, where)
        return row_offsets(np.array([len(part) for part in parts], np.int64)), _joined(parts)
    offsets, data = _binary(values, where)
    if isinstance(field, Text):
        # By way of bytes: a text column is taken at its word, bytes are looked at.
        _cast(values.cast(pa.large_binary()), pa.large_string(), where, "UTF-8 text")
    return offsets, data


def _tokens(values: pa.Array, field: Tokens, where: _Where) -> VaryingColumn:
    """Take the lists of a column apart; what a list that is null would hold was refused before."""
    dtype = np.dtype(field.dtype).newbyteorder("<")
    bounds = row_offsets(_list_lengths(values).astype(np.int64))
    numbers = values.flatten()

    def row_of(at: int) -> int:
        return int(np.searchsorted(bounds, at, side="right")) - 1

    if _is_list(numbers.type) or not (_is_number(numbers.type) or pa.types.is_null(numbers.type)):
        where.refuse(f"lists of {numbers.type}", "lists of numbers")
    if numbers.null_count:
        where.refuse("null in a list", "numbers", row=row_of(_first(numbers.is_null())))
    stored = _numbers(numbers, dtype, where, row_of)
    return bounds * dtype.itemsize, stored.view(np.uint8)


def _binary(values: pa.Array, where: _Where) -> VaryingColumn:
    """Find the bounds and the bytes of bytes or text."""
    try:
        values = values.cast(pa.large_binary())
    except pa.ArrowException:
        where.refuse(f"the type {values.type}", "bytes or text")
    _, bounds, data = values.buffers()
    if not len(values):
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    offsets = np.frombuffer(bounds, np.int64)[values.offset : values.offset + len(values) + 1]
    held = (
        np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    )
    return offsets - offsets[0], held[offsets[0] : offsets[-1]]


def _fixed(values: pa.Array, field: Field, column: FixedColumn, where: _Where) -> NDArray[np.uint8]:
    """Turn a column into uint8[num_rows, width_bytes]."""
    num_rows = len(values)
    if not _is_listed(values.type) or type(field) not in (Int, Float, Array, Image):
        return _joined(_encoded(values, field, where)).reshape(num_rows, column.width_bytes)
    values = _flatten(values, column, where)
    per_row = len(values) // max(num_rows, 1)
    stored = _numbers(values, np.dtype(column.dtype), where, lambda at: at // per_row)
    return stored.view(np.uint8).reshape(num_rows, column.width_bytes)


def _encoded(values: pa.Array, field: Field, where: _Where) -> list[Stored]:
    """Let the field look at each value by itself."""
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        refuse_letters(where.row(0), field, where.name)
    if _is_listed(values.type) and not isinstance(field, Tokens):
        held = _whole_times(values).to_pylist()
        raws = [raw_value(value, where.row(row)) for row, value in enumerate(held)]
        return [field.encode(raw, where.row(row)) for row, raw in enumerate(raws)]
    offsets, data = _binary(values, where)
    view, cuts = memoryview(data.tobytes()), offsets.tolist()
    return [
        field.encode(view[start:stop], where.row(row))
        for row, (start, stop) in enumerate(pairwise(cuts))
    ]


def _joined(parts: Sequence[Stored]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), np.uint8)


def _flatten(values: pa.Array, column: FixedColumn, where: _Where) -> pa.Array:
    """Take lists apart, down to numbers, checking that every row has the field's shape."""
    shape: list[int] = []
    num_rows = len(values)
    while _is_list(values.type):
        per_row = max(len(values) // num_rows, 1)
        lengths = _list_lengths(values)
        uneven = np.flatnonzero(lengths != lengths[0])
        if len(uneven):
            at = int(uneven[0])
            found = f"lists of {lengths[0]} and {lengths[at]}"
            where.refuse(found, "one length", row=at // per_row)
        shape.append(int(lengths[0]))
        values = values.flatten()
        if not len(values):
            where.refuse("nothing in a list", "numbers", row=0)
        if values.null_count:
            row = _first(values.is_null()) // (len(values) // num_rows)
            where.refuse("null in a list", "numbers", row=row)
    if not _is_number(values.type):
        where.refuse(f"lists of {values.type}", "lists of numbers")
    is_flat = len(column.shape) > 1 and shape == [math.prod(column.shape)]
    if tuple(shape) != column.shape and not is_flat:
        where.refuse(f"the shape {shape}", f"{list(column.shape)}", row=0)
    return values


def _numbers(
    values: pa.Array, dtype: np.dtype[np.generic], where: _Where, row_of: Callable[[int], int]
) -> NDArray[np.generic]:
    """Bring numbers to a dtype by the rule of all fields; times are numbers of their unit."""
    kind = values.type
    if pa.types.is_null(kind):
        return np.empty(0, dtype)
    if pa.types.is_decimal(kind):
        return _decimals(values, dtype, where, row_of)
    found = _whole_times(values).to_numpy(False)
    stored, at = converted(found, dtype)
    if at >= 0:
        where.refuse_number(kind, found[at].item(), dtype, row=row_of(at))
    return np.ascontiguousarray(stored)


def _decimals(
    values: pa.Array, dtype: np.dtype[np.generic], where: _Where, row_of: Callable[[int], int]
) -> NDArray[np.generic]:
    if dtype.kind in "iu":
        whole = pa.from_numpy_dtype(dtype.newbyteorder("="))
        kept = _cast(values, whole, where, f"what fits in {dtype.name}", row_of)
        return np.asarray(kept.to_numpy(False))
    numbers = values.to_pylist()
    found = np.array([float(number) for number in numbers], np.float64)
    stored, at = converted(found, dtype)
    # What is not whole may be rounded.
    large = np.flatnonzero(np.abs(found) >= 2.0**53).tolist()
    others = [i for i in large if numbers[i] != found[i]]
    if others or at >= 0:
        at = min([*others[:1], *([at] if at >= 0 else [])])
        number = numbers[at]
        plain = int(number) if number == int(number) else float(number)
        where.refuse_number(values.type, plain, dtype, row=row_of(at))
    return stored


def _cast(
    values: pa.Array,
    kind: pa.DataType,
    where: _Where,
    expected: str,
    row_of: Callable[[int], int] = int,
) -> pa.Array:
    """Cast, or name the first sample that does not fit."""
    try:
        return values.cast(kind)
    except pa.ArrowException as error:
        said = one_line(error)
    at = bisect_left(range(len(values)), True, key=lambda n: not _casts(values[: n + 1], kind))
    found = f"{values.type} {values[at].as_py()!s:.40} ({said})"
    where.refuse(found, expected, row=row_of(at))


def _casts(values: pa.Array, kind: pa.DataType) -> bool:
    try:
        values.cast(kind)
    except pa.ArrowException:
        return False
    return True


def _whole_times(values: pa.Array) -> pa.Array:
    """Turn dates, times and durations into the whole numbers of their unit; leave others."""
    if not _is_time(values.type):
        return values
    return values.cast(pa.int32() if values.type.bit_width == 32 else pa.int64())


def _first(flags: pa.Array) -> int:
    return int(flags.to_numpy(False).argmax())


def _member(values: pa.Array, name: str) -> pa.Array:
    # Imported late: it takes longer than everything else that `import dataio` brings in.
    import pyarrow.compute as pc

    return pc.struct_field(values, name)


def _list_lengths(values: pa.Array) -> NDArray[np.int64]:
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(values).to_numpy(False))


def _is_list(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in kinds)


def _is_listed(kind: pa.DataType) -> bool:
    return _is_number(kind) or _is_list(kind)


def _is_number(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(is_kind(kind) for is_kind in kinds) or _is_time(kind)


def _is_time(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_time, pa.types.is_duration)
    return any(is_kind(kind) for is_kind in kinds)
