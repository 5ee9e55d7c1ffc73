"""torch DataLoader over one mapped array, a batch at a time through ``__getitems__``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.loader.peers.harness import Batch, Feed, Task, copy_set, run
from benchmarks.loader.peers.pixels import decode
from benchmarks.loader.sets import PackedSet, open_set


class Packed(Dataset[Batch]):
    """Samples that are fetched by batch."""

    def __init__(self, packed: PackedSet) -> None:
        self.packed = packed
        self.rows = None if packed.spec.is_jpeg else np.asarray(packed.rows())

    def __len__(self) -> int:
        return self.packed.spec.num_samples

    def __getitems__(self, indices: list[int]) -> Batch:
        """Fetch a whole batch, as the DataLoader asks where it can."""
        ids = np.array(indices, np.int64)
        if self.rows is None:
            payload = decode([self.packed.sample(i) for i in indices], self.packed.spec.shape)
        else:
            payload = self.rows.take(ids, axis=0)
        labels = self.packed.labels[ids]
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(payload))

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])


def as_it_is(batch: Batch) -> Batch:
    """Leave a batch as ``__getitems__`` made it."""
    return batch


def rank_sampler(dataset: Dataset[Any], task: Task) -> DistributedSampler[Any] | None:
    """Give every rank its part, as the documentation does; None for one rank."""
    if task.world_size == 1:
        return None
    return DistributedSampler(
        dataset, num_replicas=task.world_size, rank=task.rank, shuffle=True, seed=task.seed
    )


def open_feed(task: Task) -> Feed:
    """Make the loader."""
    dataset = Packed(open_set(Path(task.prepared)))
    sampler = rank_sampler(dataset, task)
    loader = DataLoader(
        dataset,
        batch_size=task.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
        collate_fn=as_it_is,  # type: ignore[arg-type]
    )

    def epoch(number: int) -> Iterator[Batch]:
        if sampler is not None:
            sampler.set_epoch(number)
        return iter(loader)

    return Feed(epoch)


if __name__ == "__main__":
    run(copy_set, open_feed)
