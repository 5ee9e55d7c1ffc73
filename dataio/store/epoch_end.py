"""The end of an epoch: rows that arrived become the rows of their nodes, on all nodes or on none.

Only this file knows the order:

    complete the exchange, scores move with their rows -> await the commit before
    -> seal -> all ranks agree -> see the new rows -> commit, beside the next epoch
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from dataio.plan.segment import Position
from dataio.store.moves import PoolMoves
from dataio.store.pool import Pool

Agree = Callable[[str, Mapping[str, float] | None], object]
"""``(doing, figures of the exchange)``: collective, and returns on no rank before all have called
it. None: nothing was exchanged."""


def end_epoch(
    pool: Pool, moves: PoolMoves, position: Position, *, agree: Agree
) -> NDArray[np.int64]:
    """Bring a node from the running epoch's rows to those of the next. Collective.

    Blocks until partners have sent their rows, and on the disk. What is staged beside training
    must be finished, and every report of the epoch be in the scores.

    Args:
        pool: The node's rows and scores.
        moves: The exchange of the running epoch.
        position: The running epoch.
        agree: Called once, when this rank's arrivals are durable.

    Returns:
        int64[n]: Slots that hold other rows than before, as far as rows arrived by an exchange.
    """
    if moves.by_exchange:
        figures = moves.finish(position)
        return commit_arrivals(pool, position.epoch + 1, agree=lambda doing: agree(doing, figures))
    agree("end the epoch", None)
    moves.refill(position)
    return np.empty(0, np.int64)


def commit_arrivals(
    pool: Pool, epoch: int, *, agree: Callable[[str], object] | None = None
) -> NDArray[np.int64]:
    """Make the arrivals written since the last commit the pool's rows, from ``epoch`` on.

    Collective, in two phases: when every rank's arrivals are durable, each node replaces its
    manifest, beside what comes next. The next commit waits for that before it seals, and so does
    `Cache.await_commit`. A kill before, between or after leaves nodes at most one epoch apart, and
    `Pool.ensure` steps back one.

    Args:
        pool: The node's rows; none of them is being staged.
        epoch: The next epoch.
        agree: Given a few words for errors; returns on no rank before all have called it. A
            barrier of all ranks by default.

    Returns:
        int64[n]: Slots that hold other rows than before.
    """
    assert not pool.is_staging, "a commit of staged rows would miss some"
    pool.cache.await_commit()
    pool.cache.seal(epoch)
    doing = "make arrivals durable"
    if agree is None:
        pool.world.barrier(doing=doing)
    else:
        agree(doing)
    # Past this point all ranks have sealed.
    changed = pool.cache.adopt_sealed(epoch)
    if pool.world.local_rank == 0:
        pool.cache.commit()
    return changed
