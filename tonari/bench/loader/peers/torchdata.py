"""torchdata's StatefulDataLoader over one mapped array, a batch at a time."""

from torchdata.stateful_dataloader import StatefulDataLoader

from tonari.bench.loader.peers.harness import Feed, Task, copy_set, run
from tonari.bench.loader.peers.torch_packed import Packed, as_it_is, sampled_feed


def open_feed(task: Task) -> Feed:
    """Make the loader."""
    return sampled_feed(StatefulDataLoader, Packed(task.open_copy()), task, collate_fn=as_it_is)


if __name__ == "__main__":
    run(copy_set, open_feed)
