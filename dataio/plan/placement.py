"""Which sample every slot of a node is to hold, by name: the ids only when they are needed."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import ORDER_VERSION, digest
from dataio.plan.growth import samples_in
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
    """

    shuffle: Shuffle
    layout: Layout
    node: int
    num_slots: int
    seed: int
    num_leaving: int

    def of(self, epoch: int, *, first_epoch: int) -> Placement:
        """Name an epoch's placement; ``first_epoch`` is the one in which the layout began."""
        function_of: tuple[object, ...] = (self.shuffle.holds_all, self.layout, self.node)
        if self.layout.earlier and not self.shuffle.holds_all:
            function_of += self.layout.earlier
        if self.num_leaving:
            function_of += (self.shuffle, self.seed, first_epoch)
        else:
            epoch = 0  # where rows never move, every epoch's placement is the first's
        return Placement(
            digest(f"{function_of} {ORDER_VERSION}"),
            epoch,
            self.num_slots,
            lambda: self.sample_ids(epoch, first_epoch=first_epoch),
        )

    def at(self, position: Position) -> Placement:
        """Name the placement with which a position's epoch begins."""
        return self.of(position.epoch, first_epoch=position.running.first_epoch)

    def sample_ids(self, epoch: int, *, first_epoch: int) -> NDArray[np.int64]:
        """int64[num_slots]: The sample of every slot at the start of an epoch."""
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
