"""torch DataLoader over one mapped array, a batch at a time through ``__getitems__``."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tonari.bench.loader.peers.harness import DeliveredBatch, PeerFeed, PeerTask, copy_set, run
from tonari.bench.loader.peers.pixels import decode
from tonari.bench.loader.sets import PackedSet


class PackedPixels(Dataset[DeliveredBatch]):
    """Samples that are fetched by batch."""

    def __init__(self, packed: PackedSet) -> None:
        self.packed = packed
        self.rows = None if packed.spec.is_jpeg else np.asarray(packed.rows())

    def __len__(self) -> int:
        return self.packed.spec.num_samples

    def __getitems__(self, indices: list[int]) -> DeliveredBatch:
        """Fetch a whole batch, as the DataLoader asks where it can."""
        ids = np.array(indices, np.int64)
        if self.rows is None:
            payload = decode([self.packed.sample(i) for i in indices], self.packed.spec.shape)
        else:
            payload = self.rows.take(ids, axis=0)
        labels = self.packed.labels[ids]
        return DeliveredBatch(
            torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(payload)
        )

    def __getitem__(self, index: int) -> DeliveredBatch:
        return self.__getitems__([index])


def as_it_is(batch: DeliveredBatch) -> DeliveredBatch:
    """Leave a batch as ``__getitems__`` made it."""
    return batch


def rank_sampler(dataset: Dataset[Any], task: PeerTask) -> DistributedSampler[Any] | None:
    """Give every rank its part, as the documentation does; None for one rank."""
    if task.world_size == 1:
        return None
    return DistributedSampler(
        dataset, num_replicas=task.world_size, rank=task.rank, shuffle=True, seed=task.seed
    )


def sampled_feed(
    make: Callable[..., Iterable[Any]], dataset: Dataset[Any], task: PeerTask, **options: Any
) -> PeerFeed:
    """Make a loader after torch's over all of a dataset, shuffled, each rank its part."""
    sampler = rank_sampler(dataset, task)
    loader = make(
        dataset, shuffle=sampler is None, sampler=sampler, **task.loader_options(), **options
    )

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        if sampler is not None:
            sampler.set_epoch(number)
        return (DeliveredBatch(*parts) for parts in loader)

    return PeerFeed(epoch)


def open_feed(task: PeerTask) -> PeerFeed:
    """Make the loader."""
    return sampled_feed(DataLoader, PackedPixels(task.open_copy()), task, collate_fn=as_it_is)


if __name__ == "__main__":
    run(copy_set, open_feed)
