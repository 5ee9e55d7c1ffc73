"""Samples of array files, read cell by cell."""

import contextlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Array, Field
from dataio.rows.rows import Rows
from dataio.rows.tiles import Tiles
from dataio.source.base import check_ids
from dataio.source.formats.arrays import Part, array_rows
from dataio.source.formats.grids.listing import FORMATS
from dataio.source.formats.grids.numbering import (
    Axis,
    Numbering,
    cut_region,
    describe,
    number_samples,
    region,
    sample_shape,
    take_samples,
)
from dataio.source.formats.grids.variables import OpenFile, Variable, contiguous_chunks
from dataio.source.formats.raw import span_bytes
from dataio.source.row_block import BLOCK_BYTES
from dataio.source.storage.files import Storage

HALO_CHUNKS = 10
"""Chunks along a tile that has a halo: of its neighbours' chunks little is read then."""


@dataclass(frozen=True)
class FoundFile:
    """A file as a rank found it.

    Attributes:
        path: Where it is.
        kind: Its format, a key of `FORMATS`.
        version: What changes when the file does.
        variables: What it holds.
    """

    path: str
    kind: str
    version: Sequence[int | str]
    variables: Mapping[str, Variable]

    @classmethod
    def of(
        cls, path: str, kind: str, version: Sequence[int | str], found: Mapping[str, Sequence[Any]]
    ) -> "FoundFile":
        """Make it of what came as JSON."""
        variables = {
            name: Variable(tuple(dims), tuple(shape), dtype, tuple(chunks), unit)
            for name, (dims, shape, dtype, chunks, unit) in found.items()
        }
        return cls(path, kind, version, variables)


class _File(NamedTuple):
    found: FoundFile
    numbering: Numbering
    first: int
    """Number of its first sample."""


class ArrayFilesSource:
    """A `Source` of regions of array files; made by `ArrayFiles.open`.

    ``files`` are those that were found, in the order of their samples. ``bytes_read`` counts all
    that is asked of the storage, as it is stored: compressed chunks, indexes and headers included.

    Args:
        name: The pattern as it was given.
        files: In the order of their samples.
        axes: What divides a file into samples.
        declared: Of the declaration, all that decides which sample has which number.
        drop_edge: Whether what is left over at the end of a tiled axis is dropped.
        storage: Reads and counts.

    Raises:
        SourceError: If a file lacks an axis, or tiles do not fit, or there is no sample.
    """

    made_as = "ArrayFiles"
    total_bytes = 0

    def __init__(
        self,
        name: str,
        files: Sequence[FoundFile],
        axes: Sequence[Axis],
        *,
        declared: Sequence[object],
        drop_edge: bool,
        storage: Storage,
    ) -> None:
        self.name = name
        self.storage = storage
        self._axes = tuple(axes)
        self._checked: Mapping[str, Field] = {}
        self.files = tuple(files)
        numberings = [
            number_samples(file.variables, axes, drop_edge=drop_edge, path=file.path)
            for file in files
        ]
        firsts = [*accumulate((numbers.num_samples for numbers in numberings), initial=0)]
        self.num_samples = firsts[-1]
        self._files = [_File(*entry) for entry in zip(files, numberings, firsts, strict=False)]
        if not self.num_samples:
            raise SourceError(
                f"{name}: {len(files)} files hold no sample, expected at least one; check the "
                "pattern, and the length of the row axis"
            )
        self.shard_starts = _joined_starts(self._files)
        versions = [
            [PurePosixPath(file.path).name, file.kind, *file.version, numbers.counts, numbers.cell]
            for file, numbers in zip(files, numberings, strict=True)
        ]
        self.fingerprint = xxhash.xxh3_64_hexdigest(json.dumps([declared, versions]).encode())

    @property
    def bytes_read(self) -> int:
        return self.storage.bytes_read

    def place_of(self, sample_id: int) -> str:
        """Name a sample's file, and where in it the sample lies along each axis."""
        file = self._files[bisect_right(self._files, sample_id, key=lambda file: file.first) - 1]
        numbers = np.array([sample_id - file.first])
        _, places = file.numbering.locate(numbers, file.numbering.cell_starts())
        parts = [axis.place(at) for axis, at in zip(self._axes, places[0].tolist(), strict=True)]
        return f"{file.found.path}[{', '.join(parts)}]" if parts else file.found.path

    def number_fields(self) -> dict[str, Array]:
        """Describe the variables of numbers as fields of their names, as samples have them.

        Left out are those that lack an axis which divides the files, and those of coordinates.
        """
        found: dict[str, Array] = {}
        for key, variable in self.files[0].variables.items():
            if None in (axis.of(variable) for axis in self._axes) or variable.dims == (key,):
                continue
            with contextlib.suppress(ValueError, FieldError):
                shape = sample_shape(variable, self._axes)
                field = Array(key, shape, _dtype(variable))
                self._check(self._files[0], key, field)
                found[key] = field
        return found

    def sample_dims(self, key: str) -> tuple[str, ...]:
        """Name the dimensions of a variable's part of a sample."""
        return self._dims(self.files[0].variables[key])

    def _dims(self, variable: Variable) -> tuple[str, ...]:
        rows = [axis.of(variable) for axis in self._axes if axis.is_row]
        return tuple(name for at, name in enumerate(variable.dims) if at not in rows)

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Read samples; see `Source.read`.

        Raises:
            FieldError: Before anything is read, if a file lacks a variable, or an `Array` has
                another shape or dtype than the variable's part of a sample.
        """
        check_ids(self, sample_ids)
        if fields != self._checked:
            for file in self._files:
                for name, field in fields.items():
                    self._check(file, name, field)
            self._checked = dict(fields)
        return self._read(sample_ids, fields)

    def _read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        parts = {(field.key, getattr(field, "tiles", None)): field for field in fields.values()}
        keys = sorted({key for key, _ in parts})
        block = _CellBlock(fields, self.name)
        firsts = np.array([file.first for file in self._files] + [self.num_samples])
        cuts = np.searchsorted(sample_ids, firsts).tolist()
        for file, start, stop in zip(self._files, cuts[:-1], cuts[1:], strict=True):
            if stop > start:
                ids = sample_ids[start:stop]
                with FORMATS[file.found.kind].opened(self.storage, file.found.path) as opened:
                    self._check_same(file, opened, keys)
                    for some, places in _parts(file, ids):
                        values = {
                            part: self._values(file, opened, field, places)
                            for part, field in parts.items()
                        }
                        yield from block.add(some, values)
        yield from block.take()

    def _values(
        self, file: _File, opened: OpenFile, field: Field, places: NDArray[np.int64]
    ) -> NDArray[np.generic]:
        variable = file.found.variables[field.key]
        low, high = places.min(axis=0), places.max(axis=0) + 1
        box = region(variable, self._axes, low.tolist(), high.tolist())
        if not isinstance(field, Array) or field.tiles is None:
            return take_samples(opened.read(field.key, box), variable, self._axes, places - low)
        part, inside = cut_region(variable, self._axes, box, field.tiles.box(field.shape))
        held = variable._replace(shape=tuple(each.stop - each.start for each in part))
        samples = take_samples(opened.read(field.key, part), held, self._axes, places - low)
        return samples[(slice(None), *inside)]

    def tile_bytes(self, field: Array, tiles: Tiles) -> tuple[int, str]:
        """Count the bytes of a sample that are read for a tile; see `ReadsTiles`."""
        self._check(self._files[0], field.key, field)
        variable, axes = self.files[0].variables[field.key], self._axes
        whole = region(variable, axes, [0] * len(axes), [1] * len(axes))
        box, _ = cut_region(variable, axes, whole, tiles.box(field.shape))
        itemsize, chunks = np.dtype(variable.dtype).itemsize, [*variable.chunks]
        if variable.chunks == contiguous_chunks(variable.shape, itemsize):
            num_bytes = span_bytes(variable.shape, box, itemsize)
        else:
            divided = [axis.of(variable) for axis in axes]
            # A chunk of several samples is read once for all of them
            num_bytes = itemsize * prod(
                part.stop - part.start
                if at in divided
                else min(-(-part.stop // chunk) * chunk, length) - part.start // chunk * chunk
                for at, (part, chunk, length) in enumerate(
                    zip(box, variable.chunks, variable.shape, strict=True)
                )
            )
        core, _ = cut_region(variable, axes, whole, replace(tiles, halo=0).box(field.shape))
        for at, part in enumerate(core):
            if part != whole[at]:
                width = part.stop - part.start
                fitting = max(tiles.halo, width // HALO_CHUNKS, 1) if tiles.halo else width
                chunks[at] = min(fitting, chunks[at])
        return num_bytes, f"write it as Zarr or HDF5 in chunks of at most {chunks}"

    def _check_same(self, file: _File, opened: OpenFile, keys: Sequence[str]) -> None:
        """Refuse a file that is not any more what was found."""
        for key in keys:
            then, now = file.found.variables[key], opened.variables.get(key)
            if now is None or (then.shape, then.dtype) != (now.shape, now.dtype):
                found = f"{_dtype(now)}{list(now.shape)}" if now else "nothing"
                raise SourceError(
                    f"{file.found.path}: the variable {key!r} is {found}, was {_dtype(then)}"
                    f"{list(then.shape)} when it was opened first; something is writing to it: "
                    "start again when it is whole"
                )

    def _check(self, file: _File, name: str, field: Field) -> None:
        path, variables = file.found.path, file.found.variables
        if field.key not in variables:
            raise FieldError(
                f"{path}: holds {describe(variables)}, expected {field.key!r} for field {name!r}; "
                "name one of these"
            )
        variable = variables[field.key]
        for axis, length in zip(self._axes, file.numbering.lengths, strict=True):
            at = axis.of(variable)
            if at is not None and variable.shape[at] != length:
                raise FieldError(
                    f"{path}: the variable {field.key!r} is {variable.shape[at]} long along the "
                    f"axis {axis.key!r}, expected {length} as the largest variable has; name the "
                    'dimensions, such as axis="time", or dims={...}, or leave the field out'
                )
        first = self.files[0].variables.get(field.key, variable)
        if variable.unit != first.unit:
            raise FieldError(
                f"{path}: the variable {field.key!r} has {variable.unit or 'plain numbers'}, and "
                f"{first.unit or 'plain numbers'} in {self.files[0].path}, so that one number "
                "stands for two values, expected one packing and one unit of time in all files; "
                "write them again unpacked, or with one, or leave the field out"
            )
        dims, firsts = self._dims(variable), self._dims(first)
        if dims != firsts and sorted(dims) == sorted(firsts):
            raise FieldError(
                f"{path}: a sample of the variable {field.key!r} has the dimensions "
                f"{', '.join(dims)}, and {', '.join(firsts)} in {self.files[0].path}, expected one "
                "order in all files; write them again in one, or leave the field out"
            )
        shape = sample_shape(variable, self._axes)
        if isinstance(field, Array) and (
            shape != field.shape
            or np.dtype(variable.dtype).newbyteorder("=") != np.dtype(field.dtype)
        ):
            raise FieldError(
                f"{path}: a sample of the variable {field.key!r} is {_dtype(variable)}"
                f"{list(shape)}, expected {field.dtype}{list(field.shape)} for field {name!r}; "
                "declare the true shape and dtype, which all files must share"
            )


class _CellBlock:
    """Collects samples of cells until they are worth a block of rows."""

    def __init__(self, fields: Mapping[str, Field], where: str) -> None:
        self._fields, self._where = fields, where
        self._parts: list[tuple[NDArray[np.int64], dict[Part, NDArray[np.generic]]]] = []
        self._num_bytes = 0

    def add(
        self, ids: NDArray[np.int64], values: dict[Part, NDArray[np.generic]]
    ) -> Iterator[Rows]:
        """Take samples; yield rows when there are enough, or shapes change."""
        if self._parts and _kinds(self._parts[0][1]) != _kinds(values):
            yield from self.take()
        self._parts.append((ids, values))
        self._num_bytes += sum(value.nbytes for value in values.values())
        if self._num_bytes >= BLOCK_BYTES:
            yield from self.take()

    def take(self) -> Iterator[Rows]:
        """Yield what there is, in blocks of about 8 MiB."""
        if not self._parts:
            return
        parts, num_bytes = self._parts, self._num_bytes
        self._parts, self._num_bytes = [], 0
        ids = np.concatenate([part for part, _ in parts])
        values = {key: _concatenated([part[key] for _, part in parts]) for key in parts[0][1]}
        num_rows = max(len(ids) * BLOCK_BYTES // max(num_bytes, 1), 1)
        for start in range(0, len(ids), num_rows):
            rows = slice(start, start + num_rows)
            some = {key: value[rows] for key, value in values.items()}
            yield array_rows(ids[rows], some, self._fields, self._where)


def _concatenated(parts: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _kinds(values: Mapping[Part, NDArray[np.generic]]) -> list[object]:
    return [(value.dtype, value.shape[1:]) for value in values.values()]


def _parts(
    file: _File, ids: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Divide samples of a file into those that are read together.

    Yields:
        int64[n]: Of one cell, without a gap of a chunk or more along the first axis; and
        int64[n, num_axes]: their places.
    """
    starts = file.numbering.cell_starts()
    cells, places = file.numbering.locate(ids - file.first, starts)
    apart = np.diff(cells) != 0
    if len(file.numbering.counts):
        apart |= np.diff(places[:, 0]) > file.numbering.apart
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(ids)]
    for start, stop in pairwise(bounds):
        yield ids[start:stop], places[start:stop]


def _joined_starts(files: Sequence[_File]) -> NDArray[np.int64]:
    """Choose cells' first samples, one in each 8 MiB at most: int64[num_starts]."""
    starts: list[NDArray[np.int64]] = []
    blocks: list[NDArray[np.int64]] = []
    num_bytes = 0
    for file in files:
        found, sample_bytes = file.numbering.cell_starts(), file.numbering.sample_bytes
        starts.append(file.first + found)
        blocks.append((num_bytes + found * sample_bytes) // BLOCK_BYTES)
        num_bytes += file.numbering.num_samples * sample_bytes
    begins = np.diff(np.concatenate(blocks), prepend=-1) > 0
    return np.concatenate(starts)[begins]


def _dtype(variable: Variable) -> str:
    return np.dtype(variable.dtype).name
