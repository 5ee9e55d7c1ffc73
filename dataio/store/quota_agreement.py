"""What the nodes agree on where a quota limits their caches: rows that stay, exchange, windows."""

import logging

import numpy as np

from dataio.base.sizes import format_bytes
from dataio.store.cache import Cache
from dataio.store.quota import Budget, Need, plan_budget, too_small
from dataio.store.streaming import WindowHalf, halve
from dataio.world import World

log = logging.getLogger(__name__)


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
        rows_move: Whether rows are to be exchanged at all.

    Attributes:
        rows_move: Whether rows may be exchanged: they may until one node lacks room.
        halves: Space of this rank for two windows; None where all rows stay.
    """

    def __init__(self, budget: Budget, cache: Cache, world: World, *, rows_move: bool) -> None:
        self.budget = budget
        self._cache = cache
        self._world = world
        self._wants_to_move = rows_move
        self.rows_move = rows_move
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
        return self.rows_move

    def agree_on_staged(self, *, overflowed: bool) -> None:
        """Keep the staged rows beyond what may stay if all rows fit, else drop them. Collective.

        Args:
            overflowed: Whether this rank had no room for some of its rows.
        """
        cache, world = self._cache, self._world
        cannot_move = self._wants_to_move and not cache.room.may_have_room_to_move()
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
        self.agree_to_move()
        self.halves = None
        if cache.log.num_missing and world.local_rank == 0:
            cache.hold.keep_alone()
            cache.disk.claim_windows()
        world.barrier(doing="make room for windows")
        if cache.log.num_missing:
            self.halves = halve(*cache.disk.find_windows())
        self._warn(staged_bytes_per_s)

    def _warn(self, staged_bytes_per_s: float) -> None:
        """Log on rank 0, once, what an epoch will read from the source. Collective."""
        cache, leads = self._cache, self._world.local_rank == 0
        present = len(cache.entries) - cache.log.num_missing
        row_bytes = cache.schema.fixed_bytes + cache.entries.extents_total_bytes / max(present, 1)
        missing = leads * cache.log.num_missing
        window_bytes = 0
        if self.halves is not None:
            half = self.halves[0]
            window_bytes = len(half.positions) * cache.schema.fixed_bytes + len(half.heap)
        mine = [leads * present, missing, missing * row_bytes, staged_bytes_per_s, window_bytes]
        rows, missing, num_bytes, rate, window_bytes = self._world.allgather_array(
            np.array(mine, np.float64), doing="add up what does not fit"
        ).sum(axis=0)
        if self._world.rank or not missing or self._has_warned:
            return
        self._has_warned = True
        # A pass opens every shard that has a missing row: where rows are small it reads them whole.
        passes = max(-(-int(num_bytes) // max(int(window_bytes), 1)), 1)
        slowest = passes * num_bytes / rate if rate else 0.0
        cost = f", {num_bytes / rate:.1f} to {slowest:.1f} s at the rate of staging" if rate else ""
        log.warning(
            "[rank 0] quota: %d of %d rows (%.0f %%) stay in the caches; every epoch reads the "
            "other %d (about %s) from the source in about %d passes%s, beside training",
            rows, rows + missing, 100 * rows / (rows + missing), missing,
            format_bytes(int(num_bytes)), passes, cost,
        )  # fmt: skip
