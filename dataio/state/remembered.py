"""What a rank knows of an epoch's rows, with which those that are left go on when ranks are lost.

As an epoch begins, all ranks get what each node's policy selected, in some bits a row. So any rank
that is left can say which rows a lost node had trained, and which it hid. Scores are with their
rows alone: those of a lost node are gone, and its rows go on as rows never scored.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import StateError
from dataio.plan.epoch import Counts, EpochPlan, SamplingGroups, plan_epoch
from dataio.plan.exclusion import Exclusion
from dataio.plan.history import Scores, unscored
from dataio.plan.policies import Selection
from dataio.plan.replay import groups_of, trained_slots
from dataio.plan.segment import Position
from dataio.rowlog.packed import pack_selection, unpack_selection
from dataio.state.report import Feedback
from dataio.state.snapshot import NodeSnapshot, Part, rows_of, share_samples
from dataio.world import World

Packed = tuple[bytes, bytes]
"""What a sampling group's epoch selected, and how often ended segments trained its rows; "" where
none has ended."""


@dataclass
class Remembered:
    """An epoch of a loader, from where it began or went on.

    Attributes:
        position: There.
        node: This rank's.
        sampling: All sampling groups, and this replica's place.
        plan: Its batches.
        seen: int64[num_rows]: How often ended segments trained each; None: none has ended.
        scores: scores[num_rows]: Of this rank's sampling group; its node's ranks write them.
        feedback: Has what was not written into them yet.
        others: Of all sampling groups; empty where there is one.
        sample_ids: Returns the samples of a sampling group, int64[num_rows], by its number.
        seed: The run's.
        drop_last: Whether steps that not every replica can fill are left out.
        costs: uint8[num_samples]: What each costs; None: alike.
        exclusion: What is left out for good.
        has_ended: Whether ``scores`` are a copy, from before its rows were moved or refreshed.
    """

    position: Position
    node: int
    sampling: SamplingGroups
    plan: EpochPlan
    seen: NDArray[np.int64] | None
    scores: Scores
    feedback: Feedback
    others: list[Packed]
    sample_ids: Callable[[int], NDArray[np.int64]]
    seed: int
    drop_last: bool
    costs: NDArray[np.uint8] | None
    exclusion: Exclusion
    has_ended: bool = False

    def is_at(self, position: Position) -> bool:
        """Whether a position is in the segment that runs."""
        begun = self.position.at(steps=position.running.steps, refresh_step=position.refresh_step)
        return begun == position

    def end(self) -> None:
        """Keep the scores, before rows are refreshed or moved, once all of a node have written."""
        if not self.has_ended:
            self.scores, self.has_ended = self.scores.copy(), True

    def settle(self, steps: int) -> None:
        """Write what was reported of rows that some steps trained, and forget the rest."""
        mine = self.of(self.sampling.mine, steps)
        now, counts = mine.now, mine.selection.counts
        most = now if counts is None else counts - mine.before
        self.feedback.settle(
            self.scores, mine.sample_id, now > 0, most > now,
            epoch=self.position.epoch, steps=steps,
        )  # fmt: skip

    def of(self, group: int, steps: int) -> NodeSnapshot:
        """Describe the rows of a sampling group behind some steps; others' have no scores."""
        plan, seen, scores = self.plan, self.seen, self.scores
        num_rows = int(self.sampling.sizes[group])
        if group != self.sampling.mine:
            plan, seen = self._plan_again(group)
            scores = unscored(num_rows, scores.dtype)
        before = np.zeros(num_rows, np.int64) if seen is None else seen
        now = np.bincount(trained_slots(plan.order, steps), minlength=num_rows)
        return NodeSnapshot(self.sample_ids(group), scores, plan.selection, before, now)

    def _plan_again(self, group: int) -> tuple[EpochPlan, NDArray[np.int64] | None]:
        """Plan another sampling group's epoch as that did."""
        segment, ids = self.position.running, self.sample_ids(group)
        sampling = replace(self.sampling, mine=group, place=0)
        selected, trained = self.others[group]
        seen = unpack_selection(trained).counts if trained else None
        found, weights = unpack_selection(selected), self.plan.selection.weights
        if weights is not None:  # they are not kept where no row is visible
            weights = np.ones(len(ids), np.float32) if found.weights is None else found.weights
        selection = replace(
            self.plan.selection, hidden=found.hidden, weights=weights, counts=found.counts
        )
        width = np.array(sampling.replicas, np.int64)
        shown = np.add.reduceat(self.plan.dealt, np.cumsum(width) - width)
        unseen = shown.copy()
        unseen[group] += len(selection.hidden)
        excluded = self.exclusion.flags(ids) if self.exclusion.num_excluded else None
        plan = plan_epoch(
            sampling, replace(selection, top_up=False), Counts(unseen, shown),
            stream=sampling.stream(self.seed, "order", epoch=self.position.epoch),
            batch_size=segment.batch_size, seen=seen, drop_last=self.drop_last,
            groups=groups_of(sampling, seed=self.seed) if segment.grouped else None,
            costs=None if self.costs is None else self.costs[ids], excluded=excluded,
            dealt=(self.plan.dealt, self.plan.order.steps),
        )  # fmt: skip
        return replace(plan, selection=selection), seen


def pack(selection: Selection, seen: NDArray[np.int64] | None, num_rows: int) -> Packed:
    """Make what other ranks are sent of a sampling group."""
    trained = b""
    if seen is not None:
        counted = Selection(np.flatnonzero(seen == 0), counts=seen)
        trained = pack_selection(counted, num_rows)
    return pack_selection(selection, num_rows), trained


def recall(
    remembered: Sequence[Remembered],
    position: Position,
    sample_id: NDArray[np.int64],
    dtype: np.dtype[np.void],
    *,
    world: World,
    num_samples: int,
    tag: int,
) -> NodeSnapshot:
    """Bring what the ranks that were there know of samples to those that go on. Collective.

    Args:
        remembered: By this rank, the newest last; empty of one that comes.
        position: Behind the last step that counts.
        sample_id: int64[num_slots]: The samples that this node has now, slot by slot.
        dtype: The score columns that are wanted.
        world: All ranks.
        num_samples: Of the dataset.
        tag: Of the messages.

    Raises:
        StateError: On all ranks, if none of them was there.
    """
    steps = position.running.steps
    mine = next((each for each in reversed(remembered) if each.is_at(position)), None)
    place: list[int] = []
    if mine is not None:
        mine.settle(steps)
        place = [mine.node, mine.sampling.mine, len(mine.sampling.sizes)]
    # No rank reads scores before all of its node have written theirs.
    said = world.allgather(json.dumps(place).encode(), doing="find who knows the rows")
    places = {rank: json.loads(each) for rank, each in enumerate(said) if json.loads(each)}
    if not places:
        raise StateError(
            f"live: no rank that is left knows which rows epoch {position.epoch} hides; start the "
            "same command again, from a checkpoint",
            on_all_ranks=True,
        )
    # The first rank of each node that was gives its rows; those of lost nodes, any.
    givers = {node: (rank, group) for rank, (node, group, _) in reversed(places.items())}
    num_groups = next(iter(places.values()))[2]
    lost = {*range(num_groups)} - {group for _, group in givers.values()}
    givers |= {node: (rank, node) for node, rank in zip(sorted(lost), itertools.cycle(places))}
    given = [
        (node, partial(_part, mine, group, steps))
        for node, (rank, group) in givers.items() if rank == world.rank
    ]  # fmt: skip
    num_laps = max(Counter(rank for rank, _ in givers.values()).values())
    return share_samples(
        given, sample_id, dtype, num_parts=max(givers) + 1, num_laps=num_laps, world=world,
        num_samples=num_samples, tag=tag,
    )  # fmt: skip


def _part(mine: Remembered | None, group: int, steps: int) -> Part:
    assert mine is not None, "who gives rows knows them"
    return rows_of(mine.of(group, steps))
