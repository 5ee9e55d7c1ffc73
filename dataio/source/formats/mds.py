"""Rows from MosaicML's MDS shards, compressed ones too.

A shard begins with a table of offsets; behind it a JSON document describes the columns. The file
``index.json`` of a dataset names the shards in their order.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Field, Raw
from dataio.source.base import SeekPoint, Shard
from dataio.source.formats.hashes import check_whole
from dataio.source.formats.index_json import indexed_counts
from dataio.source.formats.offset_table import OffsetTable, cut_values
from dataio.source.formats.records import RecordFormat, Take, check_keys, refuse_key, refuse_twice
from dataio.source.formats.stored_values import array, json_text, json_value, picture, read_json
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.window import ReadFile
from dataio.source.values import refuse_letters, shaped

AS_TEXT = ("str", "str_int", "str_float", "str_decimal", "json")
AS_BYTES = ("bytes", "jpeg", "png", *AS_TEXT)
SCALARS = {"int": "int64"} | {
    name: name
    for name in (
        "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
    )
}
DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
"""Of arrays that name their own dtype."""
NDARRAY = re.compile(r"ndarray(?::(\w+)(?::([\d,]+))?)?")


class MdsFormat(RecordFormat[OffsetTable]):
    """MDS shards: a field's key is a column, or ``column.key`` into a column of JSON."""

    def __init__(self) -> None:
        super().__init__(OffsetTable.read, _values)

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> list[int] | None:
        return indexed_counts(paths)

    def checked(self, storage: Storage, file: StorageFile) -> ReadFile:
        """Check a shard by the size and hash that its index has, the first time it is read."""
        return check_whole(file, storage)


@dataclass(frozen=True)
class _Columns:
    """The columns of a shard: names, encodings, and sizes in bytes, None where these vary."""

    names: Sequence[str]
    encodings: Sequence[str]
    sizes: Sequence[int | None]

    def find(self, path: str, name: str, field: Field) -> tuple[int, str, str]:
        """Find the column of a field: its number, its encoding, and the key into its JSON."""
        column, key = field.key, ""
        if column not in self.names:
            column, _, key = field.key.partition(".")
            is_json = column in self.names and self.encodings[self.names.index(column)] == "json"
            if not (key and is_json):
                check_keys(path, self.names, {name: field})
        if self.names.count(column) > 1:
            refuse_twice(path, column, name)
        number = self.names.index(column)
        encoding = self.encodings[number]
        known = encoding in AS_BYTES or encoding in SCALARS or encoding == "pil"
        if not known and NDARRAY.fullmatch(encoding) is None:
            what = "pickles, which are never loaded" if encoding == "pkl" else "of an unknown kind"
            raise FieldError(
                f"{path}: column {column!r} has the encoding {encoding!r}: {what}; expected one of "
                f"{', '.join([*AS_BYTES, *SCALARS, 'pil', 'ndarray'])} for field {name!r}; name "
                "another column, or write this one again in one of these"
            )
        if encoding in AS_TEXT and not key:
            refuse_letters(f"{path}: column {column!r}", field, name)
        return number, encoding, key


def _values(
    storage: Storage, table: OffsetTable, shard: Shard, fields: Mapping[str, Field]
) -> Take:
    columns = _read_columns(table, shard)
    wanted = [
        (name, field, *columns.find(shard.path, name, field)) for name, field in fields.items()
    ]

    def take(point: SeekPoint, data: memoryview) -> list[Raw]:
        where = f"{shard.path}: sample {point[0]}"
        values = cut_values(data, columns.sizes, where)
        raws: list[Raw] = []
        for name, field, column, encoding, key in wanted:
            value = _value(values[column], encoding, key, where, columns.names[column], field)
            if key and isinstance(value, np.ndarray):
                value = shaped(value, field, name)
            raws.append(value)
        return raws

    return take


def _read_columns(table: OffsetTable, shard: Shard) -> _Columns:
    try:
        found = json.loads(bytes(table.between()))
        names, encodings = found["column_names"], found["column_encodings"]
        sizes = found["column_sizes"]
        if found["version"] != 2 or not len(names) == len(encodings) == len(sizes):
            raise ValueError(f"version {found['version']}")
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(
            f"{shard.path}: found no description of columns behind the offsets ({error!r}), "
            "expected an MDS shard of version 2; it is damaged, or none: copy or write it again"
        ) from error
    return _Columns(names, encodings, [size or None for size in sizes])


def _value(data: memoryview, encoding: str, key: str, where: str, column: str, field: Field) -> Raw:
    try:
        if key:
            text = json_text(data)
            return json_value(read_json(text), key, where, field=field, text=text)
        if encoding in AS_BYTES:
            return data
        if encoding in SCALARS:
            return array(data, np.dtype(SCALARS[encoding]), ())
        if encoding == "pil":
            return picture(data, where)
        return _ndarray(data, encoding)
    except KeyError as error:
        refuse_key(f"{where}, column {column!r}", error.args, key, column)
    except (ValueError, IndexError) as error:
        raise SourceError(
            f"{where}: column {column!r}: found {len(data)} bytes that do not read as {encoding} "
            f"({error}); the shard is damaged: copy or write it again"
        ) from error


def _ndarray(data: memoryview, encoding: str) -> NDArray[np.generic]:
    """Read an array whose dtype and shape stand in the encoding or before its numbers."""
    match = NDARRAY.fullmatch(encoding)
    assert match is not None
    name, axes = match.groups()
    if name is None:
        name, data = DTYPES.get(data[0], f"dtype {data[0]}"), data[1:]
    if axes is None:
        num_axes, width = data[0] >> 2, 1 << (data[0] & 3)
        stop = 1 + num_axes * width
        shape = tuple(np.frombuffer(data[1:stop], f"<u{width}").tolist())
        data = data[stop:]
    else:
        shape = tuple(map(int, axes.split(",")))
    if name not in DTYPES.values():
        raise ValueError(f"unknown {name}")
    return array(data, np.dtype(name), shape)
