"""What the nodes agree on where a quota limits their caches: rows that stay, exchange, windows."""

import logging
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import generator, key
from dataio.base.sizes import format_bytes
from dataio.rows.fields import Field
from dataio.source.base import Source
from dataio.store.cache import Cache
from dataio.store.quota import Budget, Need, plan_budget, too_small
from dataio.store.streaming import WindowHalf, halve, planned_windows, rows_for
from dataio.world import World
from dataio.world.agree import together

log = logging.getLogger(__name__)

CHUNKED = "ArrayFiles"
"""The kind of source of which a window may read a chunk again that another has read."""
BLOCKS_TRIED = 8
"""Neighbouring chunks that are read once more to see what windows cost."""
TRIED_BYTES = 8 << 20
"""When so much has been read for it, no more is drawn."""
MARGIN = 1.02
"""A size is written in three digits, and a larger quota has a few files more."""
DRAWN_ROWS = 400
"""Of few rows, it depends on which these are: as many are drawn together."""


def agree_on_budget(quota_bytes: int, need: Need, world: World) -> Budget:
    """Divide the quota, or refuse it on all ranks alike. Collective.

    Raises:
        QuotaError: If it is too small on any node.
    """
    least = np.array([need.least_bytes()])
    most = int(world.allreduce(least, op="max", doing="compare quotas")[0])
    if quota_bytes < most:
        raise too_small(quota_bytes, most, need, on_all_ranks=True)
    return plan_budget(quota_bytes, need)


class QuotaAgreement:
    """What the nodes know together of a quota.

    Args:
        budget: What this node's cache may hold.
        cache: The node's files.
        world: All ranks.
        num_leaving: Rows of each replica that are to be exchanged in an epoch.
        source: Where rows come from.
        fields: What is kept of a sample.
        batch_size: Rows of a rank's batch.
        sample_ids: Gives int64[num_slots], of every slot.

    Attributes:
        rows_move: Whether rows may be exchanged: they may until one node lacks room.
        halves: Space of this rank for two windows; None where all rows stay.
    """

    def __init__(
        self, budget: Budget, cache: Cache, world: World, *, num_leaving: int, source: Source,
        fields: Mapping[str, Field], batch_size: int, sample_ids: Callable[[], NDArray[np.int64]],
    ) -> None:  # fmt: skip
        self.budget = budget
        self._cache = cache
        self._world = world
        self._num_leaving = num_leaving
        self._source, self._fields = source, fields
        self._batch_size, self._sample_ids = batch_size, sample_ids
        self.rows_move = num_leaving > 0
        self.halves: tuple[WindowHalf, WindowHalf] | None = None
        self._has_warned = False

    def agree_to_move(self) -> bool:
        """Decide whether every node has room for an exchange. Collective.

        Once one node has no room, no node exchanges rows any more.
        """
        if self.rows_move:
            cannot = np.array([not self._cache.room.has_room_to_move()])
            most = self._world.allreduce(
                cannot.astype(np.int64), op="max", doing="compare rooms for arrivals"
            )
            self.rows_move = not most[0]
            if not self.rows_move and self._world.num_nodes > 1:
                self._warn_of_ends()
        return self.rows_move

    def agree_on_staged(self, *, overflowed: bool) -> None:
        """Keep the staged rows beyond what may stay if all rows fit, else drop them. Collective.

        Args:
            overflowed: Whether this rank had no room for some of its rows.
        """
        cache, world = self._cache, self._world
        cannot_move = self._num_leaving > 0 and not cache.room.may_have_room_to_move()
        ranks = world.topology.ranks_of_node[world.node]
        # An exchange needs room on every node; else rows come and go by the source.
        mine = np.array([overflowed, cannot_move])
        over = world.allgather_array(mine.astype(np.int64), doing="compare rows with the quota")
        fits = not over[ranks, 0].any() and not over[:, 1].any()
        cache.flush_staged(all_fit=fits)
        world.barrier(doing="flush the staged rows that fit")

    def mark_filled(self) -> None:
        """Record that no more rows may stay, and keep no row to step back to. Leader only.

        Windows need the space of the epoch before.
        """
        cache = self._cache
        if cache.log.num_missing:
            if cache.log.can_step_back:
                cache.rewrite(cache.entries, epoch=cache.log.epoch, placement=cache.log.placement)
            cache.mark_filled()

    def make_windows(self, *, staged_bytes_per_s: float = 0.0) -> None:
        """Agree whether rows can be exchanged, and claim the space of windows. Collective.

        Args:
            staged_bytes_per_s: The rate of this rank's staging, if it staged anything.
        """
        cache, world = self._cache, self._world
        self.halves = None
        if cache.log.num_missing and world.local_rank == 0:
            cache.hold.keep_alone()
            cache.disk.claim_windows()
        world.barrier(doing="make room for windows")
        if cache.log.num_missing:
            self.halves = halve(*cache.disk.find_windows())
        self._warn(staged_bytes_per_s)
        self.agree_to_move()

    def _warn_of_ends(self) -> None:
        """Log on rank 0 what ends of epochs read, as no exchange has room. Collective."""
        world, rows, row_bytes = self._world, self._num_leaving, self._row_bytes()
        every, read = np.arange(self._source.num_samples), rows * row_bytes
        if self._source.made_as == CHUNKED:
            read = together(
                world, lambda: count_read(self._source, self._fields, every, rows),
                doing="see what ends of epochs read",
            )  # fmt: skip
        read = world.allreduce(np.array([read]), op="sum", doing="add up bytes")[0]
        if not world.rank:
            log.warning(
                "[rank 0] quota: a node has no room for rows that arrive beside those that stay, "
                "so that none are exchanged: the end of an epoch reads up to %s more from the "
                "source; rows are exchanged under a quota that holds all of them",
                format_bytes(int(read)),
            )  # fmt: skip

    def _row_bytes(self) -> float:
        """Find the mean of the rows that are here."""
        entries, log = self._cache.entries, self._cache.log
        present = max(len(entries) - log.num_missing, 1)
        return self._cache.schema.fixed_bytes + entries.extents_total_bytes / present

    def _warn(self, staged_bytes_per_s: float) -> None:
        """Log on rank 0, once, what an epoch will read from the source. Collective."""
        if self._has_warned:
            return
        cache, leads = self._cache, self._world.local_rank == 0
        present, row_bytes = len(cache.entries) - cache.log.num_missing, self._row_bytes()
        missing = leads * cache.log.num_missing
        window_bytes = 0
        if self.halves is not None:
            half = self.halves[0]
            window_bytes = len(half.positions) * cache.schema.fixed_bytes + len(half.heap)
        by_chunks = together(
            self._world,
            lambda: (
                self._count_chunks(row_bytes)
                if missing and self._source.made_as == CHUNKED
                else (0.0, 0.0)
            ),
            doing="see what windows read",
        )
        whole = self.budget.other_bytes + self.budget.whole_rows * row_bytes
        mine = [leads * present, missing, missing * row_bytes, staged_bytes_per_s, window_bytes]
        found = self._world.allgather_array(
            np.array([*mine, *by_chunks, whole], np.float64), doing="add up what does not fit"
        )
        rows, missing, num_bytes, rate, window_bytes, now, later, _ = found.sum(axis=0)
        self._has_warned = missing > 0
        if self._world.rank or not missing:
            return
        # A pass opens every shard that has a missing row: where rows are small it reads them whole.
        passes = max(-(-int(num_bytes) // max(int(window_bytes), 1)), 1)
        slowest = passes * num_bytes / rate if rate else 0.0
        cost = f", {num_bytes / rate:.1f} to {slowest:.1f} s at the rate of staging" if rate else ""
        how, about = f"in about {passes} passes{cost}", f" (about {format_bytes(int(num_bytes))})"
        is_known = rows or not cache.schema.variable  # else nothing shows how large a row is
        if not is_known:
            how, about = "in several passes", ""
        if now:
            how = f"as whole chunks for each of its windows, about {format_bytes(int(now))}"
        if now and self._num_leaving and later > now:
            how += f" at first and up to {format_bytes(int(later))} once neighbours are spread"
        cure = "a larger quota reads less"
        if is_known:
            size = format_bytes(int(MARGIN * found[:, -1].max()))
            cure += f", and one of {size} a node holds all rows"
        if not rows:
            cure = f"all of the space is for rows on their way, and none are exchanged; {cure}"
        log.warning(
            "[rank 0] quota: %d of %d rows (%.0f %%) stay in the caches of all nodes; every epoch "
            "reads the other %d%s from the source %s, beside training; %s",
            rows, rows + missing, 100 * rows / (rows + missing), missing, about, how, cure,
        )  # fmt: skip

    def _count_chunks(self, row_bytes: float) -> tuple[float, float]:
        """Find the bytes that this node's windows read in an epoch.

        Returns:
            As its rows are now, and where they may be any of the dataset.
        """
        assert self.halves is not None
        ids, source = self._sample_ids(), self._source
        missing = np.sort(ids[~self._cache.entries.present])
        sizes = [*planned_windows(
            len(missing) / self._world.local_size,
            of_batch=self._batch_size * len(missing) / len(ids),
            most_rows=rows_for(self.halves[0], row_bytes - self._cache.schema.fixed_bytes),
            row_bytes=row_bytes,
        )]  # fmt: skip
        now, later = (
            sum(count * count_read(source, self._fields, some, rows) for count, rows in sizes)
            for some in (missing, np.arange(source.num_samples))
        )
        return now * self._world.local_size, later * self._world.local_size


def count_read(
    source: Source, fields: Mapping[str, Field], sample_ids: NDArray[np.int64], num_rows: float
) -> float:
    """Find the bytes that it takes to read some samples of many, by reading a part of them so.

    Args:
        source: Its counter is looked at: no other thread may read by it.
        fields: What is kept of a sample.
        sample_ids: int64[n], sorted, distinct: all of them.
        num_rows: How many of them are read at once, at random.
    """
    blocks = np.searchsorted(source.shard_starts, sample_ids, side="right")
    known = np.unique(blocks)
    tried = np.unique(known[np.linspace(0, len(known) - 1, BLOCKS_TRIED).astype(int)])
    here = sample_ids[np.isin(blocks, tried)]
    rng = generator(key(0, "chunks of a window"))
    num_here = max(round(num_rows * len(here) / len(sample_ids)), 1)
    draws, before = 0, source.bytes_read
    while draws < max(min(DRAWN_ROWS // num_here, 8), 1):
        draws += 1
        for _ in source.read(np.sort(rng.choice(here, num_here, replace=False)), fields):
            pass
        if source.bytes_read - before >= TRIED_BYTES:
            break
    return (source.bytes_read - before) / draws * num_rows / num_here
