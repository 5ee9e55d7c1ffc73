"""Which samples every replica trains in an epoch, computed for all of them in one process.

Calls what a loader calls, so that a study in one process trains the batches that a job of as many
ranks would.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.epoch import Counts, find_decks, plan_epoch
from dataio.layout import Layout
from dataio.policies import Selection, Shuffle
from dataio.seeding import generator, key

Partition = str
"""``"sorted"`` or ``"random"``: how samples are numbered before they are dealt to the nodes."""


class EpochBatches(NamedTuple):
    """An epoch of all replicas.

    Attributes:
        sample_id: int64[steps, replicas, batch]: Padding repeats samples of the same replica.
        weight: float32[steps, replicas, batch]: 0 for padding.
    """

    sample_id: NDArray[np.int64]
    weight: NDArray[np.float32]


def epoch_batches(
    shuffle: Shuffle, layout: Layout, *, seed: int, epoch: int, batch_size: int
) -> EpochBatches:
    """Compute the batches that the replicas' loaders deliver in an epoch.

    Args:
        shuffle: The loaders' policy.
        layout: Replicas and samples.
        seed: The loaders' seed.
        epoch: Which one.
        batch_size: Rows a batch and replica.
    """
    blocks, held = [], None
    for replica in range(layout.num_replicas):
        decks = find_decks(layout, replica=replica, holds_all=shuffle.holds_all)
        plan = plan_epoch(
            decks,
            Selection(),
            Counts(decks.sizes, decks.sizes),
            stream=decks.stream(seed, "order", epoch=epoch),
            batch_size=batch_size,
        )
        if held is None or decks.leader == replica:
            # int64[rows of the deck]: the replicas of a node share it
            held = shuffle.placement(layout, node=decks.mine, epoch=epoch, seed=seed)
        block = plan.block(0, plan.order.steps)
        blocks.append((held[block.slots], block.weight))
    ids, weights = zip(*blocks, strict=True)
    return EpochBatches(np.stack(ids, axis=1), np.stack(weights, axis=1))


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
