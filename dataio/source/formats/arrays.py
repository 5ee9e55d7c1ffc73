"""NumPy arrays as a source: one row a sample."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from os import PathLike, fspath

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.checked import checked
from dataio.base.errors import FieldError, SourceError
from dataio.base.location import bare
from dataio.rows.encoding import TIMES, converted, is_wider
from dataio.rows.fields import Array, Field, Float, Int, row_schema
from dataio.rows.rows import FixedColumn, Rows, make_rows
from dataio.rows.tiles import Box, Tiles
from dataio.source.base import check_ids
from dataio.source.formats.npy import NpyFile, ReadRows
from dataio.source.row_block import BLOCK_BYTES
from dataio.source.storage.files import Storage
from dataio.source.storage.throttle import Throttle
from dataio.source.values import refuse_letters, unmasked

HASH_BYTES = 64 << 20
"""Hashed together."""

Part = tuple[str, Tiles | None]
"""What is read for a field: its key, and its tiles, of which it is one."""


class MemoryArray:
    """An array that is there already."""

    def __init__(self, array: NDArray[np.generic]) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self._array = array

    def fingerprint(self) -> str:
        """Hash the bytes."""
        digest = xxhash.xxh3_64()
        rows = max(HASH_BYTES // max(self._array[:1].nbytes, 1), 1)
        for start in range(0, len(self._array), rows):
            digest.update(np.ascontiguousarray(self._array[start : start + rows]).tobytes())
        return digest.hexdigest()

    @contextmanager
    def opened(self, box: Box) -> Iterator[ReadRows]:
        """Offer a part of the rows for reading."""
        part = self._array[(slice(None), *box)]
        yield lambda numbers: part[numbers]

    def part_bytes(self, box: Box) -> int:
        """Nothing is read."""
        return 0


@checked
class NumpySource:
    """A `Source` of arrays that have one row for each sample.

    A field's key names an array. Every rank must be given the same.

    Args:
        arrays: For each key an array, or the path or URL of an ``.npy`` file.
        name: Names the cache, with ``://`` in it unless it is a path. By default the first file's
            path, or, of arrays in memory, what their bytes hash to.
        throttle: Slows down every read.

    Raises:
        SourceError: If a file is no ``.npy``, or the arrays differ in length.
    """

    made_as = "NumpySource"
    total_bytes = 0

    def __init__(
        self,
        arrays: Mapping[str, NDArray[np.generic] | str | PathLike[str]],
        *,
        name: str | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        if not arrays:
            raise ValueError('NumpySource: no arrays given; give some, such as {"image": array}')
        self._paths = [v for v in arrays.values() if not isinstance(v, np.ndarray)]
        # Of arrays in memory nothing is read.
        self._storage = Storage(throttle) if self._paths else None
        self._arrays = {key: _opened(key, value, self._storage) for key, value in arrays.items()}
        self._name = name
        lengths = {key: array.shape[0] for key, array in self._arrays.items()}
        self.num_samples = next(iter(lengths.values()))
        if len(set(lengths.values())) > 1 or self.num_samples < 1:
            shown = ", ".join(f"{key!r}: {length}" for key, length in lengths.items())
            raise SourceError(
                f"NumpySource: the arrays have {shown} rows, expected one length >= 1; give one "
                "row of each for every sample"
            )
        self.shard_starts = np.zeros(1, np.int64)

    @property
    def name(self) -> str:
        if self._name is not None:
            return bare(self._name)
        return bare(fspath(self._paths[0])) if self._paths else f"numpy://{self.fingerprint}"

    @cached_property
    def fingerprint(self) -> str:
        marks = [f"{key} {array.fingerprint()}" for key, array in self._arrays.items()]
        shapes = [f"{array.dtype.str} {array.shape}" for array in self._arrays.values()]
        return xxhash.xxh3_64_hexdigest("\n".join([*marks, *shapes]).encode())

    @property
    def bytes_read(self) -> int:
        return self._storage.bytes_read if self._storage is not None else 0

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Read samples; see `Source.read`."""
        check_ids(self, sample_ids)
        for name, field in fields.items():
            if field.key not in self._arrays:
                raise FieldError(
                    f"{self.name}: found the arrays {', '.join(self._arrays)}, expected "
                    f"{field.key!r} for field {name!r}; name one of these"
                )
            shape = self._arrays[field.key].shape[1:]
            if isinstance(field, Array) and field.tiles is not None and field.shape != shape:
                raise FieldError(
                    f"{self.name}: a row of the array {field.key!r} is {list(shape)}, expected "
                    f"{list(field.shape)} for field {name!r}; declare the shape of a whole sample, "
                    "of which each rank reads a tile"
                )
        return self._read(sample_ids, fields)

    def tile_bytes(self, field: Array, tiles: Tiles) -> tuple[int, str]:
        """Count the bytes of a sample that are read for a tile; see `ReadsTiles`."""
        cure = "cut along the first axes: their parts lie apart in the file"
        return self._arrays[field.key].part_bytes(tiles.box(field.shape)), cure

    def _read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        parts = {(field.key, getattr(field, "tiles", None)) for field in fields.values()}
        keys = {key for key, _ in parts}
        row_bytes = sum(
            array.dtype.itemsize * int(np.prod(array.shape[1:]))
            for key, array in self._arrays.items()
            if key in keys
        )
        num_rows = max(BLOCK_BYTES // max(row_bytes, 1), 1)
        with ExitStack() as files:
            rows: dict[Part, ReadRows] = {}
            for key, tiles in parts:
                array = self._arrays[key]
                box = tuple(slice(0, length) for length in array.shape[1:])
                box = box if tiles is None else tiles.box(array.shape[1:])
                rows[key, tiles] = files.enter_context(array.opened(box))
            for start in range(0, len(sample_ids), num_rows):
                ids = sample_ids[start : start + num_rows]
                values = {part: read(ids) for part, read in rows.items()}
                yield array_rows(ids, values, fields, self.name)


def array_rows(
    ids: NDArray[np.int64],
    values: Mapping[Part, NDArray[np.generic]],
    fields: Mapping[str, Field],
    where: str,
) -> Rows:
    """Turn arrays that have one row for each sample into rows.

    Args:
        ids: int64[n]: The samples.
        values: By key and tiles, dtype[n, ...].
        fields: What to keep of a sample.
        where: The source, for the message.

    Raises:
        FieldError: If a value is not what its field declares.
    """
    fixed: list[NDArray[np.uint8]] = []
    lengths: list[list[int]] = []
    variable: list[NDArray[np.uint8]] = []
    for name, field in fields.items():
        tiles = getattr(field, "tiles", None)
        rows, column = _whole_times(values[field.key, tiles]), field.column(name)
        if isinstance(field, Array) and tiles is not None and column is not None:
            field = replace(field, shape=column.shape, tiles=None)  # as it was read
        stored = _stored(field, column, rows) if column is not None else None
        if column is not None and stored is not None:
            fixed.append(stored.view(np.uint8).reshape(len(ids), column.width_bytes))
            continue
        at = f"{where}: field {name!r}, array {field.key!r}"
        if rows.dtype.kind in "SU":
            refuse_letters(at, field, name)
        # Rows of one dimension are values, of more are arrays; so is what must keep its dtype, and
        # a record, which is no list of its numbers.
        is_typed = rows.ndim > 1 or rows.dtype.kind in f"{TIMES}V"
        is_typed |= isinstance(field, Array) and rows.dtype.kind in "biufc"
        each = map(np.asarray, rows) if is_typed else rows.tolist()
        parts = [
            field.encode(row, f"{at}, sample {sample_id}")
            for sample_id, row in zip(ids.tolist(), each, strict=True)
        ]
        data = np.frombuffer(b"".join(parts), np.uint8)
        if column is not None:
            fixed.append(data.reshape(len(ids), column.width_bytes))
        else:
            lengths.append([len(part) for part in parts])
            variable.append(data)
    # int64[num_rows, num_variable]
    widths = np.array(lengths, np.int64).reshape(-1, len(ids)).T
    return make_rows(row_schema(fields), ids, fixed, np.ascontiguousarray(widths), variable)


def _opened(
    key: str, value: NDArray[np.generic] | str | PathLike[str], storage: Storage | None
) -> MemoryArray | NpyFile:
    if storage is not None and isinstance(value, (str, PathLike)):
        return NpyFile(fspath(value), storage)
    if not isinstance(value, np.ndarray) or value.ndim == 0 or value.dtype.hasobject:
        found = (
            f"{value.dtype}{list(value.shape)}"
            if isinstance(value, np.ndarray)
            else type(value).__name__
        )
        raise SourceError(
            f"NumpySource: array {key!r} is {found}, expected an array of numbers or text with one "
            "row a sample, or a path; convert it with np.asarray"
        )
    if isinstance(value, np.ma.MaskedArray):
        value = unmasked(value, f"NumpySource: array {key!r}")
    return MemoryArray(value)


def _whole_times(rows: NDArray[np.generic]) -> NDArray[np.generic]:
    """Turn dates and durations into whole numbers of their unit, unless one is missing."""
    if rows.dtype.kind not in TIMES:
        return rows
    whole, at = converted(rows, np.dtype(np.int64))
    return whole if at < 0 else rows


def _stored(
    field: Field, column: FixedColumn, rows: NDArray[np.generic]
) -> NDArray[np.generic] | None:
    """Bring all rows to what is stored at once; None where `encode` has to look at each."""
    dtype = np.dtype(column.dtype)
    if rows.shape[1:] != column.shape:
        return None
    is_free = rows.dtype.newbyteorder("=") == dtype.newbyteorder("=")
    if isinstance(field, Array):
        is_free = is_wider(rows.dtype, dtype)
    if is_free or isinstance(field, (Int, Float)):
        stored, at = converted(rows, dtype)
        return np.ascontiguousarray(stored) if at < 0 else None
    return None
