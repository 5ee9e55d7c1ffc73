"""What scores decide of an exchange: which of a replica's rows leave, and which nodes meet.

Scores are last losses, quantised, as they were when the epoch began. Each rank chooses among its
own rows, and no other rank needs to know which: the j-th arrival takes the j-th leaver's slot
whatever leaves. Only a node's figure is sent to all.
"""

import numpy as np
from numpy.typing import NDArray

from dataio.base.permutation import permute
from dataio.base.seeding import Key, generator, key
from dataio.plan.layout import Layout
from shuffle.ring import Ring

LEAST_LOSS = 1 / 1024
"""What a row of no loss weighs, so that any row may leave: the step losses are rounded to."""


def leaving_by_loss(
    losses: NDArray[np.float32], *, num_leaving: int, stream: Key
) -> NDArray[np.int64]:
    """Draw rows without replacement, each time in proportion to the losses of those that are left.

    Args:
        losses: float32[num_rows]: Infinite where a row was never reported: it weighs as much as
            the mean of the others.
        num_leaving: Rows to draw, in [0, num_rows].
        stream: Key of this replica and epoch.

    Returns:
        int64[num_leaving]: Distinct rows, ascending: no chunk has the highest losses to itself.

    Raises:
        ValueError: If there are fewer rows.

    Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir, IPL 2006.
    """
    if not 0 <= num_leaving <= len(losses):
        raise ValueError(
            f"leaving_by_loss: num_leaving is {num_leaving}, expected a number in "
            f"[0, {len(losses)}], the rows of the share; take it from the layout"
        )
    reported = np.isfinite(losses)
    weights = np.where(reported, losses, mean_loss(losses)).astype(np.float64)
    # Who comes first when each waits a time of mean 1 / weight is a draw in proportion to weights
    waits = -np.log1p(-generator(stream).random(len(losses))) / np.maximum(weights, LEAST_LOSS)
    return np.sort(np.argsort(waits, kind="stable")[:num_leaving])


def mean_loss(losses: NDArray[np.float32]) -> float:
    """Mean of the losses reported so far; 0 before the first."""
    reported = losses[np.isfinite(losses)]
    return float(reported.mean(dtype=np.float64)) if len(reported) else 0.0


def facing_ring(layout: Layout, richness: NDArray[np.float64], *, seed: int, epoch: int) -> Ring:
    """Line the nodes up so that half way round the i-th richest meets the i-th poorest.

    Args:
        layout: Replicas on more than one node.
        richness: float64[num_nodes]: Each node's figure, the same on every rank.
        seed: Of the order of nodes that are equally rich.
        epoch: Of the exchange.
    """
    drawn = permute(np.arange(layout.num_nodes), layout.num_nodes, key(seed, "ring", epoch=epoch))
    richest = drawn[np.argsort(-richness[drawn], kind="stable")]
    widths = np.diff(layout.first_replica)[richest]
    # Of nodes of unequal widths, those that begin in the first half stand there
    num_first = int(np.searchsorted(np.cumsum(widths) - widths, layout.num_replicas / 2))
    nodes = np.concatenate([richest[:num_first], richest[num_first:][::-1]])
    return Ring(layout, seed, epoch, facing=nodes)
