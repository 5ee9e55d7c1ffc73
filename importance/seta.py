"""Show a window of the rows grouped by loss, which slides from easy to hard epoch after epoch."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Fraction, Range, Share, checked
from dataio.plan.history import Candidates, ScoreColumn
from dataio.plan.policies import Selection
from importance.schedule import annealing
from importance.threshold import NUM_LEVELS, loss_levels


@checked
@dataclass(frozen=True)
class SeTa:
    """Hide a random share of the rows, and of the others those outside a window of loss groups.

    Each epoch ``floor(fraction * num_samples)`` rows are hidden by a draw. The last losses of the
    others are split into ``groups`` by k-means, over all pools; a window of ``window * groups`` of
    these is shown. It begins at the easiest, moves on by one group an epoch until it holds the
    hardest, and begins anew. Hidden rows keep their old loss: none is passed forward for a new one.
    In epoch 0, and near the end, only the random share is hidden. Gradients are not weighted, the
    learning rate stays as it is, and steps that not all replicas fill are padded.

    Where the published code does otherwise: it takes scikit-learn's k-means of the losses from
    random first means, by all processes alike; this one goes by how often each multiple of 1/1024
    up to 16 is there, from means at even shares of the rows, so that every world finds the same
    groups. It gives rows that were never reported a loss of 3; here they are in no group, and
    shown. A group that no loss is nearest to does not count, so that the window always holds rows.

    Args:
        fraction: Share of the rows that a draw hides, in [0, 1).
        groups: Groups of losses, >= 1.
        window: Share of the groups that is shown, in (0, 1]; at least one is.
        delta: Fraction of the run after which only the draw hides rows, in [0, 1].

    Raises:
        ValueError: If a setting is out of range.

    Source: Zhou et al., Scale Efficient Training for Large Datasets, CVPR 2025, section 3; defaults
    of their code, which takes a fraction of 0.1, 5 groups and a window of 0.9 for CIFAR.
    """

    fraction: Share = 0.0
    _: KW_ONLY
    groups: Annotated[int, Range(1, NUM_LEVELS)] = 10
    window: Annotated[float, Range(0, 1, "(]")] = 0.5
    delta: Fraction = 0.875

    columns: ClassVar[tuple[ScoreColumn, ...]] = ("loss",)
    """The last loss."""

    def select(self, rows: Candidates, *, epoch: int, num_epochs: int | None) -> Selection:
        """Select the rows of one pool for an epoch. Collective where ``rows.total`` is.

        Raises:
            ValueError: If ``delta`` < 1 and the length of the run is not known.
        """
        never = "SeTa(delta=1.0), which never ends its windows"
        at_the_end = annealing("SeTa", epoch, num_epochs, delta=self.delta, otherwise=never)
        drawn = rows.places < math.floor(self.fraction * rows.num_samples)
        if epoch == 0 or at_the_end:
            return Selection(hidden=np.flatnonzero(drawn))
        grouped = np.flatnonzero(~drawn & (rows.scores["epoch"] >= 0))
        levels = loss_levels(rows.scores["loss"][grouped])
        counts = rows.total(np.bincount(levels, minlength=NUM_LEVELS))
        group_of, num_groups = group_levels(counts, self.groups)
        size = max(round(self.window * num_groups), 1)
        first = epoch % (num_groups - size + 1) if num_groups else 0
        group = group_of[levels]
        hidden = drawn.copy()
        hidden[grouped[(group < first) | (group >= first + size)]] = True
        figures = {"loss_groups": float(num_groups), "first_group": float(first)}
        return Selection(hidden=np.flatnonzero(hidden), figures=figures)

    def due(self, hidden: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Choose none: a hidden row keeps its old loss."""
        return hidden[:0]


MOST_ROUNDS = 300
"""Of k-means; it mostly ends by itself, within some tens."""


def group_levels(counts: NDArray[np.int64], num_groups: int) -> tuple[NDArray[np.int64], int]:
    """Group levels around means, each level with the nearest: Lloyd's k-means in one dimension.

    The first means are at even shares of the rows. They move until no level changes its group, or
    `MOST_ROUNDS` times. Sums are of whole numbers, and divided once: no order of rows or pools
    changes them.

    Args:
        counts: int64[num_levels]: Rows of each level.
        num_groups: Groups wanted, >= 1.

    Returns:
        int64[num_levels]: Each level's group, 0 that of the lowest; and how many groups hold rows,
        which may be fewer than wanted. A level without rows has the group of its neighbours.
    """
    # int64[num_levels + 1]: rows below each level, and the sum of their levels
    rows = np.concatenate([[0], np.cumsum(counts)])
    sums = np.concatenate([[0], np.cumsum(counts * np.arange(len(counts)))])
    shares = (2 * np.arange(num_groups) + 1) * int(rows[-1]) // (2 * num_groups)
    means = np.unique(np.searchsorted(rows[1:], shares, side="right")).astype(np.float64)
    ends = np.empty(0, np.int64)
    for _ in range(MOST_ROUNDS):
        # int64[len(means) + 1]: a level halfway between two means goes with the upper one
        inner = np.ceil((means[:-1] + means[1:]) / 2).astype(np.int64)
        bounds = np.concatenate([[0], inner, [len(counts)]])
        held = np.diff(rows[bounds])
        # A group that lost all its rows is dropped
        kept = held > 0
        means = np.diff(sums[bounds])[kept] / held[kept]
        if kept.all() and np.array_equal(bounds, ends):
            break
        ends = bounds
    if not len(means):
        return np.zeros(len(counts), np.int64), 0
    inner = np.ceil((means[:-1] + means[1:]) / 2).astype(np.int64)
    return np.searchsorted(inner, np.arange(len(counts)), side="right"), len(means)
