"""One sample on several ranks: which part of an array each of them holds. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from dataio.base.checked import Count, Whole, checked

Box = tuple[slice, ...]
"""A region of an array: for each dimension the first index and the one behind the last."""


@checked
@dataclass(frozen=True)
class Tiles:
    """How an `Array` is cut into tiles, one for each of as many ranks.

    Each rank stages, keeps, exchanges and is delivered its tile alone. An axis is cut as by
    `numpy.array_split`: the first parts are longer by one where it is no multiple. Tiles are
    numbered row by row, so that the last axis of ``axes`` runs fastest. For example, of
    ``Array("t2m", (721, 1440), "float32", tiles=Tiles((-2, -1), (2, 2), halo=1))`` tile 1 is rows
    0 to 361 and columns 719 to 1439.

    Attributes:
        axes: Which axes of a sample are cut: positions, from the end if negative, or, of
            `ArrayFiles`, names of dimensions.
        parts: Into how many parts, for each of them.
        halo: Indices beyond each side of a tile that its rank is given too, which belong to its
            neighbours. At the border of a sample there are none: there a tile is smaller.
        index: Number of this rank's tile, in [0, num_tiles). By default that of the rank modulo
            the number of tiles, so that consecutive ranks hold one sample. Ranks may each give
            another, every number equally often; or all the same one, in a world of the ranks of
            that tile alone: then nothing compares the tiles.

    Raises:
        ValueError: If the lengths differ, or the index is none of a tile.
    """

    axes: tuple[int | str, ...]
    parts: tuple[Count, ...]
    halo: Whole = 0
    # Ranks compare what they were given, and may differ in this
    index: Whole | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.axes or len(self.axes) != len(self.parts):
            raise ValueError(
                f"Tiles: axes are {self.axes} and parts {self.parts}, expected as many of both, "
                "one at least; give a number of parts for each axis"
            )
        if self.index is not None and self.index >= self.num_tiles:
            raise ValueError(
                f"Tiles: index is {self.index} of {self.num_tiles} tiles, expected a number in "
                f"[0, {self.num_tiles - 1}]; correct it"
            )

    @property
    def num_tiles(self) -> int:
        return prod(self.parts)

    def box(self, shape: Sequence[int]) -> Box:
        """Find what this rank holds of a sample: its tile, and the halo around it.

        Args:
            shape: Of the whole sample.

        Raises:
            ValueError: If index is None, or an axis is named: `Loader.fields` has found both.
        """
        return tuple(
            slice(max(tile.start - halo, 0), min(tile.stop + halo, length))
            for tile, halo, length in self._along(shape)
        )

    def inner(self, shape: Sequence[int]) -> Box:
        """Find the tile in what this rank holds, without its halo.

        Args:
            shape: Of the whole sample.
        """
        return tuple(
            slice(low := min(tile.start, halo), low + tile.stop - tile.start)
            for tile, halo, _ in self._along(shape)
        )

    def _along(self, shape: Sequence[int]) -> Iterator[tuple[slice, int, int]]:
        """Yield for each dimension the tile, the halo and the length."""
        cut = dict(zip(self._positions(len(shape)), range(len(shape)), strict=False))
        if self.index is None:
            raise ValueError(
                "Tiles: nobody said which tile is meant, expected a rank's; take the tiles of "
                "loader.fields, or give index="
            )
        places = np.unravel_index(self.index, self.parts)
        for at, length in enumerate(shape):
            if at not in cut:
                yield slice(0, length), 0, length
                continue
            part, (each, longer) = int(places[cut[at]]), divmod(length, self.parts[cut[at]])
            start = part * each + min(part, longer)
            yield slice(start, start + each + (part < longer)), self.halo, length

    def _positions(self, num_dims: int) -> list[int]:
        if named := [axis for axis in self.axes if isinstance(axis, str)]:
            raise ValueError(
                f"Tiles: the axis {named[0]!r} is a name, expected a position; only `ArrayFiles` "
                "has names of axes: give positions, such as (-2, -1)"
            )
        return [int(axis) % num_dims for axis in self.axes]

    def check(self, shape: Sequence[int], where: str) -> None:
        """Refuse a sample that cannot be cut so.

        Args:
            shape: Of the whole sample.
            where: The field, for the message.

        Raises:
            ValueError: If it lacks an axis, or one is shorter than its parts or has tiles that are
                narrower than the halo.
        """
        found, num_dims = "", len(shape)
        axes = [axis for axis in self.axes if not isinstance(axis, str)]
        if any(not -num_dims <= axis < num_dims for axis in axes):
            found = f"axes {self.axes}, expected positions in {list(shape)}"
        elif len({axis % num_dims for axis in axes}) < len(axes) or len(set(self.axes)) < len(axes):
            found = f"axes {self.axes}, expected each axis once"
        for axis, parts in zip(self.axes, self.parts, strict=True):
            if found or isinstance(axis, str):
                break
            if shape[axis] < parts:
                found = f"{parts} parts, expected at most the {shape[axis]} of axis {axis}"
            elif shape[axis] // parts < self.halo and parts > 1:
                found = (
                    f"the halo {self.halo}, expected at most the {shape[axis] // parts} of a tile "
                    f"along axis {axis}"
                )
        if found:
            raise ValueError(f"{where}: tiles have {found}; cut along other axes, or less")

    def named(self, dims: Sequence[str], where: str) -> "Tiles":
        """Find the positions of axes that are named.

        Args:
            dims: Names of a sample's dimensions.
            where: The field, for the message.

        Raises:
            ValueError: If there is no such name.
        """
        for axis in self.axes:
            if isinstance(axis, str) and axis not in dims:
                raise ValueError(
                    f"{where}: tiles have the axis {axis!r}, and a sample the dimensions "
                    f"{', '.join(map(repr, dims)) or 'none'}; name one of these, or give positions"
                )
        axes = [dims.index(axis) if isinstance(axis, str) else axis for axis in self.axes]
        return replace(self, axes=tuple(axes))
