"""Which rows of an epoch were trained before: computed again, or read from what was saved."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.plan.epoch import Counts, SamplingGroups, find_sampling_groups, plan_epoch
from dataio.plan.exclusion import Exclusion
from dataio.plan.layout import Layout
from dataio.plan.order import Groups, Order, stage_groups
from dataio.plan.placement import samples_in
from dataio.plan.policies import Selection, Shuffle
from dataio.plan.segment import Segment
from dataio.world import World


def groups_of(sampling: SamplingGroups, *, seed: int) -> Groups:
    """Cut a sampling group into the groups in which it is staged while epoch 0 trains."""
    return stage_groups(sampling.num_rows, sampling.stream(seed, "stage"))


def trained_slots(order: Order, steps: int) -> NDArray[np.int64]:
    """Slots that all replicas of a sampling group trained in its first ``steps`` batches."""
    per_replica = np.minimum(order.dealt, steps * order.batch_size)
    width = len(order.dealt)
    runs = [np.arange(rows) * width + place for place, rows in enumerate(per_replica.tolist())]
    index = np.concatenate(runs)
    return order.slots_in_run(index) if len(index) else index


def trained_samples(
    segments: Sequence[Segment],
    *,
    num_samples: int,
    shuffle: Shuffle,
    seed: int,
    epoch: int,
    world: World,
    costs: NDArray[np.uint8] | None = None,
    exclusion: Exclusion | None = None,
) -> NDArray[np.bool_]:
    """Find the samples that segments of an epoch trained, every row visible. Collective.

    ``costs`` are those that `plan_epoch` had, uint8[num_samples]. ``exclusion`` is what segments
    that name a list left out.

    The sampling groups of a segment are shared out among the ranks; each sends all what it
    found.
    Memory: a byte a sample, and eight a sample trained.

    Returns:
        bool[num_samples].
    """
    seen = np.zeros(num_samples, np.bool_)
    for segment in segments:
        layout = segment.layout(num_samples)
        leaders = [0] if shuffle.holds_all else layout.first_replica[:-1].tolist()
        mine = []
        for leader in leaders[world.rank :: world.world_size]:
            sampling = find_sampling_groups(layout, replica=leader, holds_all=shuffle.holds_all)
            mine.append((sampling, _group_samples(layout, sampling, segment, shuffle, seed, epoch)))
        gone = [_left_out(ids, segment, exclusion) for _, ids in mine]
        unseen = np.array(
            [
                len(ids) - int(np.count_nonzero(seen[ids] if out is None else seen[ids] | out))
                for (_, ids), out in zip(mine, gone, strict=True)
            ],
            np.int64,
        )
        parts = world.allgather(unseen.tobytes(), doing="count the rows of an earlier layout")
        counts = np.empty(len(leaders), np.int64)
        for rank, part in enumerate(parts):
            counts[rank :: world.world_size] = np.frombuffer(part, np.int64)
        found = [
            _trained(sampling, ids, counts, segment, seed, epoch, seen, costs, out)
            for (sampling, ids), out in zip(mine, gone, strict=True)
        ]
        data = np.concatenate([np.empty(0, np.int64), *found]).tobytes()
        for part in world.allgather(data, doing="find the rows of an earlier layout"):
            seen[np.frombuffer(part, np.int64)] = True
    return seen


def _left_out(
    ids: NDArray[np.int64], segment: Segment, exclusion: Exclusion | None
) -> NDArray[np.bool_] | None:
    """bool[len(ids)]: Samples that a segment left out for good; None: none."""
    if not segment.excluded or exclusion is None:
        return None
    return exclusion.flags(ids)


def _group_samples(
    layout: Layout,
    sampling: SamplingGroups,
    segment: Segment,
    shuffle: Shuffle,
    seed: int,
    epoch: int,
) -> NDArray[np.int64]:
    if shuffle.holds_all:
        return np.arange(layout.num_samples, dtype=np.int64)
    return samples_in(
        shuffle,
        layout,
        node=sampling.mine,
        epoch=epoch,
        seed=seed,
        first_epoch=segment.first_epoch,
    )


def _trained(
    sampling: SamplingGroups,
    ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    segment: Segment,
    seed: int,
    epoch: int,
    seen: NDArray[np.bool_],
    costs: NDArray[np.uint8] | None,
    excluded: NDArray[np.bool_] | None,
) -> NDArray[np.int64]:
    before = seen[ids]
    plan = plan_epoch(
        sampling,
        Selection(),
        Counts(counts, counts),
        stream=sampling.stream(seed, "order", epoch=epoch),
        batch_size=segment.batch_size,
        seen=before.astype(np.int64) if before.any() else None,
        groups=groups_of(sampling, seed=seed) if segment.grouped else None,
        costs=None if costs is None else costs[ids],
        excluded=excluded,
    )
    return ids[trained_slots(plan.order, segment.steps)]
