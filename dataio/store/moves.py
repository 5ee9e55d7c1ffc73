"""Rows between epochs: the exchange under way."""

from functools import cached_property

import numpy as np

from dataio.plan.placement import Placements
from dataio.plan.policies import ExchangeContext, RowExchange, RowStore
from dataio.plan.segment import Position
from dataio.rows.parcel import ParcelBuffers
from dataio.rows.rows import IdStore
from dataio.store.copies import begin_with_copies
from dataio.store.pool import Pool

NO_EPOCH = 1 << 62


class PoolMoves:
    """A pool's rows on their way from one epoch's placement to the next.

    Args:
        pool: The node's rows.
        placements: Where they are to lie.
        first_tag: Messages use the tags of this channel.
        copies_tag: Those about copies use the tags of this one.
    """

    def __init__(
        self, pool: Pool, placements: Placements, *, first_tag: int, copies_tag: int = -1
    ) -> None:
        self._pool = pool
        self._world = pool.world
        self._placements = placements
        self._first_tag, self._copies_tag = first_tag, copies_tag
        self._exchange: RowExchange | None = None
        self._mean_row_bytes = 0

    @cached_property
    def buffers(self) -> ParcelBuffers:
        """Memory for parcels, which one exchange after the other uses."""
        return ParcelBuffers()

    @property
    def by_exchange(self) -> bool:
        """Whether nodes trade rows at the end of the running epoch; if not, they may `refill`."""
        return self._placements.num_leaving > 0 and self._pool.moves

    def stage(self) -> None:
        """Bring the node's rows in, where its cache does not hold what may be wanted. Collective.

        Before anything is restored, so as of a layout that begins in epoch 0.
        """
        pool, placements = self._pool, self._placements
        if not placements.num_leaving:
            # Rows that never leave lie in the same slots whatever is restored.
            pool.ensure(placements.of(0, first_epoch=0))
            return
        missing = pool.cache.log.num_missing
        # Caches that hold rows keep them: a restore may want just that placement.
        begun = placements.of(pool.cache.log.epoch, first_epoch=0)
        follows = begun.name == pool.cache.log.placement and not pool.holds_nothing()
        mine = np.array([-missing, pool.cache.log.epoch if follows else NO_EPOCH])
        least, epoch = self._world.allreduce(mine, op="min", doing="look for caches").tolist()
        if least:
            # A node that lost its cache joins the others where they are.
            joined = placements.of(epoch if epoch < NO_EPOCH else 0, first_epoch=0)
            pool.ensure(pool.held() if not missing else begun if follows else joined)

    def begin(self, position: Position, steps: range) -> None:
        """Start an epoch's exchange beside its steps, if a quota leaves room. Collective."""
        if self._pool.agree_to_move():
            self._start(position, steps)

    def progress(self, step: int) -> None:
        """Send and take in what is due by this step. Never blocks."""
        if self._exchange is not None:
            self._exchange.progress(step)

    def finish(self, position: Position) -> dict[str, float]:
        """Complete the epoch's exchange and move its scores; return its figures. Collective."""
        if self._exchange is None:
            self._start(position, range(0))
        assert self._exchange is not None
        figures = self._exchange.finish(self._pool.scores if self._pool.keeps_scores else None)
        self._exchange = None
        return figures

    def refill(self, position: Position) -> None:
        """Go to the next epoch's rows by way of the source: a quota leaves no room for arrivals.

        Collective. The scores follow their rows as after an exchange, with the ids for bytes.
        Does nothing where rows never leave.
        """
        pool = self._pool
        if not self._placements.num_leaving:
            return
        if pool.keeps_scores:
            ids = IdStore(pool.sample_ids)
            context = self._context(ids, position, range(0), ids.schema.fixed_bytes)
            exchange = self._placements.shuffle.begin(context)
            if exchange is not None:
                exchange.finish(pool.scores)
        first_epoch = position.running.first_epoch
        pool.ensure(self._placements.of(position.epoch + 1, first_epoch=first_epoch))

    def abandon(self) -> None:
        """Complete the exchange under way, if any, to no effect. Collective while one runs."""
        if self._exchange is not None:
            self._exchange.finish(None)
            self._exchange = None
        self._pool.cache.forget_arrivals()

    def stop(self) -> None:
        """Let go of the exchange without the other ranks."""
        if self._exchange is not None:
            self._exchange.stop()
            self._exchange = None

    def _start(self, position: Position, steps: range) -> None:
        if not self._mean_row_bytes:
            self._mean_row_bytes = self._agree_row_bytes()
        self._pool.make_room()
        context = self._context(self._pool.cache, position, steps, self._mean_row_bytes)
        shuffle, holders = self._placements.shuffle, self._placements.holders
        if holders is None:
            self._exchange = shuffle.begin(context)
        else:
            self._exchange = begin_with_copies(
                shuffle, context, holders=holders, first_slot=self._pool.num_slots,
                first_tag=self._copies_tag,
            )  # fmt: skip

    def _context(
        self, store: RowStore, position: Position, steps: range, mean_row_bytes: int
    ) -> ExchangeContext:
        return ExchangeContext(
            self._world,
            store,
            self._placements.layout,
            position.epoch,
            self._placements.seed,
            steps,
            mean_row_bytes,
            self._first_tag,
            position.running.first_epoch,
            self._pool.fetch,
            self.buffers,
        )

    def _agree_row_bytes(self) -> int:
        entries = self._pool.cache.entries
        mean = self._pool.cache.schema.fixed_bytes + -(-entries.extents_total_bytes // len(entries))
        most = self._world.allreduce(np.array([mean]), op="max", doing="compare row sizes")
        return max(int(most[0]), 1)
