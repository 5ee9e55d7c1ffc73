"""Random patches of samples that are large: where they lie in a row, and their bytes."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Count, checked
from dataio.base.seeding import Key, uniform

GAP_BYTES = 4096
"""What lies nearer to one another is read in one piece: a page would be read in any case."""


@checked
@dataclass(frozen=True)
class RandomPatch:
    """Deliver patches of a sample in place of all of it, at places that each epoch draws anew.

    The cache keeps whole samples; a batch reads the bytes of its patches alone. All places within
    the sample are equally likely. They follow from the run's seed, the epoch and the sample: any
    threads, processes and ranks deliver the same. An evaluation draws those of epoch 0.

    Fields of a sample draw the same numbers, each the share of an axis that lies before the patch.
    So an image and a label volume get the same places if their axes, ``shape`` and ``num`` are the
    same. Axes that are not cut, such as channels, may differ.

    Rows of which patches are read are not checked with ``NodeCache(verify="once")``, the default,
    because a checksum is that of a whole row. Rows are checked as they travel between nodes, by
    ``tonari cache verify``, and with ``verify="always"``, which reads whole rows for each batch.

    Attributes:
        shape: Of a patch, along the array's last axes. Those before them are delivered whole.
        num: Patches of each sample, delivered as dtype[batch, num, ...]. None: one patch, without
            that axis.
    """

    shape: tuple[Count, ...]
    _: KW_ONLY
    num: Count | None = None

    def __post_init__(self) -> None:
        if not self.shape:
            raise ValueError("RandomPatch: shape is (), must name an axis, such as (64, 64, 64)")

    def part(self, whole: tuple[int, ...], stream: Key, numbers: NDArray[np.int64]) -> "Patches":
        """Draw the patches of some rows.

        Args:
            whole: Shape of a row.
            stream: Key of the epoch.
            numbers: int64[num_rows]: One of each row.
        """
        num, axes = self.num or 1, len(self.shape)
        draws = uniform(stream, numbers, num * axes).reshape(len(numbers), num, axes)
        room = np.subtract(whole[-axes:], self.shape) + 1
        return Patches(whole, self.shape, (draws * room).astype(np.int64))

    def out(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that is delivered of a row of this shape."""
        patch = (*whole[: -len(self.shape)], *self.shape)
        return patch if self.num is None else (self.num, *patch)


class Patches(NamedTuple):
    """Patches of some rows of a field.

    Attributes:
        whole: Shape of a row.
        shape: Of a patch, along the last axes.
        corner: int64[num_rows, num, axes]: Where patches begin.
    """

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    corner: NDArray[np.int64]

    def copy(self, row: int, stored: NDArray[np.generic], into: NDArray[np.generic]) -> None:
        """Copy the patches of a row to dtype[num, ...], without the interpreter's lock."""
        for corner, out in zip(self.corner[row], into, strict=True):
            place: tuple[Any, ...] = (..., *map(slice, corner, corner + self.shape))
            np.copyto(out, stored[place])

    def extents(self, row: int, item_bytes: int) -> Iterator[tuple[int, int]]:
        """List what is to be read of a row: first byte, and how many."""
        lead = [range(length) for length in self.whole[: -len(self.shape)]]
        for corner in self.corner[row]:
            *axes, last = [*lead, *map(range, corner, corner + self.shape)]
            runs = np.ravel_multi_index(np.ix_(*axes, last[:1]), self.whole).ravel() * item_bytes
            ends = runs + len(last) * item_bytes
            apart = np.flatnonzero(runs[1:] - ends[:-1] >= GAP_BYTES)
            starts, stops = runs[[0, *apart + 1]], ends[[*apart, -1]]
            yield from zip(starts.tolist(), (stops - starts).tolist(), strict=True)
