"""torchdata's StatefulDataLoader over one mapped array, a batch at a time."""

from torchdata.stateful_dataloader import StatefulDataLoader

from tonari.bench.loader.peers.harness import PeerFeed, PeerTask, copy_set, run
from tonari.bench.loader.peers.torch_packed import PackedPixels, as_it_is, sampled_feed


def open_feed(task: PeerTask) -> PeerFeed:
    """Make the loader."""
    return sampled_feed(
        StatefulDataLoader, PackedPixels(task.open_copy()), task, collate_fn=as_it_is
    )


if __name__ == "__main__":
    run(copy_set, open_feed)
