"""Which region of which array a sample is. Pure.

The samples of a file form a grid: along the row axis one index each, along a tiled axis one tile
each. They are numbered *cell* by cell, and a cell is as many neighbours as share chunks of the
file, so that reading samples in the order of their numbers reads each chunk once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.tiles import Box
from dataio.source.formats.grids.variables import Variable

SMALL_CELL_BYTES = 4 << 20
"""Smaller cells are joined along the first axis."""
CELL_OVERLAPS = 8
"""Where samples overlap, a cell is at least as long as so many of them."""
LARGE_CELL_BYTES = 64 << 20
"""A larger cell would take too much memory; its parts read the chunks that they share again."""

Key = str | int
"""A dimension: by its name, or by its position, from the end if negative."""


@dataclass(frozen=True)
class Axis:
    """A dimension along which files are divided into samples.

    Attributes:
        key: Which dimension of each variable.
        length: Of one sample along it.
        is_row: Whether a sample is one index of it, and does not have the dimension any more.
        overlap: What a sample shares with the next one.
    """

    key: Key
    length: int = 1
    is_row: bool = False
    overlap: int = 0

    @property
    def step(self) -> int:
        return self.length - self.overlap

    def of(self, variable: Variable) -> int | None:
        """Find its position in a variable; None if the variable does not have it."""
        if isinstance(self.key, str):
            return variable.dims.index(self.key) if self.key in variable.dims else None
        num_dims = len(variable.shape)
        return self.key % num_dims if -num_dims <= self.key < num_dims else None

    def place(self, at: int) -> str:
        """Describe a place along it, for a message."""
        name = self.key if isinstance(self.key, str) else f"axis {self.key}"
        start = at * self.step
        return f"{name} {start}" if self.is_row else f"{name} {start}:{start + self.length}"


@dataclass(frozen=True)
class Numbering:
    """The samples of one file.

    Attributes:
        counts: Samples along each axis.
        cell: Samples of a cell along each axis; cells at the far edges may hold fewer.
        lengths: Of the file's dimension along each axis.
        sample_bytes: Of the largest variable.
        apart: Samples that share chunks along the first axis; farther ones share none.
    """

    counts: tuple[int, ...]
    cell: tuple[int, ...]
    lengths: tuple[int, ...]
    sample_bytes: int
    apart: int = 1

    @property
    def num_samples(self) -> int:
        return prod(self.counts)

    def cell_starts(self) -> NDArray[np.int64]:
        """Number the cells' first samples: int64[num_cells]."""
        if not self.num_samples:
            return np.empty(0, np.int64)
        sizes = np.ones(1, np.int64)
        for count, cell in zip(self.counts, self.cell, strict=True):
            sizes = np.outer(sizes, np.minimum(cell, count - np.arange(0, count, cell))).ravel()
        return np.cumsum(sizes) - sizes

    def locate(
        self, numbers: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find samples by their numbers in the file.

        Args:
            numbers: int64[n].
            starts: What `cell_starts` returned.

        Returns:
            int64[n]: the cell of each; int64[n, num_axes]: its place along each axis.
        """
        cells = np.searchsorted(starts, numbers, side="right") - 1
        rest_of_cell, rest = cells.copy(), numbers - starts[cells]
        places = np.empty((len(numbers), len(self.counts)), np.int64)
        for at in reversed(range(len(self.counts))):
            count, cell = self.counts[at], self.cell[at]
            rest_of_cell, corner = np.divmod(rest_of_cell, -(-count // cell))
            rest, inside = np.divmod(rest, np.minimum(cell, count - corner * cell))
            places[:, at] = corner * cell + inside
        return cells, places


def number_samples(
    variables: Mapping[str, Variable], axes: Sequence[Axis], *, drop_edge: bool, path: str
) -> Numbering:
    """Divide a file into samples, by its largest variable that has all axes.

    Args:
        variables: Of the file.
        axes: The row axis, if there is one, and the tiled ones.
        drop_edge: Whether what is left over at the end of a tiled axis is dropped.
        path: The file, for the message.

    Raises:
        SourceError: If no variable has the axes, or tiles do not fit.
    """
    having = [v for v in variables.values() if all(axis.of(v) is not None for axis in axes)]
    if not having:
        raise SourceError(
            f"{path}: no variable has {' and '.join(f'the axis {axis.key!r}' for axis in axes)}, "
            f"found {describe(variables)}; name axes by these, by position (axis=0), or name the "
            'dimensions: dims={"variable": ("time", "lat", "lon")}'
        )
    main = max(having, key=lambda variable: variable.num_bytes)
    if len({axis.of(main) for axis in axes}) < len(axes):
        raise SourceError(
            f"{path}: of the axes {', '.join(repr(axis.key) for axis in axes)} two are one "
            f"dimension of {describe({'the largest variable': main})}; name each dimension once"
        )
    counts, cells, lengths = [], [], []
    for axis in axes:
        at = axis.of(main)
        assert at is not None
        length, chunk = main.shape[at], main.chunks[at]
        count, left = divmod(length - axis.length + axis.step, axis.step)
        if 0 < length < axis.length or (left and not drop_edge):
            cure = (
                f'give edge="drop" to leave the last {left} out, or a length that divides {length}'
                if length > axis.length
                else "give smaller tiles"
            )
            apart = f", {axis.step} apart" if axis.overlap else ""
            raise SourceError(
                f"{path}: the axis {axis.key!r} is {length} long, expected a multiple of the tile "
                f"length {axis.length}{apart}; {cure}"
            )
        if axis.overlap:  # what neighbouring cells both read is a small part of them
            chunk *= -(-CELL_OVERLAPS * axis.length // chunk)
        counts.append(max(count, 0))
        cells.append(min(_shared(axis.step, chunk), max(counts[-1], 1)))
        lengths.append(length)
    overlaps = prod(axis.length for axis in axes) / prod(axis.step for axis in axes)
    sample_bytes = int(main.num_bytes * overlaps) // max(prod(counts), 1)
    return Numbering(
        tuple(counts),
        _sized(cells, counts, sample_bytes),
        tuple(lengths),
        sample_bytes,
        cells[0] if cells else 1,
    )


def _shared(length: int, chunk: int) -> int:
    """Count the neighbours along an axis that share chunks."""
    common = length * chunk // gcd(length, chunk)
    # Where both end together only far away, some chunks are read twice.
    return common // length if common <= 4 * max(length, chunk) else max(chunk // length, 1)


def _sized(cells: Sequence[int], counts: Sequence[int], sample_bytes: int) -> tuple[int, ...]:
    """Join small cells along the first axis, and cut large ones, first along the first axis."""
    sized = list(cells)
    for at in range(len(sized)):
        fitting = LARGE_CELL_BYTES // max(sample_bytes * prod(sized) // sized[at], 1)
        sized[at] = max(min(sized[at], fitting), 1)
    num_bytes = sample_bytes * prod(sized)
    if sized and num_bytes < SMALL_CELL_BYTES:
        sized[0] = max(min(sized[0] * (SMALL_CELL_BYTES // max(num_bytes, 1)), counts[0]), 1)
    return tuple(sized)


def region(
    variable: Variable, axes: Sequence[Axis], low: Sequence[int], high: Sequence[int]
) -> Box:
    """Find the region of a variable that holds some samples.

    Args:
        variable: Whole along each dimension that no axis divides.
        axes: What divides it.
        low: The first place along each axis.
        high: The place behind the last along each axis.
    """
    box = [slice(0, length) for length in variable.shape]
    for axis, start, stop in zip(axes, low, high, strict=True):
        at = axis.of(variable)
        if at is not None:
            box[at] = slice(start * axis.step, (stop - 1) * axis.step + axis.length)
    return tuple(box)


def cut_region(variable: Variable, axes: Sequence[Axis], box: Box, part: Box) -> tuple[Box, Box]:
    """Narrow the region of some samples to one part of each, where no axis divides the file.

    Along an axis that does, samples lie side by side: there the part is cut out of each of them.

    Args:
        variable: Which variable the region is of.
        axes: What divides it.
        box: The region.
        part: Of each sample.

    Returns:
        The region; and what is to be cut of each sample that is taken out of it.
    """
    is_row = {axis.of(variable): axis.is_row for axis in axes}
    narrow, inside, parts = [*box], list[slice](), iter(part)
    for at in range(len(box)):
        if is_row.get(at):
            continue
        inside.append(next(parts))
        if at not in is_row:
            narrow[at], inside[-1] = inside[-1], slice(None)
    return tuple(narrow), tuple(inside)


def sample_shape(variable: Variable, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Find the shape of one sample of a variable."""
    shape: list[int | None] = [*variable.shape]
    for axis in axes:
        at = axis.of(variable)
        if at is not None:
            shape[at] = None if axis.is_row else axis.length
    return tuple(length for length in shape if length is not None)


def take_samples(
    values: NDArray[np.generic],
    variable: Variable,
    axes: Sequence[Axis],
    places: NDArray[np.int64],
) -> NDArray[np.generic]:
    """Cut samples out of a region.

    Args:
        values: The region, from place 0 along each axis.
        variable: Which variable it is of.
        axes: What divides it.
        places: int64[n, num_axes]: The samples' places along the axes.

    Returns:
        dtype[n, ...]: The samples.
    """
    found = [(axis, axis.of(variable), places[:, i]) for i, axis in enumerate(axes)]
    having = [(axis, at, where) for axis, at, where in found if at is not None]
    if not having:
        return np.broadcast_to(values, (len(places), *values.shape))
    if len(having) == 1 and having[0][0].is_row:
        _, at, where = having[0]
        # [n, ...]
        return np.moveaxis(values, at, 0)[where]
    samples = np.empty((len(places), *sample_shape(variable, axes)), values.dtype)
    index: list[int | slice] = [slice(None)] * values.ndim
    for row in range(len(places)):
        for axis, at, where in having:
            start = int(where[row]) * axis.step
            index[at] = start if axis.is_row else slice(start, start + axis.length)
        samples[row] = values[tuple(index)]
    return samples


def describe(variables: Mapping[str, Variable]) -> str:
    """List variables with their dimensions, for a message."""
    shown = [
        f"{name}[{', '.join(_dim(*pair) for pair in zip(v.dims, v.shape, strict=True))}]"
        for name, v in [*variables.items()][:12]
    ]
    more = len(variables) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") if shown else "no variable"


def _dim(name: str, length: int) -> str:
    return f"{name} {length}".strip()
