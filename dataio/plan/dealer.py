"""Agree with all ranks on an epoch: what each sampling group hides, and its batches."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import key
from dataio.plan.costs import SpentCosts, find_rates, price_rows
from dataio.plan.epoch import (
    Counts,
    EpochPlan,
    SamplingGroups,
    count_rows,
    plan_epoch,
    plan_refresh,
    spread_selection,
    without_excluded,
)
from dataio.plan.exclusion import Exclusion
from dataio.plan.history import ByField, Candidates, Scores, no_field
from dataio.plan.order import Order, deal, num_steps
from dataio.plan.policies import ByCost, Importance, Selection
from dataio.plan.replay import groups_of
from dataio.plan.segment import Position
from dataio.world import World

MOST_STEPS = 1.25
"""Of the steps of an even share; where an epoch takes more, a message says so."""

log = logging.getLogger(__name__)


class CostMeter(Protocol):
    """Measures what rows cost on this rank."""

    def spent(self) -> SpentCosts:
        """Say what the rank spent since it began."""
        ...

    def row_bytes(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Find each row's bytes, 0 where unknown, and whether it is read from the source."""
        ...


class Dealer:
    """Deals a replica its rows of each epoch, in as many steps as every other.

    Args:
        sampling: All sampling groups, and this replica's place.
        world: All ranks.
        importance: Which rows an epoch leaves out; None: none.
        seed: The run's seed.
        batch_size: Rows a batch.
        drop_last: Leave out the steps that not every replica can fill.
        by_field: Returns the values of a field of all samples, where a policy asks.
        costs: uint8[num_samples]: What each costs, where batches are to cost alike.
        exclusion: What is left out for good; None: nothing.
        meter: Measures what rows cost, where a policy asks; None: they cost alike.
    """

    def __init__(
        self,
        sampling: SamplingGroups,
        *,
        world: World,
        importance: Importance | None,
        seed: int,
        batch_size: int,
        drop_last: bool,
        by_field: ByField = no_field,
        costs: NDArray[np.uint8] | None = None,
        exclusion: Exclusion | None = None,
        meter: CostMeter | None = None,
    ) -> None:
        self._sampling = sampling
        self._world = world
        self._importance = importance
        self._seed = seed
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._by_field = by_field
        self._costs = costs
        self._exclusion = exclusion if exclusion is not None and exclusion.num_excluded else None
        self._meter = meter
        self._has_warned = False

    def deal(
        self,
        position: Position,
        scores: Scores,
        sample_id: Callable[[], NDArray[np.int64]],
        *,
        num_epochs: int | None,
        before: Mapping[str, float],
        restored: Selection | None,
        seen: NDArray[np.int64] | None,
    ) -> tuple[EpochPlan, Order]:
        """Decide what is left of an epoch: hidden rows, batches, weights, refresh. Collective.

        Args:
            position: The epoch, and its segments.
            scores: Of this replica's sampling group.
            sample_id: Returns int64[rows of the sampling group], where a policy asks, rows cost
                differently, or some are left out for good.
            num_epochs: Length of the whole run, None where nobody said.
            before: Figures of what the policy chose for the epoch before; empty: not known.
            restored: What the epoch was found to hide before; None: the policy selects.
            seen: int64[rows of the sampling group]: How often each was trained in ended segments of
                the epoch.

        Returns:
            The epoch's batches, and those of the hidden rows that get a new score.

        Raises:
            ValueError: If a policy with score columns lets rows come several times.
        """
        sampling, epoch = self._sampling, position.epoch
        excluded = self._exclusion.flags(sample_id()) if self._exclusion is not None else None
        selection = restored
        if selection is None:
            selection = self._select(
                epoch, scores, sample_id, excluded, num_epochs=num_epochs, before=before
            )
        elif excluded is not None:  # another list may be given than when it was saved
            selection = without_excluded(selection, excluded, seen)
        counts = Counts(sampling.sizes, sampling.sizes)
        if self._importance is not None or position.ended or excluded is not None:
            mine = np.array(count_rows(sampling, selection, seen, excluded))
            counts = Counts(*self._count(mine, "count visible rows").T)
        plan = plan_epoch(
            sampling,
            selection,
            counts,
            stream=sampling.stream(self._seed, "order", epoch=epoch),
            batch_size=self._batch_size,
            seen=seen,
            drop_last=self._drop_last,
            groups=groups_of(sampling, seed=self._seed) if position.running.grouped else None,
            costs=None if self._costs is None else self._costs[sample_id()],
            excluded=excluded,
        )
        if plan.selection.counts is not None or plan.excluded is not None:
            self._warn_of_uneven(plan, epoch)
        return plan, self._deal_refresh(plan, epoch)

    def _warn_of_uneven(self, plan: EpochPlan, epoch: int) -> None:
        """Log once if some replicas have far more rows than others."""
        draws = plan.selection.counts is not None
        if self._has_warned or self._world.rank:
            return
        even = deal(int(plan.dealt.sum()), len(plan.dealt))
        steps, least = (num_steps(rows, self._batch_size) for rows in (plan.dealt, even))
        if steps <= MOST_STEPS * least:
            return
        self._has_warned = True
        why = "the rows of its node come more often" if draws else "other nodes' rows are excluded"
        cure = (
            'draw on each node by itself, Weighted(..., over="pool")'
            if draws
            else "by one that moves rows, such as Partial(0.1), which evens it out"
        )
        log.warning(
            "[rank 0] epoch %d: one rank has rows for %d steps where an even share is %d, as "
            "%s, and other ranks' batches are padding (with drop_last, its rows are left out): "
            "shuffle with Global(), or %s",
            epoch, steps, least, why, cure,
        )  # fmt: skip

    def _select(
        self,
        epoch: int,
        scores: Scores,
        sample_id: Callable[[], NDArray[np.int64]],
        excluded: NDArray[np.bool_] | None,
        *,
        num_epochs: int | None,
        before: Mapping[str, float],
    ) -> Selection:
        if self._importance is None:
            return Selection()
        rows = Candidates(
            scores,
            sample_id(),
            int(self._sampling.sizes.sum()),
            key(self._seed, "importance", epoch=epoch),
            self._total,
            self._by_field,
            before,
        )
        rates: dict[str, float] = {}
        policy = self._importance
        if self._meter is not None and isinstance(policy, ByCost) and policy.by_cost:
            rows, rates = self._priced(rows, self._meter)
        if self._exclusion is not None and excluded is not None:
            kept = np.flatnonzero(~excluded)
            rows = replace(
                rows.of(kept), num_samples=self._exclusion.num_left, exclusion=self._exclusion
            )
        selection = self._importance.select(rows, epoch=epoch, num_epochs=num_epochs)
        if rates:  # among the figures they are saved, and a run that goes on begins with them
            selection = replace(selection, figures={**rates, **selection.figures})
        if selection.note and not self._world.rank:
            log.warning("[rank 0] epoch %d: importance: %s", epoch, selection.note)
        if selection.counts is not None and self._importance.columns:
            raise ValueError(
                f"importance: {self._importance} lets rows come several times and has the score "
                f"columns {', '.join(self._importance.columns)}, expected none, as several ranks "
                "would report of one row; give it no columns, or no counts"
            )
        if excluded is not None:
            return spread_selection(selection, kept, num_rows=len(excluded))
        return selection

    def _priced(self, rows: Candidates, meter: CostMeter) -> tuple[Candidates, dict[str, float]]:
        """Find what rows cost, the same on all ranks of a sampling group. Collective."""
        world = self._world
        spent = world.allreduce(
            meter.spent().to_array(), op="sum", doing="add up what rows have cost"
        )
        rates = find_rates(spent, batch_size=self._batch_size, before=rows.before)
        num_bytes, is_missing = meter.row_bytes()
        if len(self._sampling.sizes) == 1:
            # All ranks choose among the same rows, of which each node may hold others: as the first
            shared = self._total(num_bytes << 1 | is_missing)
            num_bytes, is_missing = shared >> 1, (shared & 1).astype(np.bool_)
        known = np.array([num_bytes.sum(), np.count_nonzero(num_bytes)])
        whole, num_known = self._total(known).tolist()
        mean = whole // max(num_known, 1)
        cost_s = price_rows(num_bytes, is_missing, rates=rates, mean_bytes=mean)
        return replace(rows, cost_s=cost_s), rates.to_figures()

    def _total(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add the numbers of all sampling groups; one rank sends those of each. Collective."""
        sends = self._world.rank == self._world.rank_of_replica(self._sampling.leader)
        mine = values if sends else np.zeros_like(values)
        return self._world.allreduce(mine, op="sum", doing="agree on the rows to hide")

    def _deal_refresh(self, plan: EpochPlan, epoch: int) -> Order:
        sampling, hidden = self._sampling, plan.selection.hidden
        due, most = hidden[:0], 0
        if self._importance is not None:
            due = np.sort(self._importance.due(hidden, epoch=epoch))
            num_due = np.array([-(-len(due) // sampling.replicas[sampling.mine])])
            most = int(self._count(num_due, "count rows to refresh").max())
        # Where all of a group's rows are left out there is none to show
        filler = 0 if plan.excluded is None else int(np.argmin(plan.excluded))
        return plan_refresh(sampling, due, most, batch_size=self._batch_size, filler=filler)

    def _count(self, mine: NDArray[np.int64], doing: str) -> NDArray[np.int64]:
        """int64[num_sampling_groups, len(mine)]: The numbers of every sampling group. Collective.

        Also the point that no rank passes, to report again, before all have read the scores.
        """
        everyone = self._world.allgather_array(mine, doing=doing)
        return everyone[[self._world.rank_of_replica(int(r)) for r in self._sampling.leaders]]
