"""Which node holds which row, epoch by epoch: the policies that a loader is handed."""

import logging
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import Fraction, checked
from dataio.exchange.transfer import Parcel, Transfer
from dataio.plan.layout import Layout
from dataio.plan.policies import ExchangeContext, RowExchange
from shuffle.homes import deal
from shuffle.plan import homes_after, leaving_slots, num_leaving, placement, trace_homes
from shuffle.relocation import begin_moves
from shuffle.ring import crossing_fraction
from shuffle.schedule import plan_legs

log = logging.getLogger(__name__)


@checked
@dataclass(frozen=True)
class Partial:
    """Every replica gives and takes a fraction of its rows each epoch, while the epoch runs.

    Attributes:
        exchange: Q, the fraction of a replica's rows, in [0, 1]. Storage is at most (1 + 2 Q) of
            the pool.
        compress: Parcels of 64 KiB and more by zstd: ``"auto"``, where that takes less time than
            the link saves, by what the last parcels took; ``"zstd"``, all that get smaller by a
            tenth. The same on all ranks; no row depends on it.

    Source: partial local shuffling, Nguyen et al., IPDPS 2022.
    """

    exchange: Fraction = 0.1
    # Not in the name by which checkpoints know a policy: it changes no row.
    compress: Literal["none", "auto", "zstd"] = field(default="none", repr=False)

    holds_all: ClassVar[bool] = False

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

    def trace(
        self, layout: Layout, homes: NDArray[np.int64], *, epoch: int, seed: int, first_epoch: int
    ) -> NDArray[np.int64]:
        """Trace rows back from where exchanges brought them."""
        return trace_homes(
            layout,
            homes,
            exchange=self.exchange,
            seed=seed,
            epoch=epoch,
            first_epoch=first_epoch,
        )

    def follow(
        self, layout: Layout, homes: NDArray[np.int64], *, epoch: int, seed: int, first_epoch: int
    ) -> NDArray[np.int64]:
        """Follow rows to where the epoch's exchange brings them."""
        leaving = self.num_leaving(layout)
        if not leaving:
            return homes
        return homes_after(layout, homes, num_leaving=leaving, seed=seed, epoch=epoch)

    def begin(self, context: ExchangeContext) -> RowExchange | None:
        """Start the epoch's exchange, spread over its steps; `progress` sends the first."""
        leaving = self.num_leaving(context.layout)
        if leaving == 0:
            return None
        if context.epoch == context.first_epoch and context.world.rank == 0:
            self._log_what_crosses(context.layout)
        rank_of = context.world.rank_of_replica
        slots = leaving_slots(
            context.layout,
            replica=context.world.replica,
            num_leaving=leaving,
            seed=context.seed,
            epoch=context.epoch,
        )
        legs = plan_legs(
            context.layout,
            replica=context.world.replica,
            num_leaving=leaving,
            seed=context.seed,
            epoch=context.epoch,
            steps=context.steps,
            mean_row_bytes=context.mean_row_bytes,
            first_tag=context.first_tag,
        )
        rows = [slots[leg.start : leg.stop] for leg in legs]
        return Transfer(
            context.world,
            context.store,
            sends=[
                Parcel(part, rank_of(leg.dest), leg.tag, leg.step)
                for part, leg in zip(rows, legs, strict=True)
            ],
            receives=[
                Parcel(part, rank_of(leg.source), leg.tag, leg.step)
                for part, leg in zip(rows, legs, strict=True)
            ],
            fetch=context.fetch,
            buffers=context.buffers,
            at_hand=context.at_hand,
            compress=self.compress,
        )

    def _log_what_crosses(self, layout: Layout) -> None:
        crossing = crossing_fraction(layout)
        if crossing < 1:
            log.warning(
                "[rank 0] %s: one node holds %d of %d replicas, so %.0f %% of the exchanged rows "
                "change hands within it; in effect the exchange is %.3g: give a larger one, or as "
                "many ranks to every node",
                self, layout.widest, layout.num_replicas, 100 * (1 - crossing),
                self.exchange * crossing,
            )  # fmt: skip


@checked
@dataclass(frozen=True)
class Global:
    """Each epoch is one shuffle of everything.

    Attributes:
        moves: False: every node's pool is the whole dataset, and nothing moves. True: it is the
            node's part, dealt anew each epoch from all samples; the rows whose node changes travel
            while the epoch runs. Storage is at most 3 times the pool: its rows, those that
            arrive, and those that left and may be needed after a kill.
    """

    moves: bool = False

    @property
    def holds_all(self) -> bool:
        return not self.moves

    def num_leaving(self, layout: Layout) -> int:
        """All of a replica's rows, at most; nothing where nothing moves, or on a single node."""
        if not self.moves or layout.num_nodes == 1:
            return 0
        return -(-layout.num_samples // layout.num_replicas)

    def placement(
        self, layout: Layout, *, node: int, epoch: int, seed: int, first_epoch: int = 0
    ) -> NDArray[np.int64]:
        """Say what a node's slots hold: sample s in slot s, or what the epoch's dealing gave them.

        Time O(pool rows), whatever the epoch.
        """
        if not self.moves:
            return np.arange(layout.num_samples, dtype=np.int64)
        homes = layout.pool_start(node) + np.arange(layout.pool_rows(node), dtype=np.int64)
        return self.trace(layout, homes, epoch=epoch, seed=seed, first_epoch=first_epoch)

    def trace(
        self, layout: Layout, homes: NDArray[np.int64], *, epoch: int, seed: int, first_epoch: int
    ) -> NDArray[np.int64]:
        """Ask the epoch's dealing; where nothing moves, every row stays."""
        if not self.moves:
            return homes
        return deal(layout, seed=seed, epoch=epoch, first_epoch=first_epoch).samples(homes)

    def follow(
        self, layout: Layout, homes: NDArray[np.int64], *, epoch: int, seed: int, first_epoch: int
    ) -> NDArray[np.int64]:
        """Ask the dealings of the epoch and of the next one; where nothing moves, rows stay."""
        if not self.moves:
            return homes
        samples = self.trace(layout, homes, epoch=epoch, seed=seed, first_epoch=first_epoch)
        return deal(layout, seed=seed, epoch=epoch + 1, first_epoch=first_epoch).homes(samples)

    def begin(self, context: ExchangeContext) -> RowExchange | None:
        """Start moving the rows whose node changes; None where nothing moves."""
        return begin_moves(context) if self.num_leaving(context.layout) else None
