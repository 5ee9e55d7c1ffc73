"""Rows of steps of all sampling groups at once, where nothing is left out or weighed. Pure.

What `Answers.group` and `Group.at` find of one group after another, without a plan for each.
"""

import numpy as np
from numpy.typing import NDArray

from dataio.base.permutation import permute_each
from dataio.base.seeding import key
from dataio.plan.layout import Layout
from dataio.plan.order import num_steps, valid_rows
from dataio.rowlog.attempts import Attempt
from dataio.rowlog.trained import TrainedRows, joined


def is_plain(attempt: Attempt) -> bool:
    """Return whether each row of a node's pool is trained once, in the order of one permutation."""
    setup, position = attempt.setup, attempt.position
    running = position.running
    special = setup.importance or setup.costs or setup.holds_all or position.ended
    return not (special or running.excluded or running.grouped or attempt.shown)


def plain_rows(
    attempt: Attempt, layout: Layout, steps: range, dealt: NDArray[np.int64]
) -> TrainedRows:
    """Find the rows of some steps of a plain attempt, by step, replica and place.

    Args:
        attempt: See `is_plain`.
        layout: Of its ranks.
        steps: Of its segment.
        dealt: int64[num_replicas]: Rows that each replica is dealt.

    Returns:
        The rows, with their slots in place of ``sample_id``.
    """
    batch_size = attempt.position.running.batch_size
    stop = min(steps.stop, num_steps(dealt, batch_size, drop_last=attempt.setup.drop_last))
    widths = np.array(layout.replicas)
    # [2, num_nodes]: nodes that are alike have their rows at the same places of their runs
    alike, which = np.unique([widths, layout.pool_sizes], axis=1, return_inverse=True)
    parts = [
        _rows_of(attempt, layout, nodes, range(steps.start, stop))
        for kind in range(alike.shape[1])
        if len(nodes := np.flatnonzero(which.ravel() == kind))
    ]
    rows = joined(parts)
    rows = rows._replace(weight=_weights(rows.step, dealt, batch_size))
    before = attempt.position.num_steps - attempt.first
    order = rows.step * layout.num_replicas + rows.replica
    rows = rows._replace(step=rows.step + before)
    if (order[1:] >= order[:-1]).all():
        return rows
    by = np.argsort(order, kind="stable")
    return TrainedRows._make(column[by] for column in rows)


def _rows_of(
    attempt: Attempt, layout: Layout, nodes: NDArray[np.int64], steps: range
) -> TrainedRows:
    """Find the rows of nodes that are as wide and have as many rows as the first of them."""
    width, num_rows = layout.replicas[nodes[0]], layout.pool_rows(int(nodes[0]))
    batch_size = attempt.position.running.batch_size
    per_step = width * batch_size
    places = np.arange(steps.start * per_step, max(min(steps.stop * per_step, num_rows), 0))
    # By step, replica and place in the batch
    places = places[np.lexsort((places, places % width, places // per_step))]
    streams = [
        key(attempt.setup.seed, "order", epoch=attempt.epoch, node=node) for node in nodes.tolist()
    ]
    slots = permute_each(places, num_rows, streams).ravel()
    own = places // width
    count = len(nodes)
    return TrainedRows(
        np.tile(own // batch_size, count),
        np.repeat(nodes, len(places)),
        (layout.first_replica[nodes][:, None] + places % width).ravel(),
        np.tile(own % batch_size, count),
        slots,
        slots,
        np.ones(len(slots), np.float32),
    )


def _weights(
    step: NDArray[np.int64], dealt: NDArray[np.int64], batch_size: int
) -> NDArray[np.float32]:
    """float32[n]: As `EpochPlan.block` scales them: 1 where no replica pads."""
    weight = np.ones(len(step), np.float32)
    last = int(step.max(initial=0))
    for late in range(int(dealt.min()) // batch_size, last + 1):
        valid = max(int(valid_rows(dealt, late, batch_size)), 1)
        weight[step == late] = np.float32(len(dealt) * batch_size / valid)
    return weight
