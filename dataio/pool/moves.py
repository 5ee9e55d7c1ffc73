"""Rows between epochs: the exchange under way, and the name of what it leaves a node with."""

import numpy as np
from numpy.typing import NDArray

from dataio.base.digest import digest
from dataio.base.errors import QuotaError
from dataio.plan.placement import Placement, Placements
from dataio.plan.policies import Exchange, ExchangeContext, RowStore
from dataio.plan.segment import Position
from dataio.pool.pool import Pool
from dataio.rows.parcel import ParcelBuffers
from dataio.rows.rows import IdStore

NO_EPOCH = 1 << 62


class Moves:
    """A pool's rows on their way from one epoch's placement to the next.

    Args:
        pool: The node's rows.
        placements: Where they are to lie, as far as they follow from the seed.
        first_tag: Messages use the tags of this channel.

    Attributes:
        digest: Of a placement that does not follow from the seed, over all nodes; "" in an epoch
            whose placement does.
        losses: float32[num_slots]: The last losses as the epoch began, where they decide what is
            exchanged.
        buffers: Memory for parcels, which one exchange after the other uses.
    """

    def __init__(self, pool: Pool, placements: Placements, *, first_tag: int) -> None:
        self._pool = pool
        self._world = pool.world
        self._placements = placements
        self._first_tag = first_tag
        self.digest = ""
        self.losses: NDArray[np.float32] | None = None
        self.buffers = ParcelBuffers()
        # What was restored, where it does not follow from the seed.
        self._given: Placement | None = None
        self._exchange: Exchange | None = None
        self._mean_row_bytes = 0

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
        missing = pool.cache.num_missing
        # Caches that hold rows keep them: a restore may want just that placement.
        begun = placements.of(pool.cache.epoch, first_epoch=0)
        follows = begun.name == pool.cache.placement and not pool.holds_nothing()
        mine = np.array([-missing, pool.cache.epoch if follows else NO_EPOCH])
        least, epoch = self._world.allreduce(mine, op="min", doing="look for caches").tolist()
        if least:
            # A node that lost its cache joins the others where they are.
            joined = placements.of(epoch if epoch < NO_EPOCH else 0, first_epoch=0)
            pool.ensure(pool.held() if not missing else begun if follows else joined)

    def keep_losses(self, losses: NDArray[np.float32] | None) -> None:
        """Remember the last losses as an epoch begins, those of a snapshot if there is one."""
        if self._placements.shuffle.by_losses and self._placements.num_leaving:
            # Copied before ranks meet again, after which any of them may report.
            self.losses = losses if losses is not None else self._pool.scores["loss"].copy()

    def begin(self, position: Position, steps: range) -> None:
        """Start an epoch's exchange beside its steps, if a quota leaves room. Collective.

        Raises:
            QuotaError: If it leaves none, and nothing but the exchange knows the next placement.
        """
        if self._pool.agree_to_move():
            self._start(position, steps)
        elif not self._placements.traced:
            raise self._no_room()

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
        if not self._placements.traced:
            self._name_arrivals()
        return figures

    def refill(self, position: Position) -> None:
        """Go to the next epoch's rows by way of the source: a quota leaves no room for arrivals.

        Collective. The scores follow their rows as after an exchange, with the ids for bytes.
        Does nothing where rows never leave.
        """
        pool = self._pool
        if not self._placements.num_leaving:
            return
        if not self._placements.traced:
            raise self._no_room()
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
        self._given = None

    def stop(self) -> None:
        """Let go of the exchange without the other ranks."""
        if self._exchange is not None:
            self._exchange.stop()
            self._exchange = None

    def is_as_saved(
        self, ids: NDArray[np.int64], wanted: NDArray[np.int64] | None, saved: object
    ) -> bool:
        """Whether a node's saved samples are the right ones.

        Collective where ``wanted``, the samples of every slot, is not known: then digests are
        compared.
        """
        if wanted is not None:
            return np.array_equal(ids, wanted)
        share = slice(*self._placements.layout.share_slots(self._world.replica))
        return self._digest_shares(ids[share]) == saved

    def follow(self, ids: NDArray[np.int64], *, epoch: int, saved: str) -> None:
        """Begin next with a saved placement that does not follow from the seed."""
        self.digest = saved
        self._given = Placement(self._name(), epoch, len(ids), lambda: ids)

    def take_placement(self, position: Position) -> Placement:
        """Return, once, the placement to begin with: the saved one, or that of the seed."""
        given, self._given = self._given, None
        if given is not None:
            return given
        self.digest = ""
        return self._placements.of(position.epoch, first_epoch=position.running.first_epoch)

    def _start(self, position: Position, steps: range) -> None:
        if not self._mean_row_bytes:
            self._mean_row_bytes = self._agree_row_bytes()
        self._pool.make_room()
        context = self._context(self._pool.cache, position, steps, self._mean_row_bytes)
        self._exchange = self._placements.shuffle.begin(context)

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
            self.losses,
            self._pool.fetch,
            self.buffers,
        )

    def _agree_row_bytes(self) -> int:
        entries = self._pool.cache.entries
        mean = self._pool.cache.schema.fixed_bytes + -(-entries.extents_total_bytes // len(entries))
        most = self._world.allreduce(np.array([mean]), op="max", doing="compare row sizes")
        return max(int(most[0]), 1)

    def _no_room(self) -> QuotaError:
        return QuotaError(
            f"quota: leaves no room for the rows that arrive, and {self._placements.shuffle} "
            "cannot do without: nothing but the exchange knows the next placement; raise the "
            'quota, or shuffle with rows="uniform", partners="uniform"',
            on_all_ranks=True,
        )

    def _name_arrivals(self) -> None:
        """Name what the pool is about to hold, which no seed determines. Collective."""
        cache = self._pool.cache
        start, stop = self._placements.layout.share_slots(self._world.replica)
        ids = np.array(cache.entries.sample_id[start:stop], np.int64)
        slots, arrived = cache.arrivals.ids()
        ids[slots - start] = arrived
        self.digest = self._digest_shares(ids)
        cache.name_placement(self._name())

    def _name(self) -> str:
        return f"{self.digest} on node {self._world.node}"

    def _digest_shares(self, ids: NDArray[np.int64]) -> str:
        """Digest all ranks' shares, given this one's samples, slot by slot. Collective.

        Equal digests are equal placements, whatever run they come from.
        """
        mine = digest(ids.astype("<i8").tobytes()).encode()
        everyone = self._world.allgather(mine, doing="agree on what was exchanged")
        layout = self._placements.layout
        replicas = range(layout.num_replicas)
        shares = [everyone[self._world.rank_of_replica(replica)] for replica in replicas]
        return digest(f"{layout} {b' '.join(shares).decode()}")
