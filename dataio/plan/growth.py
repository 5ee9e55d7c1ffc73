"""Which samples a node's slots hold where the dataset grew: a chain of layouts, each longer. Pure.

Shares are floor or ceil of N/R, so no pool is smaller than before when N grows. Every slot keeps
its row; the slots behind them hold the new samples, node by node. From there on rows move as under
any layout of that length.
"""

import numpy as np
from numpy.typing import NDArray

from dataio.plan.layout import Layout
from dataio.plan.policies import Shuffle


def samples_in(
    shuffle: Shuffle, layout: Layout, *, node: int, epoch: int, seed: int, first_epoch: int
) -> NDArray[np.int64]:
    """int64[pool_rows(node)]: Samples that a node's slots hold at the start of an epoch.

    Args:
        shuffle: Decides which node holds which row.
        layout: Replicas and samples, and how many these were before.
        node: Whose slots.
        epoch: At whose start.
        seed: The run's seed.
        first_epoch: In which the layout began, or the dataset last grew.
    """
    homes = shuffle.placement(layout, node=node, epoch=epoch, seed=seed, first_epoch=first_epoch)
    return _at_first(shuffle, layout, homes, seed=seed, first_epoch=first_epoch)


def _at_first(
    shuffle: Shuffle, layout: Layout, homes: NDArray[np.int64], *, seed: int, first_epoch: int
) -> NDArray[np.int64]:
    """int64[len(homes)]: Samples that homes of any nodes held when the layout began."""
    samples, rest = np.empty_like(homes), np.arange(len(homes))
    while layout.earlier:
        older, began = layout.before_growth()
        nodes = np.searchsorted(layout.pool_starts, homes, side="right") - 1
        slots = homes - layout.pool_starts[nodes]
        beyond = slots - older.pool_sizes[nodes]
        new = beyond >= 0
        new_start = older.num_samples + layout.pool_starts - older.pool_starts
        samples[rest[new]] = new_start[nodes[new]] + beyond[new]
        # The rows that were there before stand in the slots that they had.
        rest, homes = rest[~new], (older.pool_starts[nodes] + slots)[~new]
        homes = shuffle.trace(older, homes, epoch=first_epoch, seed=seed, first_epoch=began)
        layout, first_epoch = older, began
    samples[rest] = homes
    return samples
