"""Visible slots -> batches of slots, equally many on every replica.

A *sampling group* is a set of rows dealt out together: a node's pool to the node's replicas, or,
where every node holds all rows, the dataset to all replicas. It is shuffled by one keyed
permutation and dealt row by row, to one replica after the other: what its replicas train together
in a step is the same run of the shuffled rows however many they are, if their batches together are
as large.

While a pool is still being staged its rows are shuffled group by group instead, in the order in
which these groups are staged: a function of the seed all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.base.permutation import permute, unpermute
from dataio.base.seeding import Key, key
from dataio.plan.balance import balance

PADDING = -1
"""``slot`` and ``sample_id`` of a batch's rows that only keep its shape."""

NUM_GROUPS = 16
"""Parts in which a pool is staged while training runs: the first batch waits for one of them."""


@dataclass(frozen=True)
class BatchSlots:
    """One batch of one replica.

    Attributes:
        slots: int64[batch]: Rows to read; padding repeats rows of the same replica.
        num_valid: The first this many are trained on; the rest is padding.
    """

    slots: NDArray[np.int64]
    num_valid: int


class StepsBlock(NamedTuple):
    """The batches of some steps of one replica.

    Attributes:
        slots: int64[steps, batch]: Rows to read; padding repeats rows of the same replica.
        num_valid: int64[steps]: The first this many of a batch are trained on.
        weight: float32[steps, batch]: As delivered, padding 0.
        repeat: int64[steps, batch]: Number of the row's occurrence in the epoch, from 0 on; None
            where each row comes once.
    """

    slots: NDArray[np.int64]
    num_valid: NDArray[np.int64]
    weight: NDArray[np.float32]
    repeat: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Order:
    """The batches of one replica in one epoch: any of them, in any order, as a function call.

    Attributes:
        visible: int64[num_visible]: Slots of the sampling group, ascending, each as often as it
            comes in the epoch; a range where each comes once, so that nothing grows with the pool.
        stream: Key of the sampling group's permutation in this epoch; None keeps slot order.
        dealt: int64[replicas of the sampling group]: Rows that each of them gets.
        place: This replica's place among them.
        batch_size: Rows a batch.
        steps: Batches of the epoch, the same on every replica of the job.
        groups: Runs of slots that are trained one after the other; None shuffles all as one.
        costs: uint8[num_visible]: What each row costs, where batches are to cost alike.
        excluded: bool[num_visible]: Rows that are shuffled with the others and then taken out, so
            that these keep their order; None: none. ``dealt`` does not count them.
    """

    visible: NDArray[np.int64] | range
    stream: Key | None
    dealt: NDArray[np.int64]
    place: int
    batch_size: int
    steps: int
    groups: "Groups | None" = None
    costs: NDArray[np.uint8] | None = None
    excluded: NDArray[np.bool_] | None = None

    @cached_property
    def num_rows(self) -> int:
        """Rows that this replica trains on in the epoch."""
        return int(self.dealt[self.place])

    def num_valid(self, step: int) -> int:
        """Count the rows of a step's batch that are no padding."""
        return min(max(self.num_rows - step * self.batch_size, 0), self.batch_size)

    def batch(self, step: int) -> BatchSlots:
        """Find the rows of one step.

        Args:
            step: In [0, steps).
        """
        slots, num_valid = self.block(step, 1)
        return BatchSlots(slots[0], int(num_valid[0]))

    def block(self, first_step: int, num_steps: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the rows of some steps at once, which costs little more than those of one.

        Returns:
            Slots int64[num_steps, batch]; num_valid int64[num_steps]: the first rows of a batch
            that are no padding.
        """
        left = self.num_rows - self.batch_size * np.arange(first_step, first_step + num_steps)
        slots = self.slots_at(self._places(first_step, num_steps))
        return slots.reshape(num_steps, self.batch_size), np.clip(left, 0, self.batch_size)

    def repeats(self, first_step: int, num_steps: int) -> NDArray[np.int64]:
        """Number the occurrences of the rows of some steps: int64[num_steps, batch], from 0 on."""
        places = self._places(first_step, num_steps)
        if self.num_rows == 0:
            return np.zeros((num_steps, self.batch_size), np.int64)
        index = self._visible_at(self._own(places))
        repeat = index - np.searchsorted(self.visible, np.asarray(self.visible)[index])
        return repeat.reshape(num_steps, self.batch_size)

    def _places(self, first_step: int, num_steps: int) -> NDArray[np.int64]:
        """int64[num_steps * batch]: Places in the replica's run; past its end it starts over."""
        start, stop = first_step * self.batch_size, (first_step + num_steps) * self.batch_size
        places = np.arange(start, stop)
        return places % max(self.num_rows, 1) if stop > self.num_rows else places

    def even_block(self, first_step: int, num_steps: int) -> StepsBlock:
        """Find the rows of some steps, each of weight 1; padding weighs 0."""
        slots, num_valid = self.block(first_step, num_steps)
        weight = (np.arange(self.batch_size) < num_valid[:, None]).astype(np.float32)
        return StepsBlock(slots, num_valid, weight)

    def slots_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots at some places of this replica's run, each in [0, num_rows)."""
        if self.num_rows == 0:
            if self.excluded is not None and len(self._whole):
                # Padding is read too, and a row may be left out because it cannot be
                return self.slots_in_run(np.zeros(len(places), np.int64))
            return np.full(len(places), self.visible[0] if len(self.visible) else 0)
        return self.slots_in_run(self._own(places))

    def slots_in_run(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots at some places of the sampling group's run, each in [0, rows of the run)."""
        index = self._visible_at(index)
        if isinstance(self.visible, range):
            return index + self.visible.start
        return self.visible[index]

    def places_of(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find where in the sampling group's run some slots stand: the inverse of `slots_in_run`.

        Time and memory of ``slots`` alone, but where rows are left out, cost differently or are
        staged in groups.

        Returns:
            int64[n]: Places. int64[n]: For each, the number of its slot in ``slots``; a slot that
            comes several times has several places, one that does not come has none.
        """
        if isinstance(self.visible, range):
            which = np.flatnonzero((slots >= self.visible.start) & (slots < self.visible.stop))
            index = slots[which] - self.visible.start
        else:
            first = np.searchsorted(self.visible, slots)
            count = np.searchsorted(self.visible, slots, side="right") - first
            which = np.repeat(np.arange(len(slots)), count)
            index = np.arange(len(which)) + np.repeat(first - np.cumsum(count) + count, count)
        if self.costs is None and self.excluded is None and self.groups is None:
            if self.stream is None or not len(index):
                return index, which
            return unpermute(index, len(self.visible), self.stream), which
        places = np.full(len(self.visible), -1)
        places[self._whole] = np.arange(len(self._whole))
        found = places[index]
        return found[found >= 0], which[found >= 0]

    def _own(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find where in the sampling group's run some places of this replica's are."""
        return places * len(self.dealt) + self.place

    def _visible_at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find which of the visible rows stand at some places of the sampling group's run."""
        if self.costs is None and self.excluded is None:
            return self._shuffled(index)
        return self._whole[index]

    def _shuffled(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.groups is not None:
            return self.groups.permute(index, self.visible)
        return index if self.stream is None else permute(index, len(self.visible), self.stream)

    @cached_property
    def _whole(self) -> NDArray[np.int64]:
        """int64[rows of the run]: The visible row at each place of the sampling group's run."""
        shuffled = self._shuffled(np.arange(len(self.visible)))
        # Of a group that is staged later, no row comes sooner.
        sizes = [len(self.visible)] if self.groups is None else self.groups.sizes(self.visible)
        runs = np.split(shuffled, np.cumsum(sizes)[:-1])
        if self.excluded is not None:
            runs = [run[~self.excluded[run]] for run in runs]
        if self.costs is not None:
            width, rows = len(self.dealt), self.batch_size
            runs = [balance(self.costs, run, num_replicas=width, batch_size=rows) for run in runs]
        return np.concatenate(runs)


@dataclass(frozen=True)
class Groups:
    """Runs of a sampling group's slots in the order in which epoch 0 stages them.

    Attributes:
        bounds: int64[num_groups, 2]: First slot of each run, and one past its last.
        stream: Key of the shuffles within the runs.
    """

    bounds: NDArray[np.int64]
    stream: Key

    def permute(
        self, index: NDArray[np.int64], visible: NDArray[np.int64] | range
    ) -> NDArray[np.int64]:
        """Find which visible row stands at each place: one group's after the other's."""
        firsts, sizes = self._cuts(visible)[:, 0], self.sizes(visible)
        ends = np.cumsum(sizes)
        group = np.searchsorted(ends, index, side="right")
        result = np.empty_like(index)
        for number in np.unique(group).tolist():
            here = group == number
            place = index[here] - (ends[number] - sizes[number])
            stream = key(self.stream, "group", step=number)
            result[here] = firsts[number] + permute(place, int(sizes[number]), stream)
        return result

    def sizes(self, visible: NDArray[np.int64] | range) -> NDArray[np.int64]:
        """Count the visible rows of each group: int64[num_groups]."""
        cuts = self._cuts(visible)
        counts: NDArray[np.int64] = cuts[:, 1] - cuts[:, 0]
        return counts

    def _cuts(self, visible: NDArray[np.int64] | range) -> NDArray[np.int64]:
        """int64[num_groups, 2]: The first visible row of each, and one past its last."""
        if isinstance(visible, range):
            return np.clip(self.bounds, visible.start, visible.stop) - visible.start
        return np.searchsorted(visible, self.bounds)


def stage_groups(num_slots: int, stream: Key, *, most: int = NUM_GROUPS) -> Groups:
    """Cut a sampling group into groups of as many slots, give or take one, in a keyed order."""
    count = max(min(most, num_slots), 1)
    bounds = np.arange(count + 1, dtype=np.int64) * num_slots // count
    order = permute(np.arange(count), count, stream)
    return Groups(np.stack([bounds[:-1], bounds[1:]], axis=1)[order], stream)


def deal(num_rows: int, num_replicas: int) -> NDArray[np.int64]:
    """Cut a sampling group evenly: int64[num_replicas], floor or ceil, the larger parts first."""
    quotient, remainder = divmod(num_rows, num_replicas)
    return quotient + (np.arange(num_replicas) < remainder).astype(np.int64)


def deal_all(num_rows: NDArray[np.int64], replicas: Sequence[int]) -> NDArray[np.int64]:
    """Cut all sampling groups evenly: int64[all replicas], each as `deal` would."""
    width = np.asarray(replicas, np.int64)
    quotient, remainder = num_rows // width, num_rows % width
    place = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
    return np.repeat(quotient, width) + (place < np.repeat(remainder, width))


def num_steps(dealt: NDArray[np.int64], batch_size: int, *, drop_last: bool = False) -> int:
    """Steps of an epoch: as many as the replica with the most rows needs.

    Args:
        dealt: int64[num_replicas]: Rows of every replica of the job.
        batch_size: Rows a batch.
        drop_last: Count only steps that every replica fills.
    """
    if drop_last:
        return int(dealt.min()) // batch_size
    return -(-int(dealt.max()) // batch_size)


def top_up(
    num_visible: NDArray[np.int64],
    num_owned: NDArray[np.int64],
    replicas: Sequence[int],
    *,
    batch_size: int,
) -> NDArray[np.int64]:
    """Count the rows that each group shows when all replicas fill the steps that any of them needs.

    Args:
        num_visible: int64[num_sampling_groups]: Rows that the policy left visible.
        num_owned: int64[num_sampling_groups]: Rows of the sampling.
        replicas: Replicas that each sampling group is dealt to.
        batch_size: Rows a batch.

    Returns:
        int64[num_sampling_groups]: At least ``num_visible``; as many more as fill the
        last steps, while there are any.
    """
    width = np.asarray(replicas, np.int64)
    steps = num_steps(-(-num_visible // width), batch_size)
    return np.minimum(num_owned, np.maximum(num_visible, steps * batch_size * width))


def valid_rows(
    dealt: NDArray[np.int64], step: int | NDArray[np.int64], batch_size: int
) -> NDArray[np.int64]:
    """Count the rows that all replicas together train on in a step, or in each of some.

    Args:
        dealt: int64[num_replicas]: Rows of every replica of the job.
        step: int64[...].
        batch_size: Rows a batch.
    """
    first = np.asarray(step)[..., None] * batch_size
    return np.asarray(np.clip(dealt - first, 0, batch_size).sum(axis=-1), np.int64)
