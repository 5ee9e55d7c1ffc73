"""torchdata's StatefulDataLoader over one mapped array, a batch at a time."""

from collections.abc import Iterator
from pathlib import Path

from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.loader.peers.harness import Batch, Feed, Task, copy_set, run
from benchmarks.loader.peers.torch_packed import Packed, as_it_is, rank_sampler
from benchmarks.loader.sets import open_set


def open_feed(task: Task) -> Feed:
    """Make the loader."""
    dataset = Packed(open_set(Path(task.prepared)))
    sampler = rank_sampler(dataset, task)
    loader = StatefulDataLoader(
        dataset,
        batch_size=task.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
        collate_fn=as_it_is,
    )

    def epoch(number: int) -> Iterator[Batch]:
        if sampler is not None:
            sampler.set_epoch(number)
        return iter(loader)

    return Feed(epoch)


if __name__ == "__main__":
    run(copy_set, open_feed)
