"""Which rank has which tile: arithmetic, the same on every rank, and messages along one axis."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tonari.trainer.errors import ConfigError

Starts = tuple[int, ...]
"""Of one axis in p parts: where each part begins, and the size of the axis; p + 1 numbers."""


class Grid:
    """The ranks that share each sample, laid out along its first spatial axes.

    Args:
        parts: Tiles along each of these axes, such as (2, 2) for height and width.
        group: Of as many ranks as there are tiles; the last axis varies fastest. None: there is
            one tile.

    Attributes:
        coordinates: This rank's tile along each axis.
        sent_bytes: What this rank has sent to others, but for sums over all.

    Raises:
        ConfigError: If the group has another number of ranks.
    """

    def __init__(self, parts: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        ranks = 1 if group is None else dist.get_world_size(group)
        if not parts or min(parts) < 1 or math.prod(parts) != ranks:
            raise ConfigError(
                f"tiles: parts are {list(parts)}, expected a product of {ranks}, the ranks of the "
                "group; choose others, or another group"
            )
        self.parts, self.group, self.sent_bytes = tuple(parts), group, 0
        here = 0 if group is None else dist.get_rank(group)
        self.coordinates = tuple(int(each) for each in np.unravel_index(here, self.parts))

    def slices(self, sizes: Sequence[int]) -> tuple[slice, ...]:
        """Say which part of a sample's spatial axes this rank's tile is.

        Args:
            sizes: Of all spatial axes of the whole sample; those behind ``parts`` stay whole.
        """
        cut = [
            slice(*even_starts(size, parts)[at : at + 2])
            for size, parts, at in zip(sizes, self.parts, self.coordinates, strict=False)
        ]
        return (*cut, *(slice(0, size) for size in sizes[len(cut) :]))

    def part_of(self, values: Tensor, num_spatial: int) -> Tensor:
        """Take this rank's tile of a tensor whose last dimensions are the spatial ones."""
        first = values.ndim - num_spatial
        for number, part in enumerate(self.slices(values.shape[first:])):
            values = values.narrow(first + number, part.start, part.stop - part.start)
        return values

    def exchange(
        self, axis: int, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]
    ) -> None:
        """Send to and receive from others along an axis. Collective along it; blocks.

        Args:
            axis: Of ``parts``.
            sends: Coordinate along the axis, and what it gets.
            receives: Coordinate along the axis, and where to put what it sends.
        """
        operations = []
        for direction, messages in ((dist.isend, sends), (dist.irecv, receives)):
            for coordinate, values in messages:
                place = [*self.coordinates]
                place[axis] = coordinate
                peer = int(np.ravel_multi_index(place, self.parts))
                values = values.contiguous()
                if values.is_meta:
                    continue
                if direction is dist.isend:
                    self.sent_bytes += values.nbytes
                operations.append(dist.P2POp(direction, values, group=self.group, group_peer=peer))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def add_up(self, values: Tensor) -> Tensor:
        """Sum over all tiles, in a new tensor. Collective; blocks."""
        values = values.clone(memory_format=torch.contiguous_format)
        if self.group is not None and not values.is_meta:
            dist.all_reduce(values, group=self.group)
        return values


def even_starts(size: int, parts: int) -> Starts:
    """Cut an axis into parts, of which the first may have one position more.

    Raises:
        ConfigError: If there are fewer positions than parts.
    """
    if size < parts:
        raise ConfigError(
            f"tiles: an axis of {size} positions cannot be cut into {parts}; choose fewer parts"
        )
    each, more = divmod(size, parts)
    return tuple(at * each + min(at, more) for at in range(parts + 1))


def starts_within(inner: Iterable[int], size: int) -> Starts | None:
    """Cut what a layer gives where its input's cuts lead to.

    Args:
        inner: Where all parts but the first begin, ascending.
        size: Of the axis, as the layer gives it.

    Returns:
        The cuts. Where they would leave a part without positions they are even ones instead, and
        None where there are fewer positions than parts.
    """
    starts = (0, *(min(max(start, 0), size) for start in inner), size)
    if size < len(starts) - 1:
        return None
    if any(a >= b for a, b in pairwise(starts)):
        return even_starts(size, len(starts) - 1)
    return starts
