"""Which node holds which row, epoch by epoch: the policies that a loader is handed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.layout import Layout
from dataio.policies import Exchange, Turn
from dataio.transfer import Parcel, Transfer
from shuffle.plan import leaving_slots, num_leaving, placement
from shuffle.schedule import plan_legs


@dataclass(frozen=True)
class Partial:
    """Every replica gives and takes a fraction of its rows each epoch, while the epoch runs.

    Attributes:
        exchange: Q, the fraction of a replica's rows, in [0, 1]. Storage is at most (1 + 2 Q) of
            the pool.

    Source: partial local shuffling, Nguyen et al., IPDPS 2022.
    """

    exchange: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.exchange <= 1:
            raise ValueError(f"Partial: exchange is {self.exchange}; give a fraction in [0, 1]")

    @property
    def holds_all(self) -> bool:
        return False

    def num_leaving(self, layout: Layout) -> int:
        """floor(Q * floor(N/R)); 0 on a single node, whose replicas share one pool anyway."""
        return num_leaving(layout, self.exchange)

    def placement(
        self, layout: Layout, *, node: int, epoch: int, seed: int, first_epoch: int = 0
    ) -> NDArray[np.int64]:
        """Trace every slot of a node back to the sample it holds at the start of ``epoch``."""
        return placement(
            layout,
            node=node,
            exchange=self.exchange,
            seed=seed,
            epoch=epoch,
            first_epoch=first_epoch,
        )

    def begin(self, turn: Turn) -> Exchange | None:
        """Start the epoch's exchange, spread over its steps; `progress` sends the first."""
        leaving = self.num_leaving(turn.layout)
        if leaving == 0:
            return None
        replica, rank_of = turn.world.replica, turn.world.rank_of_replica
        slots = leaving_slots(
            turn.layout, replica=replica, num_leaving=leaving, seed=turn.seed, epoch=turn.epoch
        )
        legs = plan_legs(
            turn.layout,
            replica=replica,
            num_leaving=leaving,
            seed=turn.seed,
            epoch=turn.epoch,
            steps=turn.steps,
            mean_row_bytes=turn.mean_row_bytes,
            first_tag=turn.first_tag,
        )
        rows = [slots[leg.start : leg.stop] for leg in legs]
        return Transfer(
            turn.world,
            turn.store,
            sends=[
                Parcel(part, rank_of(leg.dest), leg.tag, leg.step)
                for part, leg in zip(rows, legs, strict=True)
            ],
            receives=[
                Parcel(part, rank_of(leg.source), leg.tag, leg.step)
                for part, leg in zip(rows, legs, strict=True)
            ],
            repair=turn.repair,
            buffers=turn.buffers,
        )


@dataclass(frozen=True)
class Global:
    """Every node's pool is the whole dataset: each epoch is one shuffle of everything."""

    @property
    def holds_all(self) -> bool:
        return True

    def num_leaving(self, layout: Layout) -> int:
        """Nothing leaves."""
        return 0

    def placement(
        self, layout: Layout, *, node: int, epoch: int, seed: int, first_epoch: int = 0
    ) -> NDArray[np.int64]:
        """Slot s holds sample s, on every node, for ever."""
        return np.arange(layout.num_samples, dtype=np.int64)

    def begin(self, turn: Turn) -> None:
        """Nothing moves."""
