"""Who sends to whom: replicas stand in a ring, and each chunk goes a drawn number of places on.

The ring is filled node by node, a node's replicas side by side. A shift of at least the widest
node, either way round, therefore always ends on another node; and as all replicas shift alike, each
receives exactly once.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataio.base.permutation import permute, unpermute
from dataio.base.seeding import Key, key
from dataio.plan.layout import Layout


@dataclass(frozen=True)
class ReplicaRing:
    """One epoch's ring. Nothing grows with it where all nodes are equally wide.

    Attributes:
        layout: The replicas that stand in it.
        seed: The run's seed.
        epoch: The epoch whose chunks it sends.
    """

    layout: Layout
    seed: int
    epoch: int

    def replica_at(self, positions: ArrayLike) -> NDArray[np.int64]:
        """int64[...]: Replicas that stand at these positions, each in [0, num_replicas)."""
        places = np.asarray(positions, np.int64)
        if self.layout.is_even:
            ordinal = places // self.layout.widest
            node = permute(ordinal, self.layout.num_nodes, self._stream)
            return places + (node - ordinal) * self.layout.widest
        nodes, starts = self._standing
        ordinal = np.searchsorted(starts, places, side="right") - 1
        return self.layout.first_replica[nodes[ordinal]] + places - starts[ordinal]

    def position_of(self, replicas: ArrayLike) -> NDArray[np.int64]:
        """int64[...]: Positions at which these replicas stand; the inverse of ``replica_at``."""
        numbers = np.asarray(replicas, np.int64)
        if self.layout.is_even:
            node = numbers // self.layout.widest
            ordinal = unpermute(node, self.layout.num_nodes, self._stream)
            return numbers + (ordinal - node) * self.layout.widest
        nodes, starts = self._standing
        first = self.layout.first_replica
        node = np.searchsorted(first, numbers, side="right") - 1
        start_of_node = np.empty_like(starts)
        start_of_node[nodes] = starts
        return start_of_node[node] + numbers - first[node]

    def destinations(self, replicas: ArrayLike, shifts: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[...]: Replicas that stand ``shifts`` places on; negative shifts find the source."""
        if np.size(replicas) > self.layout.num_replicas:
            standing, positions = self.tables
            places = positions[np.asarray(replicas, np.int64)] + shifts
            return np.asarray(standing[places % self.layout.num_replicas], np.int64)
        places = self.position_of(replicas) + shifts
        return self.replica_at(places % self.layout.num_replicas)

    def shift(self, chunk: int) -> int:
        """Say how many places on a chunk of this epoch goes, the same for all replicas."""
        low, high = _shift_bounds(self.layout)
        # 128 random bits: what the remainder favours is below anything measurable
        return low + key(self.seed, f"shift of chunk {chunk}", epoch=self.epoch) % (high - low + 1)

    def shifts(self, num_chunks: int) -> NDArray[np.int64]:
        """int64[num_chunks]: The shift of every chunk."""
        return np.array([self.shift(chunk) for chunk in range(num_chunks)], np.int64)

    @cached_property
    def _stream(self) -> Key:
        return key(self.seed, "ring", epoch=self.epoch)

    @cached_property
    def tables(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """int64[num_replicas], twice: the replica at each position, and each replica's position."""
        nodes, starts = self._standing
        places = np.arange(self.layout.num_replicas)
        firsts = self.layout.first_replica[nodes] - starts
        standing = places + np.repeat(firsts, np.diff(self.layout.first_replica)[nodes])
        positions = np.empty_like(places)
        positions[standing] = places
        return standing, positions

    @cached_property
    def _standing(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Nodes in the order in which they stand, and the position of each one's first replica."""
        nodes = permute(np.arange(self.layout.num_nodes), self.layout.num_nodes, self._stream)
        widths = np.diff(self.layout.first_replica)[nodes]
        return nodes, np.cumsum(widths) - widths


def make_ring(layout: Layout, *, seed: int, epoch: int) -> ReplicaRing:
    """Line the nodes up in the order keyed by seed and epoch."""
    return ReplicaRing(layout, seed, epoch)


def partners(layout: Layout, *, seed: int, epoch: int, chunk: int, replica: int) -> tuple[int, int]:
    """Find the two partners of a replica for one chunk.

    For many chunks of one epoch ask the ``ReplicaRing``: one of uneven nodes is in memory of their
    number.

    Returns:
        The replica that this one sends to, and the replica that it receives from.

    Raises:
        ValueError: If there is only one node, where nothing is exchanged.
    """
    ring = make_ring(layout, seed=seed, epoch=epoch)
    shift = ring.shift(chunk)
    dest, source = ring.destinations(replica, np.array([shift, -shift])).tolist()
    return dest, source


def crossing_fraction(layout: Layout) -> float:
    """Say which share of the exchanged rows changes node, on average over shifts, in [0, 1].

    Below 1 only where one node holds more than half of the replicas: no shift leads every one of
    them away, so some rows change hands within the node. Q times this is the Q that is effective.
    """
    num_replicas = layout.num_replicas
    if layout.num_nodes == 1:
        return 0.0
    if 2 * layout.widest <= num_replicas:
        return 1.0
    # Shifts are uniform over all others: of the ordered pairs of replicas, those on two nodes
    together = sum(width * width for width in layout.replicas)
    return (num_replicas**2 - together) / (num_replicas * (num_replicas - 1))


def _shift_bounds(layout: Layout) -> tuple[int, int]:
    widest, num_replicas = layout.widest, layout.num_replicas
    if layout.num_nodes == 1:
        raise ValueError(
            f"ring: all {num_replicas} replicas stand on one node, where nothing is exchanged; "
            f"ask for partners only where num_leaving is above 0"
        )
    if 2 * widest > num_replicas:
        return 1, num_replicas - 1
    return widest, num_replicas - widest
