"""Which sample every slot of a node is to hold, by name: the ids only when they are needed. Pure.

Where the dataset grew, layouts form a chain, each longer. Shares are floor or ceil of N/R, so no
pool is smaller than before when N grows. Every slot keeps its row; the slots behind them hold the
new samples, node by node. From there on rows move as under any layout of that length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dataio.base.permutation import permute
from dataio.base.seeding import ORDER_VERSION, digest, key
from dataio.plan.layout import Layout
from dataio.plan.policies import Shuffle
from dataio.plan.segment import Position


@dataclass(frozen=True)
class Placement:
    """The samples of a node's slots at the start of an epoch.

    Attributes:
        name: Of what it is a function (shuffle, layout, node, seed); equal names and epochs are
            equal placements. A cache records it, so that a warm start computes no ids.
        epoch: The epoch.
        num_slots: Slots of the node's pool.
        sample_ids: Computes int64[num_slots].
    """

    name: str
    epoch: int
    num_slots: int
    sample_ids: Callable[[], NDArray[np.int64]]


@dataclass(frozen=True)
class Placements:
    """A node's placements in all epochs: layout and seed decide them.

    Attributes:
        shuffle: Decides which node holds which row.
        layout: Replicas and samples.
        node: Whose slots.
        num_slots: Of its pool.
        seed: The run's seed.
        num_leaving: Rows that every replica gives and takes an epoch; 0: nothing ever moves.
        holders: int64[num_nodes]: Who holds a copy of each node's rows, behind its own and in the
            order of the slots that they have there; None: there are no copies.
    """

    shuffle: Shuffle
    layout: Layout
    node: int
    num_slots: int
    seed: int
    num_leaving: int
    holders: NDArray[np.int64] | None = field(default=None, compare=False)

    @cached_property
    def copied(self) -> "Placements":
        """Those of the node whose rows this one copies, where there are copies."""
        assert self.holders is not None
        node = int(np.flatnonzero(self.holders == self.node)[0])
        return replace(self, node=node, num_slots=self.layout.pool_rows(node), holders=None)

    def of(self, epoch: int, *, first_epoch: int) -> Placement:
        """Name an epoch's placement, copies and all; in ``first_epoch`` the layout began."""
        function_of: tuple[object, ...] = (self.shuffle.holds_all, self.layout, self.node)
        if self.layout.earlier and not self.shuffle.holds_all:
            function_of += self.layout.earlier
        if self.num_leaving:
            function_of += (self.shuffle, self.seed, first_epoch)
        else:
            epoch = 0  # where rows never move, every epoch's placement is the first's
        if self.holders is not None:
            function_of += ("copied", self.copied.node)
        return Placement(
            digest(f"{function_of} {ORDER_VERSION}"),
            epoch,
            self.num_slots + (0 if self.holders is None else self.copied.num_slots),
            lambda: (
                self.sample_ids(epoch, first_epoch=first_epoch)
                if self.holders is None
                else np.concatenate(
                    [one.sample_ids(epoch, first_epoch=first_epoch) for one in (self, self.copied)]
                )
            ),
        )

    def at(self, position: Position) -> Placement:
        """Name the placement with which a position's epoch begins."""
        return self.of(position.epoch, first_epoch=position.running.first_epoch)

    def sample_ids(self, epoch: int, *, first_epoch: int) -> NDArray[np.int64]:
        """int64[num_slots]: The sample of every slot of the pool at the start of an epoch."""
        if self.shuffle.holds_all:
            return np.arange(self.layout.num_samples, dtype=np.int64)
        return samples_in(
            self.shuffle,
            self.layout,
            node=self.node,
            epoch=epoch,
            seed=self.seed,
            first_epoch=first_epoch,
        )


def copy_holders(layout: Layout, *, seed: int, racks: Sequence[str] = ()) -> NDArray[np.int64]:
    """Choose who holds a copy of each node's rows, by a ring that the seed draws.

    It is the next in the ring where all are in one rack, or no rack is known. Else the nodes of a
    rack stand side by side, and the holder is as many places on as the largest rack has nodes. So
    it is in another rack, unless one rack has more than half of the nodes.

    Args:
        layout: One of which `Layout.can_copy` is true.
        seed: The run's seed.
        racks: The rack of each node; nodes of which none is known have one of their own, "".

    Returns:
        int64[num_nodes]: The holder of each node's rows, another node; each node is one's holder.
    """
    nodes = np.arange(layout.num_nodes)
    ring = permute(nodes, layout.num_nodes, key(seed, "copies"))
    names = np.array(racks or [""] * layout.num_nodes)[ring]
    _, first, rack, sizes = np.unique(
        names, return_index=True, return_inverse=True, return_counts=True
    )
    ring = ring[np.argsort(first[rack], kind="stable")]
    holders = np.empty_like(nodes)
    holders[ring] = np.roll(ring, -sizes.max() if len(sizes) > 1 else -1)
    return holders


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
    # Samples that these homes, of any nodes, held when the layout began.
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
