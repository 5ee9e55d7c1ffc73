"""A global shuffle by moving rows: every epoch deals all samples to all homes anew.

The sample of home h in epoch e is a keyed permutation of all samples, so that each rank computes
where its own rows go and where its next rows stand, and nothing else. Where both are on one node
nothing travels: the row is known by another slot.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.permutation import permute, unpermute
from dataio.base.seeding import Key, key
from dataio.plan.layout import Layout
from shuffle.plan import replica_of_home


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


def _nodes(layout: Layout, replicas: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(layout.first_replica, replicas, side="right") - 1
