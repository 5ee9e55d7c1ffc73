"""A global shuffle by moving rows: every epoch deals all samples to all homes anew.

The sample of home h in epoch e is a keyed permutation of all samples, so that each rank computes
where its own rows go and where its next rows stand, and nothing else. Where both are on one node
nothing travels: the row is known by another slot.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dataio.errors import ExchangeError
from dataio.layout import Layout
from dataio.permutation import permute, unpermute
from dataio.policies import Exchange, Scores, Turn
from dataio.seeding import Key, key
from dataio.transfer import Parcel, Transfer
from dataio.world import CHANNEL_TAGS, World
from shuffle.plan import chunk_step, parcel_bounds, replica_of_home


@dataclass(frozen=True)
class Dealing:
    """Which sample every home holds in an epoch.

    Attributes:
        num_samples: Samples, and homes.
        stream: Key of the permutation; None: every home holds the sample of its number.
    """

    num_samples: int
    stream: Key | None

    def samples(self, homes: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[...]: What these homes hold."""
        return homes if self.stream is None else permute(homes, self.num_samples, self.stream)

    def homes(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[...]: Where these samples are; the inverse of ``samples``."""
        return samples if self.stream is None else unpermute(samples, self.num_samples, self.stream)


def deal(layout: Layout, *, seed: int, epoch: int, first_epoch: int = 0) -> Dealing:
    """Deal all samples for an epoch; in ``first_epoch``, and on one node, as `Layout` says."""
    stays = layout.num_nodes == 1 or epoch <= first_epoch
    return Dealing(layout.num_samples, None if stays else key(seed, "home", epoch=epoch))


@dataclass(frozen=True)
class Moves:
    """Where one replica's rows go after an epoch, and where its next ones stand.

    Attributes:
        kept: int64[num_kept]: Slots of its share that go on with a row of this node.
        held_in: int64[num_kept]: Slots in which these rows lie until then.
        leaving: int64[num_leaving]: Slots of its share whose rows leave the node, by receiver.
        receivers: int64[num_leaving]: Replicas that they go to, the next in the ring first.
        arriving: int64[num_arriving]: Slots of its share that rows from other nodes go to.
        senders: int64[num_arriving]: Replicas that they come from, the one before it first.
    """

    kept: NDArray[np.int64]
    held_in: NDArray[np.int64]
    leaving: NDArray[np.int64]
    receivers: NDArray[np.int64]
    arriving: NDArray[np.int64]
    senders: NDArray[np.int64]


def plan_moves(layout: Layout, replica: int, *, before: Dealing, after: Dealing) -> Moves:
    """Plan a replica's moves, in time and memory of its share.

    Rows between two replicas are in the order of their next homes at both ends.
    """
    start = layout.share_start(replica)
    mine = np.arange(start, start + layout.share_rows(replica))
    node = layout.node_of(replica)
    first_home = layout.pool_start(node)

    to = after.homes(before.samples(mine))
    receivers = replica_of_home(layout, to)
    away = np.flatnonzero(_nodes(layout, receivers) != node)
    away = away[np.lexsort((to[away], (receivers[away] - replica) % layout.num_replicas))]

    held = before.homes(after.samples(mine))
    senders = replica_of_home(layout, held)
    comes = _nodes(layout, senders) != node
    new = np.flatnonzero(comes)
    new = new[np.argsort((replica - senders[new]) % layout.num_replicas, kind="stable")]
    kept = np.flatnonzero(~comes & (held != mine))
    return Moves(
        mine[kept] - first_home,
        held[kept] - first_home,
        mine[away] - first_home,
        receivers[away],
        mine[new] - first_home,
        senders[new],
    )


def begin_moves(turn: Turn) -> Exchange:
    """Start moving the rows whose node changes, spread over the epoch's steps."""
    layout, replica = turn.layout, turn.world.replica
    epochs = (turn.epoch, turn.epoch + 1)
    before, after = (
        deal(layout, seed=turn.seed, epoch=epoch, first_epoch=turn.first_epoch) for epoch in epochs
    )
    moves = plan_moves(layout, replica, before=before, after=after)
    turn.store.keep_rows(moves.kept, held_in=moves.held_in)
    ahead = (moves.receivers - replica) % layout.num_replicas
    behind = (replica - moves.senders) % layout.num_replicas
    transfer = Transfer(
        turn.world,
        turn.store,
        sends=_parcels(turn, moves.leaving, moves.receivers, ahead),
        receives=_parcels(turn, moves.arriving, moves.senders, behind),
    )
    return Relocation(turn.world, transfer, moves.kept, moves.held_in)


def _parcels(
    turn: Turn, slots: NDArray[np.int64], peers: NDArray[np.int64], shifts: NDArray[np.int64]
) -> list[Parcel]:
    """Cut what one replica gives, or takes, into messages of bounded size.

    All go round the ring alike, the nearest first: of what is under way, the nearest is posted at
    both ends.
    """
    parcels = []
    # int64[num_peers]: rows of a peer are side by side
    _, starts, counts = np.unique(shifts, return_index=True, return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        rank = turn.world.rank_of_replica(int(peers[start]))
        step = chunk_step(int(shifts[start]) - 1, turn.layout.num_replicas - 1, turn.steps)
        cuts = (start + parcel_bounds(count, mean_row_bytes=turn.mean_row_bytes)).tolist()
        if len(cuts) > CHANNEL_TAGS:
            raise ExchangeError(
                f"[rank {turn.world.rank}] {count} rows of {turn.mean_row_bytes} bytes to or from "
                f"rank {rank} make {len(cuts) - 1} parcels an epoch, expected at most "
                f"{CHANNEL_TAGS}; start more ranks, or shuffle with Partial"
            )
        parcels += [
            Parcel(slots[a:b], rank, turn.first_tag + number, step)
            for number, (a, b) in enumerate(pairwise(cuts))
        ]
    return parcels


class Relocation:
    """A transfer, and rows of the node that change slot beside it; an `Exchange`.

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


def _nodes(layout: Layout, replicas: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(layout.first_replica, replicas, side="right") - 1
