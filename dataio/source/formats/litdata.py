"""Rows from LitData's chunks.

``index.json`` beside the chunks says what a sample is made of: the serializer of each of its
values, and the tree of dicts and lists that they are the leaves of.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Field, Raw
from dataio.source.base import SampleCounts, SeekPoint, Shard
from dataio.source.formats.index_json import ENTRY_BYTES, INDEX, index_beside, indexed_counts
from dataio.source.formats.offset_table import OffsetTable, cut_values
from dataio.source.formats.records import RecordFormat, Take, check_keys
from dataio.source.formats.stored_values import array, picture
from dataio.source.storage.files import Storage, StorageFile
from dataio.source.storage.window import ReadFile
from dataio.source.values import refuse_letters

AS_TEXT = ("str", "text")
AS_BYTES = ("bytes", "jpeg", "image", *AS_TEXT)
SCALARS = {"int": "int64", "float": "float64", "bool": "bool"}
NUMPY = (
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128 bool"
).split()
"""By the number that LitData gives each dtype of NumPy."""
TORCH = (
    "float32 float32 float64 float64 complex64 complex64 complex128 complex128 float16 float16 - "
    "uint8 int8 int16 int16 int32 int32 int64 int64 bool uint16"
).split()
"""By the number that LitData gives each dtype of torch; NumPy has no bfloat16."""
ARRAYS = ("numpy", "no_header_numpy", "tensor", "no_header_tensor")


class LitDataFormat(RecordFormat[OffsetTable]):
    """LitData chunks: a field's key is the leaf's key, with dots between those of nested ones.

    A value in a list or tuple is found by its position: "0", "1".
    """

    def __init__(self) -> None:
        super().__init__(OffsetTable.read, _values)

    def index_of(self, path: str) -> str:
        """Name the file that says what the samples of a chunk are made of."""
        return index_beside(path)

    def known_counts(self, storage: Storage, paths: Sequence[str]) -> list[int] | None:
        return indexed_counts(paths)

    def count(self, storage: Storage, path: str) -> SampleCounts:
        """Count the samples by the table that a chunk begins with."""
        _config_of(storage, path)
        return super().count(storage, path)

    def checked(self, storage: Storage, file: StorageFile) -> ReadFile:
        """Refuse a chunk that the index says is compressed or encrypted in a way not read here."""
        _config_of(storage, file.path)
        return file


@dataclass(frozen=True)
class _Config:
    """What the samples are made of: serializers by the keys of leaves; and each chunk's bytes."""

    kinds: Mapping[str, str]
    chunk_bytes: Mapping[str, int]

    def find(self, path: str, name: str, field: Field) -> tuple[int, str]:
        """Find the leaf of a field: its number and its serializer."""
        check_keys(path, self.kinds, {name: field})
        kind = self.kinds[field.key]
        base = kind.partition(":")[0]
        if base not in AS_BYTES and base not in SCALARS and base not in ARRAYS and base != "pil":
            what = "pickles, which are never loaded" if base == "pickle" else "not read here"
            raise FieldError(
                f"{path}: {field.key!r} has the serializer {kind!r}: {what}; expected one of "
                f"{', '.join([*AS_BYTES, *SCALARS, *ARRAYS, 'pil'])} for field {name!r}; name "
                "another value, or write it again as bytes, text, a number or an array"
            )
        if base in AS_TEXT:
            refuse_letters(f"{path}: {field.key!r}", field, name)
        return list(self.kinds).index(field.key), kind


def _config_of(storage: Storage, path: str) -> _Config:
    """Read the index of a chunk, once for each source: it lists all, and there may be many."""
    index = index_beside(path)
    return storage.metadata.once(
        index,
        lambda: _read_config(storage, index),
        size_of=lambda config: ENTRY_BYTES * (len(config.kinds) + len(config.chunk_bytes)),
    )


def _read_config(storage: Storage, index: str) -> _Config:
    if not storage.exists(index):
        raise SourceError(
            f"{index}: there is no such file beside the chunks, expected the one that LitData "
            "wrote; copy it too: it says what a sample is made of"
        )
    with storage.open(index) as file:
        data = file.read_at(0, file.size)
    try:
        document = json.loads(data)
        config = document["config"]
        kinds = config["data_format"]
        spec = json.loads(config["data_spec"])[1]
        names = [".".join(keys) or "0" for keys in _leaves(spec)]
        compression, level = config.get("compression"), config.get("compression_level")
        loader = config.get("item_loader") or "PyTreeLoader"
        sizes = {
            str(chunk["filename"]): int(chunk["chunk_bytes"])
            for chunk in document["chunks"]
            if "chunk_bytes" in chunk
        }
        if len(names) != len(kinds):
            raise ValueError(f"{len(names)} leaves of {len(kinds)} values")
        if len(set(names)) < len(names):
            raise ValueError(f"two leaves of one name among {', '.join(names)}")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SourceError(
            f"{index}: does not read as the index of LitData chunks ({error!r}); copy or write the "
            "dataset again"
        ) from error
    is_zstd = str(compression).startswith("zstd") and level in (None, "chunk")
    if config.get("encryption") or loader != "PyTreeLoader" or not (compression is None or is_zstd):
        raise SourceError(
            f"{index}: the chunks have the compression {compression!r} (level {level!r}), the "
            f"encryption {config.get('encryption')!r} and the item loader {loader!r}; expected "
            "none, or zstd of whole chunks, and PyTreeLoader; write them again, with litdata: "
            "optimize(..., compression=None)"
        )
    return _Config(dict(zip(names, kinds, strict=True)), sizes)


def _check_size(shard: Shard, offsets: NDArray[np.int64], config: _Config) -> None:
    """Refuse a chunk that the index says another length of: of its samples, or with the table."""
    expected = config.chunk_bytes.get(shard.path.rpartition("/")[2])
    if expected not in (None, offsets[-1], offsets[-1] - offsets[0]):
        raise SourceError(
            f"{shard.path}: holds {offsets[-1]} bytes, expected {expected} by {INDEX} beside it; "
            "one of the two is of another dataset, or damaged: copy or write both again"
        )


def _leaves(spec: Mapping[str, Any]) -> Iterator[list[str]]:
    """List the keys on the way to each leaf of a tree, as torch's pytree wrote it."""
    if spec["type"] is None:
        yield []
        return
    children = spec["children_spec"]
    keys = json.loads(spec["context"]) if spec["context"] else None
    names = keys if isinstance(keys, list) and len(keys) == len(children) else range(len(children))
    for name, child in zip(names, children, strict=True):
        for rest in _leaves(child):
            yield [str(name), *rest]


def _values(
    storage: Storage, table: OffsetTable, shard: Shard, fields: Mapping[str, Field]
) -> Take:
    config = _config_of(storage, shard.path)
    wanted = [config.find(shard.path, name, field) for name, field in fields.items()]
    _check_size(shard, table.offsets, config)

    def take(point: SeekPoint, data: memoryview) -> list[Raw]:
        where = f"{shard.path}: sample {point[0]}"
        values = cut_values(data, [None] * len(config.kinds), where)
        return [_value(values[leaf], kind, where) for leaf, kind in wanted]

    return take


def _value(data: memoryview, kind: str, where: str) -> Raw:
    base, _, dtype = kind.partition(":")
    try:
        if base in AS_BYTES:
            return data
        if base in SCALARS:
            return array(data, np.dtype(SCALARS[base]), ())
        if base == "pil":
            return picture(data, where)
        names, order = (NUMPY, "<") if base.endswith("numpy") else (TORCH, ">")
        if base.startswith("no_header"):
            return array(data, np.dtype(names[int(dtype)]), (-1,))
        number, num_axes = np.frombuffer(data[:8], f"{order}u4").tolist()
        start = 8 + 4 * num_axes
        shape = tuple(np.frombuffer(data[8:start], f"{order}u4").tolist())
        return array(data[start:], np.dtype(names[number]), shape)
    except (ValueError, IndexError, TypeError) as error:
        raise SourceError(
            f"{where}: found {len(data)} bytes that do not read as {kind} ({error}), expected what "
            "LitData's serializer writes; the chunk is damaged: copy or write it again"
        ) from error
