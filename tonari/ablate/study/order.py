"""Which samples every replica trains in an epoch, computed for all of them in one process.

Calls what a loader calls, so that a study in one process trains the batches that a job of as many
ranks would.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.base.seeding import generator, key
from dataio.plan.epoch import (
    Counts,
    EpochPlan,
    SamplingGroups,
    count_rows,
    find_sampling_groups,
    plan_epoch,
)
from dataio.plan.layout import Layout
from dataio.plan.policies import Selection, Shuffle
from tonari.ablate.study.importance import Memory

Partition = str
"""``"sorted"`` or ``"random"``: how samples are numbered before they are dealt to the nodes."""


class EpochBatches(NamedTuple):
    """An epoch of all replicas.

    Attributes:
        sample_id: int64[steps, replicas, batch]: Padding repeats samples of the same replica.
        valid: bool[steps, replicas, batch]: False for padding.
        weight: float32[steps, replicas, batch]: 0 for padding.
        hidden: int64[num_hidden]: Samples that are left out.
        due: int64[num_due]: Those of them that get a new score at the epoch's end.
        lr_factor: What the learning rate is multiplied by.
        figures: What else the policy reports: sums over the groups, but for ``hidden_cap``.
    """

    sample_id: NDArray[np.int64]
    valid: NDArray[np.bool_]
    weight: NDArray[np.float32]
    hidden: NDArray[np.int64]
    due: NDArray[np.int64]
    lr_factor: float
    figures: Mapping[str, float]


def epoch_batches(
    shuffle: Shuffle,
    layout: Layout,
    *,
    seed: int,
    epoch: int,
    batch_size: int,
    memory: Memory | None = None,
    held: Sequence[NDArray[np.int64]] | None = None,
) -> EpochBatches:
    """Compute the batches that the replicas' loaders deliver in an epoch.

    Args:
        shuffle: The loaders' policy.
        layout: Replicas and samples.
        seed: The loaders' seed.
        epoch: Which one.
        batch_size: Rows a batch and replica.
        memory: The importance policy, and the scores after the epoch before; None: all rows.
        held: int64[rows of the group], for each sampling group: The samples in its slots, where
            `placed` was asked already.
    """
    places = [
        find_sampling_groups(layout, replica=replica, holds_all=shuffle.holds_all)
        for replica in range(layout.num_replicas)
    ]
    if held is None:
        held = placed(shuffle, layout, seed=seed, epoch=epoch)
    selections = [Selection() for _ in held]
    if memory is not None:
        selections = memory.select(held, seed=seed, epoch=epoch)
    plans = _plan(places, selections, seed=seed, epoch=epoch, batch_size=batch_size)
    blocks = [plan.block(0, plan.order.steps) for plan in plans]
    by_group = [plans[int(leader)].selection.hidden for leader in places[0].leaders]
    due = [slots[:0] for slots in by_group]
    if memory is not None:
        due = [memory.policy.due(slots, epoch=epoch) for slots in by_group]
    num_valid = np.stack([block.num_valid for block in blocks], axis=1)
    return EpochBatches(
        np.stack([held[p.mine][b.slots] for p, b in zip(places, blocks, strict=True)], axis=1),
        np.arange(batch_size) < num_valid[..., None],
        np.stack([block.weight for block in blocks], axis=1),
        np.concatenate([rows[slots] for rows, slots in zip(held, by_group, strict=True)]),
        np.concatenate([rows[np.sort(slots)] for rows, slots in zip(held, due, strict=True)]),
        selections[0].lr_factor,
        _figures(selections),
    )


def placed(shuffle: Shuffle, layout: Layout, *, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """int64[rows of the group], for each sampling group: The samples that the seed puts there."""
    groups = range(1 if shuffle.holds_all else layout.num_nodes)
    return [shuffle.placement(layout, node=node, epoch=epoch, seed=seed) for node in groups]


def class_skew(held: Sequence[NDArray[np.int64]], labels: NDArray[np.int64]) -> float:
    """Say how far the classes of nodes are from those of all, in [0, 1]: mean total variation.

    Args:
        held: int64[rows of the node], for each node: The samples that it holds.
        labels: int64[num_samples], by sample id.
    """
    num_classes = int(labels.max()) + 1
    whole = np.bincount(labels, minlength=num_classes) / len(labels)
    shares = [np.bincount(labels[rows], minlength=num_classes) / len(rows) for rows in held]
    return float(np.mean([np.abs(share - whole).sum() / 2 for share in shares]))


def _plan(
    places: Sequence[SamplingGroups],
    selections: Sequence[Selection],
    *,
    seed: int,
    epoch: int,
    batch_size: int,
) -> list[EpochPlan]:
    """Plan every replica's epoch, with the numbers that the groups would send each other."""
    counts = []
    for group, selection in zip(places[0].leaders, selections, strict=True):
        counts.append(count_rows(places[int(group)], selection, None))
    return [
        plan_epoch(
            place,
            selections[place.mine],
            Counts(*np.array(counts).T),
            stream=place.stream(seed, "order", epoch=epoch),
            batch_size=batch_size,
        )
        for place in places
    ]


def _figures(selections: Sequence[Selection]) -> dict[str, float]:
    told = {name for selection in selections for name in selection.figures}
    values = {name: [s.figures.get(name, 0.0) for s in selections] for name in sorted(told)}
    return {name: max(v) if name == "hidden_cap" else sum(v) for name, v in values.items()}


def number_samples(
    labels: NDArray[np.int64], partition: Partition, *, seed: int
) -> NDArray[np.int64]:
    """Number samples as the dataset would list them; contiguous runs then go to the replicas.

    Args:
        labels: int64[num_samples].
        partition: ``"sorted"``: by class, so that a replica begins with one or a few of them.
            ``"random"``: mixed.
        seed: Of the study's cell.

    Returns:
        int64[num_samples]: The row that has each sample id.
    """
    mixed = generator(key(seed, "study partition")).permutation(len(labels))
    if partition == "random":
        return mixed
    # Within a class the order is random too, whatever order the file had
    return mixed[np.argsort(labels[mixed], kind="stable")]
