"""From a log's attempts to rows: what was trained at some steps, and when a sample was. Pure.

An attempt's epoch is planned again by the functions that planned it, of one sampling group or of
all; what a sampling group's replicas train in a step is one run of its shuffled rows.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import StateError
from dataio.plan.epoch import (
    Counts,
    find_sampling_groups,
    plan_epoch,
)
from dataio.plan.exclusion import Exclusion
from dataio.plan.layout import Layout
from dataio.plan.order import StepsBlock, deal_all, num_steps
from dataio.plan.placement import samples_in
from dataio.plan.policies import Following, Selection, Shuffle
from dataio.plan.replay import groups_of
from dataio.plan.segment import Segment
from dataio.rowlog.all_groups import is_plain, plain_rows
from dataio.rowlog.attempts import Attempt, AttemptSteps, Course
from dataio.rowlog.packed import unpack_shown
from dataio.rowlog.trained import TrainedGroup, TrainedRows, joined

State = Literal["trained", "hidden", "excluded", "left out", "not reached", "skipped", "unreadable"]
"""What became of a sample in an epoch: ``skipped``: its step was passed over; ``unreadable``: its
row did not decode and was padding, by ``on_error="skip"``; ``left out``: the epoch ended, and
with drop_last its step was one that not every replica fills; ``not reached``: the epoch was left
before its step."""


class Kept(Protocol):
    """What a log keeps beside its attempts."""

    def selection(self, attempt: Attempt, node: int) -> Selection:
        """Find what an attempt's epoch selected of a node's sampling group."""
        ...

    def exclusion(self, name: str, num_samples: int) -> Exclusion:
        """Find a list of samples that were left out for good."""
        ...

    def costs(self, name: str) -> NDArray[np.uint8] | None:
        """Find what rows cost; None: alike."""
        ...


class Fates(NamedTuple):
    """What became of samples in a piece.

    Attributes:
        states: Of each; None: it was trained earlier in the epoch, or the dataset had yet to grow
            to it.
        rows: Those that were trained in it, or skipped.
    """

    states: list[State | None]
    rows: TrainedRows


class BatchRows(NamedTuple):
    """One replica's batch.

    Attributes:
        epoch: Its epoch.
        step: Of the segment, as the loader counted it.
        replica: Whose it is.
        block: Its slots and weights: of one step.
        sample_id: int64[batch]: The samples of its slots.
        exclusion: What was left out for good.
    """

    epoch: int
    step: int
    replica: int
    block: StepsBlock
    sample_id: NDArray[np.int64]
    exclusion: Exclusion


class Answers:
    """Answers what was trained when.

    Args:
        course: The steps in question.
        kept: What the log keeps beside them.
        shuffle: The policy of the run.
    """

    def __init__(self, course: Course, kept: Kept, shuffle: Shuffle) -> None:
        self.course = course
        self._kept = kept
        self._shuffle = shuffle
        self._attempts = {attempt.number: attempt for attempt in course.attempts}
        self._last_layout: tuple[Segment, Layout] | None = None
        self._last_dealt: tuple[Layout, str | None, NDArray[np.int64], int] | None = None
        self._last_steps: tuple[NDArray[np.int64], int, bool, int] | None = None
        self._scales: dict[tuple[int, int], np.float32] = {}
        self._found: _FoundHomes | None = None
        self._exclusion = lru_cache(4)(kept.exclusion)
        self._seen = lru_cache(2)(self._find_seen)
        self._shown = lru_cache(2)(unpack_shown)
        self._costs = lru_cache(1)(kept.costs)

    def at(
        self, piece: AttemptSteps, steps: range, *, nodes: Iterable[int] | None = None
    ) -> TrainedRows:
        """Find all rows of some steps of a piece's segment, step by step, skipped ones too.

        Args:
            piece: Which.
            steps: Among its own.
            nodes: Of these sampling groups alone; None: all.
        """
        attempt = piece.attempt
        layout = self._layout(attempt)
        if nodes is None and is_plain(attempt):
            dealt, _ = self._dealt(layout, None, layout.pool_sizes, layout.replicas)
            rows = plain_rows(attempt, layout, steps, dealt)
            ids = self._samples(attempt, layout, rows.node, rows.slot)
            return _as_delivered(piece, rows._replace(sample_id=ids))
        count = 1 if attempt.setup.holds_all else layout.num_nodes
        found = []
        for node in range(count) if nodes is None else nodes:
            group = self.group(attempt, node)
            found.append(group.at(group.places(steps)))
        rows = joined(found)
        rows = rows._replace(sample_id=self._samples(attempt, layout, rows.node, rows.slot))
        order = np.lexsort((rows.position, rows.replica, rows.step))
        return _as_delivered(piece, TrainedRows._make(column[order] for column in rows))

    def of(self, piece: AttemptSteps, sample_id: NDArray[np.int64]) -> Fates:
        """Find what became of samples in a piece.

        Args:
            piece: Which.
            sample_id: int64[n]: Distinct.
        """
        attempt = piece.attempt
        layout, name = self._layout(attempt), attempt.position.running.excluded
        states: list[State | None] = [None] * len(sample_id)
        there = np.flatnonzero(sample_id < layout.num_samples)
        if name:
            gone = self._exclusion(name, layout.num_samples).flags(sample_id[there])
            for number in there[gone].tolist():
                states[number] = "excluded"
            there = there[~gone]
        nodes, slots = self._find(attempt, layout, sample_id[there])
        found = []
        for node in np.unique(nodes).tolist():
            here = np.flatnonzero(nodes == node)
            group = self.group(attempt, node)
            order = group.plan.order
            places, which = order.places_of(slots[here])
            step = places // (len(order.dealt) * order.batch_size)
            inside = (step >= piece.steps.start) & (step < piece.steps.stop)
            rows = group.at(places[inside], sample_id[there[here[which[inside]]]])
            found.append(rows)
            ended = piece.steps.stop >= order.steps
            beyond: State = "left out" if ended else "not reached"
            for number in which[step >= piece.steps.stop].tolist():
                states[there[here[number]]] = beyond
            skipped = attempt.skips(step)
            for number in which[inside & skipped].tolist():
                states[there[here[number]]] = "skipped"
            for number in which[inside & ~skipped].tolist():
                states[there[here[number]]] = "trained"
            padded = attempt.pads(step[inside], rows.replica, rows.position)
            for number in which[inside][padded & ~skipped[inside]].tolist():
                states[there[here[number]]] = "unreadable"
            hidden = group.plan.selection.hidden
            if len(hidden):
                for number in np.flatnonzero(np.isin(slots[here], hidden)).tolist():
                    states[there[here[number]]] = "hidden"
        return Fates(states, _as_delivered(piece, joined(found)))

    def batch(self, piece: AttemptSteps, epoch_step: int, *, replica: int) -> BatchRows:
        """Find a replica's batch as it was, padding included.

        Args:
            piece: Which.
            epoch_step: One of its own, counted from the epoch's first.
            replica: Whose.

        Raises:
            ValueError: If there was no such replica.
        """
        attempt = piece.attempt
        layout = self._layout(attempt)
        if not 0 <= replica < layout.num_replicas:
            raise ValueError(
                f"replica is {replica}, expected one in [0, {layout.num_replicas}), as many as "
                f"trained step {epoch_step} of epoch {attempt.epoch}; give one of these"
            )
        node = 0 if attempt.setup.holds_all else layout.node_of(replica)
        group = self.group(attempt, node)
        order = replace(group.plan.order, place=replica - group.sampling.leader)
        step = epoch_step - piece.epoch_steps.start + piece.steps.start
        block = replace(group.plan, order=order).block(step, 1)
        slots = block.slots[0]
        ids = self._samples(attempt, layout, np.full(len(slots), node), slots)
        gone = self._exclusion(attempt.position.running.excluded, layout.num_samples)
        return BatchRows(attempt.epoch, step, replica, block, ids, gone)

    def group(self, attempt: Attempt, node: int) -> TrainedGroup:
        """Plan a sampling group's epoch again as an attempt had it."""
        setup, segment = attempt.setup, attempt.position.running
        layout = self._layout(attempt)
        leader = 0 if setup.holds_all else int(layout.first_replica[node])
        sampling = find_sampling_groups(layout, replica=leader, holds_all=setup.holds_all)
        selection = self._kept.selection(attempt, node)
        shown = self._shown(attempt.shown) if attempt.shown is not None else sampling.sizes
        unseen = shown
        if len(selection.hidden):
            unseen = shown.copy()
            unseen[node] += len(selection.hidden)
        ids = None
        seen = excluded = costs = None
        if attempt.position.ended or segment.excluded or setup.costs:
            ids = self._group_samples(attempt, layout, node)
        if ids is not None and attempt.position.ended:
            seen = self._seen(attempt.number)[ids]
            seen = seen if seen.any() else None
        if ids is not None and segment.excluded:
            excluded = self._exclusion(segment.excluded, layout.num_samples).flags(ids)
        if ids is not None and setup.costs and (known := self._costs(setup.costs)) is not None:
            costs = known[ids]
        dealt, fewest = self._dealt(layout, attempt.shown, shown, sampling.replicas)
        steps = self._num_steps(dealt, segment.batch_size, drop_last=setup.drop_last)
        plan = plan_epoch(
            sampling, selection, Counts(unseen, shown),
            stream=sampling.stream(setup.seed, "order", epoch=attempt.epoch),
            batch_size=segment.batch_size, seen=seen, drop_last=setup.drop_last,
            groups=groups_of(sampling, seed=setup.seed) if segment.grouped else None,
            costs=costs, excluded=excluded, dealt=(dealt, steps),
        )  # fmt: skip
        return TrainedGroup(attempt, layout, sampling, plan, fewest, self._scales)

    def _dealt(
        self, layout: Layout, name: str | None, shown: NDArray[np.int64], replicas: tuple[int, ...]
    ) -> tuple[NDArray[np.int64], int]:
        """int64[num_replicas]: Rows that each is dealt, one array while nothing changes; least."""
        known = self._last_dealt
        if known is None or known[0] is not layout or known[1] != name:
            dealt = deal_all(shown, replicas)
            known = self._last_dealt = layout, name, dealt, int(dealt.min())
            self._scales = {}
        return known[2], known[3]

    def _num_steps(self, dealt: NDArray[np.int64], batch_size: int, *, drop_last: bool) -> int:
        known = self._last_steps
        if known is None or known[0] is not dealt or known[1:3] != (batch_size, drop_last):
            steps = num_steps(dealt, batch_size, drop_last=drop_last)
            known = self._last_steps = dealt, batch_size, drop_last, steps
        return known[3]

    def _find_seen(self, number: int) -> NDArray[np.int64]:
        """int64[num_samples]: How often the ended segments of an attempt's epoch trained each."""
        attempt = self._attempts[number]
        total = attempt.position.running.layout(attempt.setup.num_samples).num_samples
        seen = np.zeros(total, np.int64)
        for count, segment in enumerate(attempt.position.ended, 1):
            earlier = self._of_segment(attempt, count)
            layout = self._layout(earlier)
            for node in range(1 if attempt.setup.holds_all else layout.num_nodes):
                group = self.group(earlier, node)
                places = group.places(range(segment.steps))
                slots = group.plan.order.slots_in_run(places) if len(places) else places
                nodes = np.full(len(slots), node)
                np.add.at(seen, self._samples(earlier, layout, nodes, slots), 1)
        return seen

    def _of_segment(self, attempt: Attempt, count: int) -> Attempt:
        """Find the attempt that trained an epoch's segment before this one's, as it ended."""
        before = attempt
        while before.after is not None and before.after[0] in self._attempts:
            before = self._attempts[before.after[0]]
            if before.epoch != attempt.epoch:
                break
            if len(before.position.segments) == count:
                return before
        raise StateError(
            f"epoch {attempt.epoch} was begun on other ranks, or with another batch size, by what "
            "is in no log of rows, expected all of the epoch; ask for an epoch that was begun with "
            "the log"
        )

    def _layout(self, attempt: Attempt) -> Layout:
        """Return the layout of an attempt, the same one where it has not changed."""
        segment, num_samples = attempt.position.running, attempt.setup.num_samples
        if self._last_layout is not None:
            last, layout = self._last_layout
            if (last.replicas, last.grown) == (segment.replicas, segment.grown):
                return layout
        layout = segment.layout(num_samples)
        self._last_layout = segment, layout
        return layout

    def _group_samples(self, attempt: Attempt, layout: Layout, node: int) -> NDArray[np.int64]:
        if attempt.setup.holds_all:
            return np.arange(layout.num_samples)
        return samples_in(
            self._shuffle, layout, node=node, epoch=attempt.epoch, seed=attempt.setup.seed,
            first_epoch=attempt.position.running.first_epoch,
        )  # fmt: skip

    def _samples(
        self, attempt: Attempt, layout: Layout, node: NDArray[np.int64], slot: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """int64[n]: The samples that slots of nodes held in an attempt's epoch."""
        if attempt.setup.holds_all:
            return slot
        if layout.earlier:
            found = np.empty_like(slot)
            for each in np.unique(node).tolist():
                here = node == each
                found[here] = self._group_samples(attempt, layout, each)[slot[here]]
            return found
        return self._shuffle.trace(
            layout, layout.pool_starts[node] + slot, epoch=attempt.epoch, seed=attempt.setup.seed,
            first_epoch=attempt.position.running.first_epoch,
        )  # fmt: skip

    def _find(
        self, attempt: Attempt, layout: Layout, sample_id: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """int64[n], int64[n]: The nodes and slots that held samples in an attempt's epoch."""
        if attempt.setup.holds_all:
            return np.zeros_like(sample_id), sample_id
        if not layout.earlier and isinstance(self._shuffle, Following):
            homes = self._follow(self._shuffle, attempt, layout, sample_id)
            nodes = np.searchsorted(layout.pool_starts, homes, side="right") - 1
            return nodes, homes - layout.pool_starts[nodes]
        node, slot = np.empty_like(sample_id), np.empty_like(sample_id)
        for each in range(layout.num_nodes):
            held = self._group_samples(attempt, layout, each)
            order = np.argsort(held, kind="stable")
            place = np.minimum(np.searchsorted(held, sample_id, sorter=order), len(held) - 1)
            here = np.flatnonzero(held[order[place]] == sample_id)
            node[here], slot[here] = each, order[place[here]]
        return node, slot

    def _follow(
        self, shuffle: Following, attempt: Attempt, layout: Layout, sample_id: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """int64[n]: The homes of samples, followed on from where they were found last."""
        first_epoch, seed = attempt.position.running.first_epoch, attempt.setup.seed
        known = (sample_id.tobytes(), first_epoch, seed)
        epoch, homes = first_epoch, sample_id
        last = self._found
        same = last is not None and last.layout is layout and last.of == known
        if last is not None and same and last.epoch <= attempt.epoch:
            epoch, homes = last.epoch, last.homes
        for past in range(epoch, attempt.epoch):
            homes = shuffle.follow(layout, homes, epoch=past, seed=seed, first_epoch=first_epoch)
        self._found = _FoundHomes(layout, known, attempt.epoch, homes)
        return homes


class _FoundHomes(NamedTuple):
    """Where samples were found last: their homes in an epoch."""

    layout: Layout
    of: tuple[bytes, int, int]
    epoch: int
    homes: NDArray[np.int64]


def _as_delivered(piece: AttemptSteps, rows: TrainedRows) -> TrainedRows:
    """Give the rows that became padding the weight of padding."""
    if not piece.attempt.padded:
        return rows
    pads = piece.attempt.pads(piece.since(rows.step), rows.replica, rows.position)
    return rows._replace(weight=np.where(pads, np.float32(0), rows.weight))
