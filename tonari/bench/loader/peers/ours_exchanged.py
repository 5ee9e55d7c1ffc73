"""`dataio.Loader` on the cache as ten epochs of exchange at Q=0.1 left it: positions scattered.

Two ranks stand for two nodes, of a set twice as large, so that each holds as many rows as the
loaders beside it. They train ten epochs and exchange rows through MPI. Rank 0 alone is measured, in
the eleventh epoch, the last of its run, in which no rows are exchanged; rank 1 waits without using
the processor. Rank 1 delivers its rows once as well, without being measured, to prove that both
together hold every sample exactly once. The cache cannot be opened by one rank alone: the loader
would find rows missing and stage them again, in order.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

import dataio
import shuffle
from dataio.state.resume import sign
from tonari.bench.loader.peers.harness import DeliveredBatch, PeerFeed, PeerTask, run
from tonari.bench.loader.peers.ours import batches, make_loader

EXCHANGED_EPOCHS = 10
EXCHANGE = 0.1


def prepare(task: PeerTask) -> int:
    """Stage the shards and train ten epochs; the start of the eleventh commits the last rows."""
    world = dataio.discover_world()
    with make_loader(task, world, shuffle.Partial(EXCHANGE)) as loader:
        mine = np.array([int(loader.stats()["source_bytes"])])
        read = int(world.allreduce(mine, op="sum", doing="count bytes")[0])
        for epoch in loader.epochs(EXCHANGED_EPOCHS + 1):
            if epoch < EXCHANGED_EPOCHS:
                for _ in loader:
                    pass
        if loader.stats()["exchanged_rows"] == 0:
            raise RuntimeError("ours_exchanged: no rows were exchanged, expected some each epoch")
    world.close()
    return read


def open_feed(task: PeerTask) -> PeerFeed:
    """Open both nodes' caches where the ten epochs left them."""
    world = dataio.discover_world(timeout_s=3600)
    loader = make_loader(task, world, shuffle.Partial(EXCHANGE))
    spec = task.open_source().spec

    def ready(number: int) -> None:
        state: dict[str, Any] = loader.state_dict()
        del state["checksum"]
        begun = {**state["stretches"][-1], "steps": 0}
        loader.load_state_dict(sign({**state, "epoch": EXCHANGED_EPOCHS, "stretches": [begun]}))
        next(loader.epochs(EXCHANGED_EPOCHS + 1))

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        return batches(loader, spec)

    return PeerFeed(epoch, ready=ready, rank=world.rank)


if __name__ == "__main__":
    run(prepare, open_feed)
