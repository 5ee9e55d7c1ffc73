"""Batches that cost alike, where the rows do not: each takes one row of every level of cost.

The shuffled rows are ranked by cost and cut into as many levels as a step trains rows; a step takes
one row of each level. Within a level the rows keep the order in which they were shuffled, so every
row is as likely in every step as before, and comes about when it would have come. This is
stratified sampling without replacement (Cochran, Sampling Techniques, 1977, section 5).
"""

import numpy as np
from numpy.typing import NDArray

GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, taken modulo 1, are spread evenly in every range (Weyl)."""

Ints = NDArray[np.int64]


def balance(
    costs: NDArray[np.uint8], shuffled: Ints, *, num_replicas: int, batch_size: int
) -> Ints:
    """Put shuffled rows into an order in which steps and replicas cost alike.

    Args:
        costs: uint8[num_rows]: What each row costs beside the others.
        shuffled: int64[n]: Rows in a random order.
        num_replicas: Replicas that the rows are dealt to, one after the other.
        batch_size: Rows that each trains in a step.

    Returns:
        int64[n]: The same rows. Those of a last step that is not full are any of them.
    """
    width, num_steps = num_replicas, len(shuffled) // (num_replicas * batch_size)
    whole = num_steps * width * batch_size
    # int64[num_levels, num_steps]: places in the shuffled run.
    levels = np.argsort(costs[shuffled[:whole]], kind="stable").reshape(-1, max(num_steps, 1))
    levels.sort(axis=1)
    # int64[batch_size, num_replicas, num_steps]: the dearest level first.
    rows = shuffled[levels[::-1]].reshape(batch_size, width, num_steps)
    dealt = np.empty_like(rows)
    load = np.zeros((width, num_steps), np.int64)
    # Among equals each step begins with another replica.
    rank = (np.arange(width)[:, None] - np.arange(num_steps)) % width
    for level in range(batch_size):
        # Who has the least so far gets the dearest of each level (Graham's longest first).
        lane = np.argsort(load * width + rank, axis=0)
        np.put_along_axis(dealt[level], lane, rows[level], axis=0)
        load += costs[dealt[level]]
    # Every run of a replica's batch takes levels from all over the range, so microbatches do.
    spread = np.argsort(np.argsort(np.arange(batch_size) * GOLDEN % 1))
    placed = dealt[spread].transpose(2, 0, 1).ravel()
    return np.concatenate([placed, shuffled[whole:]])
