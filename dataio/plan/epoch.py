"""Decide an epoch: from what a policy selected and the rows that groups show, to batches.

Pure. Every rank calls it with the same counts and gets the same number of steps.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import Key, key
from dataio.plan.layout import Layout
from dataio.plan.order import (
    Groups,
    Order,
    StepsBlock,
    deal,
    deal_all,
    num_steps,
    top_up,
    valid_rows,
)
from dataio.plan.policies import Selection


@dataclass(frozen=True)
class SamplingGroups:
    """All sampling groups of a job, and this replica's place.

    Attributes:
        sizes: int64[num_sampling_groups]: Rows of each.
        replicas: Replicas that each is dealt to.
        mine: The sampling group that this replica is dealt from.
        place: Its place among that sampling group's replicas.
        leaders: int64[num_sampling_groups]: First replica of each sampling group.
    """

    sizes: NDArray[np.int64]
    replicas: tuple[int, ...]
    mine: int
    place: int
    leaders: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Rows of this replica's sampling group."""
        return int(self.sizes[self.mine])

    @property
    def leader(self) -> int:
        """First replica of this replica's sampling group."""
        return int(self.leaders[self.mine])

    def stream(self, seed: int, purpose: str, *, epoch: int | None = None) -> Key:
        """Derive the key of what this replica's sampling group draws, whatever its replicas."""
        return key(seed, purpose, epoch=epoch, node=self.mine)


def find_sampling_groups(layout: Layout, *, replica: int, holds_all: bool) -> SamplingGroups:
    """One sampling group a node, its pool; or one for all, where every node holds all rows."""
    if holds_all:
        sizes, leaders = np.array([layout.num_samples]), np.zeros(1, np.int64)
        return SamplingGroups(sizes, (layout.num_replicas,), 0, replica, leaders)
    node, leaders = layout.node_of(replica), layout.first_replica[:-1]
    return SamplingGroups(
        layout.pool_sizes, layout.replicas, node, replica - int(leaders[node]), leaders
    )


@dataclass(frozen=True)
class EpochPlan:
    """What this replica trains in an epoch.

    Attributes:
        selection: As the policy chose, less the hidden rows that top up the last steps.
        order: The batches.
        dealt: int64[num_replicas]: Rows that every replica of the job trains.
        num_hidden: Rows that all sampling groups hide, the same however they are dealt.
        excluded: bool[num_rows]: Rows of this sampling group that no epoch shows; None: none.
    """

    selection: Selection
    order: Order
    dealt: NDArray[np.int64]
    num_hidden: int = 0
    excluded: NDArray[np.bool_] | None = None

    def block(self, first_step: int, num_steps: int) -> StepsBlock:
        """Find rows and weights of some steps.

        Weights are scaled so that the mean over a batch, averaged over replicas, is the weighted
        mean over the valid rows of all replicas; padding weighs 0.
        """
        batch_size = self.order.batch_size
        slots, num_valid = self.order.block(first_step, num_steps)
        weight, repeat = np.ones(slots.shape, np.float32), None
        if self.selection.counts is not None:
            repeat = self.order.repeats(first_step, num_steps)
        if self.selection.weights is not None:
            weight = self.selection.weights[slots].astype(np.float32)
        if (first_step + num_steps) * batch_size > self._fewest:
            steps = np.arange(first_step, first_step + num_steps)
            valid = np.maximum(valid_rows(self.dealt, steps, batch_size), 1)
            weight *= (len(self.dealt) * batch_size / valid).astype(np.float32)[:, None]
            weight[np.arange(batch_size) >= num_valid[:, None]] = 0
        return StepsBlock(slots, num_valid, weight, repeat)

    @property
    def padded_fraction(self) -> float:
        """Share of the rows of all replicas' batches that are padding, in [0, 1]."""
        whole = len(self.dealt) * self.order.steps * self.order.batch_size
        trained = np.minimum(self.dealt, self.order.steps * self.order.batch_size)
        return 1 - int(trained.sum()) / whole if whole else 0.0

    @property
    def num_excluded(self) -> int:
        """Rows of this replica's sampling group that are left out for good."""
        return 0 if self.excluded is None else int(np.count_nonzero(self.excluded))

    @cached_property
    def _fewest(self) -> int:
        return int(self.dealt.min())


def plan_epoch(
    sampling: SamplingGroups,
    selection: Selection,
    counts: "Counts",
    *,
    stream: Key,
    batch_size: int,
    seen: NDArray[np.int64] | None = None,
    drop_last: bool = False,
    groups: Groups | None = None,
    costs: NDArray[np.uint8] | None = None,
    excluded: NDArray[np.bool_] | None = None,
    dealt: tuple[NDArray[np.int64], int] | None = None,
) -> EpochPlan:
    """Order the visible rows of this replica's sampling group in as many steps as any needs.

    Args:
        sampling: All sampling groups.
        selection: Of this replica's sampling group.
        counts: Of all sampling, as `count_rows` counted each.
        stream: Key of the sampling group's order in this epoch.
        batch_size: Rows a batch.
        seen: int64[num_rows]: How often each row was trained in this epoch before the layout or the
            batch size changed; that often it does not come again.
        drop_last: Leave out the steps that not every replica can fill.
        groups: In which the rows come in, while they are staged.
        costs: uint8[num_rows]: What each row costs, where batches are to cost alike.
        excluded: bool[num_rows]: Rows that no epoch shows, none of which is hidden, or comes by
            ``selection.counts``.
        dealt: int64[num_replicas]: What `deal_all` makes of the rows shown, and `num_steps` of
            that, where they are known.
    """
    shown = counts.visible
    if selection.top_up:
        shown = top_up(shown, counts.unseen, sampling.replicas, batch_size=batch_size)
    mine = int(shown[sampling.mine])
    hidden = selection.hidden[: int(counts.unseen[sampling.mine]) - mine]
    visible: NDArray[np.int64] | range = range(sampling.num_rows)
    if selection.counts is not None:
        left = selection.counts if seen is None else selection.counts - seen
        visible = np.repeat(np.arange(sampling.num_rows), left)
    elif len(hidden) or seen is not None:
        is_left = np.ones(sampling.num_rows, np.bool_) if seen is None else seen == 0
        is_left[hidden] = False
        visible = np.flatnonzero(is_left)
    taken_out = None
    if excluded is not None and selection.counts is None:
        taken_out = excluded[np.asarray(visible)]
    if dealt is None:
        rows = deal_all(shown, sampling.replicas)
        dealt = rows, num_steps(rows, batch_size, drop_last=drop_last)
    order = Order(
        visible,
        stream,
        deal(mine, sampling.replicas[sampling.mine]),
        sampling.place,
        batch_size,
        dealt[1],
        groups,
        None if costs is None else costs[np.asarray(visible)],
        taken_out,
    )
    num_hidden = 0 if counts.unseen is shown else int((counts.unseen - shown).sum())
    return EpochPlan(replace(selection, hidden=hidden), order, dealt[0], num_hidden, excluded)


@dataclass(frozen=True)
class Counts:
    """Rows of all sampling groups in an epoch.

    Attributes:
        unseen: int64[num_sampling_groups]: Not trained before the layout or the batch size changed,
            nor left out for good; each as often as it still comes, a hidden one once.
        visible: int64[num_sampling_groups]: Of these, the ones that the selections left.
    """

    unseen: NDArray[np.int64]
    visible: NDArray[np.int64]


def count_rows(
    sampling: SamplingGroups,
    selection: Selection,
    seen: NDArray[np.int64] | None,
    excluded: NDArray[np.bool_] | None = None,
) -> tuple[int, int]:
    """Count this replica's sampling group for `Counts`: unseen rows, visible rows."""
    num_seen = 0 if seen is None else int(seen.sum())
    if selection.counts is not None:
        visible = int(selection.counts.sum()) - num_seen
        return visible + len(selection.hidden), visible
    unseen = sampling.num_rows - num_seen
    if excluded is not None:
        unseen -= int(np.count_nonzero(excluded if seen is None else excluded & (seen == 0)))
    return unseen, unseen - len(selection.hidden)


def spread_selection(selection: Selection, kept: NDArray[np.int64], *, num_rows: int) -> Selection:
    """Say of a whole sampling group what a policy selected among the rows that are not left out.

    Args:
        selection: Of those rows.
        kept: int64[num_kept]: Their slots.
        num_rows: Of the sampling group.
    """
    weights, counts, hidden = None, None, kept[selection.hidden]
    if selection.weights is not None:
        weights = np.ones(num_rows, np.float32)
        weights[kept] = selection.weights
    if selection.counts is not None:
        counts = np.zeros(num_rows, np.int64)
        counts[kept] = selection.counts
        hidden = np.flatnonzero(counts == 0)
    return replace(selection, hidden=hidden, weights=weights, counts=counts)


def without_excluded(
    selection: Selection, excluded: NDArray[np.bool_], seen: NDArray[np.int64] | None
) -> Selection:
    """Take rows out of what an epoch was found to hide, or to draw, before they were left out.

    Args:
        selection: Of a sampling group.
        excluded: bool[num_rows]: Rows that no epoch shows from now on.
        seen: int64[num_rows]: How often each was trained in the epoch.
    """
    if selection.counts is None:
        return replace(selection, hidden=selection.hidden[~excluded[selection.hidden]])
    counts = np.where(excluded, 0 if seen is None else seen, selection.counts)
    return replace(selection, hidden=np.flatnonzero(counts == 0), counts=counts)


def plan_refresh(
    sampling: SamplingGroups,
    due: NDArray[np.int64],
    most_rows: int,
    *,
    batch_size: int,
    filler: int = 0,
) -> Order:
    """Order the hidden rows that get a new score.

    Args:
        sampling: All sampling groups.
        due: int64[n]: Slots of this replica's sampling group, ascending.
        most_rows: Rows of the replica that has the most to refresh, over all sampling.
        batch_size: Rows a batch.
        filler: Slot that padding shows where there is nothing to refresh.
    """
    dealt = deal(len(due), sampling.replicas[sampling.mine])
    steps = num_steps(np.array([most_rows]), batch_size)
    if not len(due):
        due = np.array([filler])
    return Order(due, None, dealt, sampling.place, batch_size, steps)
