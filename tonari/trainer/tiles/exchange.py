"""Bring to each rank the positions that it needs, and their gradients back to those who hold them.

Every rank computes what all of them hold and need. So nobody asks: each sends what others need of
its tile. Each function here is exact and so is its gradient: that of the sum of all ranks' losses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tonari.trainer.tiles.grid import Grid, Starts

FILLED = -1
"""In place of a holder: beyond the ends of an axis."""


class Piece(NamedTuple):
    """Neighbouring positions that a rank needs, as one rank holds them.

    Attributes:
        holder: Its coordinate along the axis, or ``FILLED``.
        start: The first one in the holder's tile.
        size: How many.
    """

    holder: int
    start: int
    size: int


@dataclass(frozen=True)
class Move:
    """What the ranks along one axis hold of it, and what they need.

    Attributes:
        grid: The tiles.
        axis: Of ``grid.parts``.
        dim: Of the tensor.
        held: Where each rank's part starts.
        needed: First and last position, exclusive, of each rank; they may lie beyond the ends.
        fill: The value there; None: the axis goes on at its other end.
    """

    grid: Grid
    axis: int
    dim: int
    held: Starts
    needed: tuple[tuple[int, int], ...]
    fill: float | None = 0.0

    @cached_property
    def spans(self) -> list[list[Piece]]:
        """Of each rank, in the order of positions."""
        return [list(self._spans_of(*needed)) for needed in self.needed]

    @property
    def is_nothing(self) -> bool:
        """Whether each rank needs just what it holds."""
        return self.needed == tuple(zip(self.held, self.held[1:], strict=False))

    @property
    def me(self) -> int:
        """This rank's coordinate along the axis."""
        return self.grid.coordinates[self.axis]

    @property
    def of_others(self) -> list[Piece]:
        """What this rank needs of other ranks."""
        return [span for span in self.spans[self.me] if span.holder not in (self.me, FILLED)]

    @property
    def for_others(self) -> list[tuple[int, Piece]]:
        """What other ranks need of this one's tile, and which ones."""
        return [
            (to, span)
            for to, spans in enumerate(self.spans)
            for span in spans
            if to != self.me and span.holder == self.me
        ]

    def take(self, values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Get what this rank needs of all; also what others sent of it. Collective."""
        got = [_resized(values, self.dim, span.size) for span in self.of_others]
        sends = [
            (to, values.narrow(self.dim, span.start, span.size)) for to, span in self.for_others
        ]
        holders = [span.holder for span in self.of_others]
        self.grid.exchange(self.axis, sends, zip(holders, got, strict=True))
        return self.join(values, got), got

    def join(self, values: Tensor, got: Sequence[Tensor]) -> Tensor:
        """Put this rank's positions and those of others in their order."""
        others, parts = iter(got), list[Tensor]()
        for span in self.spans[self.me]:
            if span.holder == self.me:
                parts.append(values.narrow(self.dim, span.start, span.size))
            elif span.holder != FILLED:
                parts.append(next(others))
            else:
                assert self.fill is not None
                parts.append(_resized(values, self.dim, span.size).fill_(self.fill))
        return torch.cat(parts, self.dim)

    def give_back(self, gradient: Tensor) -> Tensor:
        """Add up the gradients of what this rank holds, from all that needed it. Collective."""
        here = self.held[self.me + 1] - self.held[self.me]
        total = _resized(gradient, self.dim, here).zero_()
        sends, at = [], 0
        for span in self.spans[self.me]:
            part = gradient.narrow(self.dim, at, span.size)
            at += span.size
            if span.holder == self.me:
                total.narrow(self.dim, span.start, span.size).add_(part)
            elif span.holder != FILLED:
                sends.append((span.holder, part))
        got = [(to, _resized(gradient, self.dim, span.size)) for to, span in self.for_others]
        self.grid.exchange(self.axis, sends, got)
        for (_, span), (_, part) in zip(self.for_others, got, strict=True):
            total.narrow(self.dim, span.start, span.size).add_(part)
        return total

    def _spans_of(self, first: int, end: int) -> Iterator[Piece]:
        size = self.held[-1]
        laps = (-size, 0, size) if self.fill is None else (0,)
        if self.fill is not None and first < 0:
            yield Piece(FILLED, 0, min(end, 0) - first)
        for lap in laps:
            for holder, (a, b) in enumerate(zip(self.held, self.held[1:], strict=False)):
                low, high = max(first, a + lap), min(end, b + lap)
                if low < high:
                    yield Piece(holder, low - a - lap, high - low)
        if self.fill is not None and end > size:
            yield Piece(FILLED, 0, end - max(first, size))


def _resized(values: Tensor, dim: int, size: int) -> Tensor:
    return values.new_empty((*values.shape[:dim], size, *values.shape[dim + 1 :]))


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, move: Move) -> Tensor:
        ctx.move = move
        return move.take(values)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.move.give_back(gradient), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        return grid.add_up(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.grid.add_up(gradient), None


class _Moments(torch.autograd.Function):
    """Mean and variance; keeps the values, which the layer that asks keeps too."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, dims: tuple[int, ...], count: int, grid: Grid
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(values.dtype, torch.float32)
        mean = grid.add_up(values.sum(dims, keepdim=True, dtype=exact)) / count
        variance = grid.add_up((values - mean).square_().sum(dims, keepdim=True)) / count
        ctx.save_for_backward(values, mean)
        ctx.count, ctx.grid = count, grid
        return mean, variance

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_variance: Tensor) -> tuple[Tensor, None, None, None]:
        values, mean = ctx.saved_tensors
        of_mean, of_variance = ctx.grid.add_up(torch.stack([of_mean, of_variance])) / ctx.count
        gradient = torch.addcmul(of_mean, values - mean, 2 * of_variance)
        return gradient.to(values.dtype), None, None, None


def fetch(values: Tensor, moves: Sequence[Move]) -> Tensor:
    """Get what this rank needs of a tensor, one axis after the other. Collective.

    Corners of a halo come with the second axis, from a neighbour that has them by then.
    """
    for move in moves:
        if not move.is_nothing:
            values = cast(Tensor, cast(Any, _Fetched).apply(values, move))
    return values


def add_up(values: Tensor, grid: Grid) -> Tensor:
    """Sum over all tiles; its gradient is summed over them, too. Collective."""
    return cast(Tensor, cast(Any, _Total).apply(values, grid))


def moments(
    values: Tensor, dims: Sequence[int], *, grid: Grid, whole: int
) -> tuple[Tensor, Tensor]:
    """Compute the mean and the (biased) variance over all tiles. Collective.

    Args:
        values: floating[...]: This rank's part.
        dims: Those that are reduced; they are kept, with size 1.
        grid: The tiles.
        whole: Numbers over which each mean is taken, of all tiles.
    """
    found = cast(Any, _Moments).apply(values, tuple(dims), whole, grid)
    return cast(tuple[Tensor, Tensor], found)
