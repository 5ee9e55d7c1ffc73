"""Carry out what ``homes.py`` plans: rows that change node travel, the others change slot."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import ExchangeError
from dataio.exchange.transfer import Parcel, Transfer
from dataio.plan.history import Scores
from dataio.plan.policies import ExchangeContext, RowExchange
from dataio.world import CHANNEL_TAGS, World
from shuffle.homes import deal, plan_moves
from shuffle.plan import chunk_step, parcel_bounds


def begin_moves(context: ExchangeContext) -> RowExchange:
    """Start moving the rows whose node changes, spread over the epoch's steps."""
    layout, replica = context.layout, context.world.replica
    epochs = (context.epoch, context.epoch + 1)
    before, after = (
        deal(layout, seed=context.seed, epoch=epoch, first_epoch=context.first_epoch)
        for epoch in epochs
    )
    moves = plan_moves(layout, replica, before=before, after=after)
    context.store.keep_rows(moves.kept, held_in=moves.held_in)
    ahead = (moves.receivers - replica) % layout.num_replicas
    behind = (replica - moves.senders) % layout.num_replicas
    transfer = Transfer(
        context.world,
        context.store,
        sends=_parcels(context, moves.leaving, moves.receivers, ahead),
        receives=_parcels(context, moves.arriving, moves.senders, behind),
        fetch=context.fetch,
        buffers=context.buffers,
        at_hand=context.at_hand,
    )
    return Relocation(context.world, transfer, moves.kept, moves.held_in)


def _parcels(
    context: ExchangeContext,
    slots: NDArray[np.int64],
    peers: NDArray[np.int64],
    shifts: NDArray[np.int64],
) -> list[Parcel]:
    """Cut what one replica gives, or takes, into messages of bounded size.

    All go round the ring alike, the nearest first: of what is under way, the nearest is posted at
    both ends.
    """
    parcels = []
    # int64[num_peers]: rows of a peer are side by side
    _, starts, counts = np.unique(shifts, return_index=True, return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        rank = context.world.rank_of_replica(int(peers[start]))
        step = chunk_step(int(shifts[start]) - 1, context.layout.num_replicas - 1, context.steps)
        cuts = (start + parcel_bounds(count, mean_row_bytes=context.mean_row_bytes)).tolist()
        if len(cuts) > CHANNEL_TAGS:
            raise ExchangeError(
                f"[rank {context.world.rank}] {count} rows of {context.mean_row_bytes} bytes to or "
                f"from rank {rank} make {len(cuts) - 1} parcels an epoch, expected at most "
                f"{CHANNEL_TAGS}; start more ranks, or shuffle with Partial"
            )
        parcels += [
            Parcel(slots[a:b], rank, context.first_tag + number, step)
            for number, (a, b) in enumerate(pairwise(cuts))
        ]
    return parcels


class Relocation:
    """A transfer, and rows of the node that change slot beside it; an `RowExchange`.

    Args:
        world: All ranks.
        transfer: The rows that change node.
        kept: int64[n]: Slots that go on with a row of this node.
        held_in: int64[n]: Where these rows lie until then.
    """

    def __init__(
        self,
        world: World,
        transfer: Transfer,
        kept: NDArray[np.int64],
        held_in: NDArray[np.int64],
    ) -> None:
        self._world = world
        self._transfer = transfer
        self._kept, self._held_in = kept, held_in

    def progress(self, step: int) -> None:
        """Send and take in what is due by this step. Never blocks."""
        self._transfer.progress(step)

    def stop(self) -> None:
        """Let go after an error, without the other ranks."""
        self._transfer.stop()

    def finish(self, scores: Scores | None) -> dict[str, float]:
        """Complete the transfer; scores follow their rows. Collective where scores are kept."""
        if scores is None:
            return self._transfer.finish(None)
        staying = scores[self._held_in]
        # Another local rank's arrivals take the slots that these are read from.
        self._world.barrier(doing="read the scores of rows that stay")
        figures = self._transfer.finish(scores)
        scores[self._kept] = staying
        return figures
