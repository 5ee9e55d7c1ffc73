"""Groups of losses: k-means of a histogram, exact, so that every world finds the same. Pure."""

import numpy as np
from numpy.typing import NDArray

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
