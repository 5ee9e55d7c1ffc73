"""webdataset: tar shards read in sequence, shuffled by shard and in a buffer."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import webdataset as wds
from numpy.typing import NDArray

from tonari.bench.loader.peers.harness import DeliveredBatch, PeerFeed, PeerTask, run
from tonari.bench.loader.peers.pixels import decode_one
from tonari.bench.loader.peers.shards import NUM_SHARDS, tar_path, write_tars

BUFFER_SAMPLES = 5000


def prepare(task: PeerTask) -> None:
    """Write the shards."""
    write_tars(task.open_source(), Path(task.prepared))


def open_feed(task: PeerTask) -> PeerFeed:
    """Make the pipeline of its documentation: batches within workers, mixed anew outside."""
    spec = task.open_source().spec
    urls = [str(tar_path(Path(task.prepared), shard)) for shard in range(NUM_SHARDS)]
    mine = urls[task.rank :: task.world_size]
    buffer = min(BUFFER_SAMPLES, max(spec.num_samples // 16, 2))

    def parse(sample: dict[str, bytes | str]) -> tuple[int, int, NDArray[np.uint8]]:
        data = sample["jpg" if spec.is_jpeg else "bin"]
        assert isinstance(data, bytes)
        payload = decode_one(data, spec.shape) if spec.is_jpeg else np.frombuffer(data, np.uint8)
        return int(sample["__key__"]), int(sample["cls"]), payload

    dataset = (
        wds.WebDataset(mine, shardshuffle=NUM_SHARDS, nodesplitter=None, seed=task.seed)
        .shuffle(buffer)
        .map(parse)
        .batched(task.batch_size)
    )
    loader = wds.WebLoader(
        dataset, batch_size=None, num_workers=task.workers, persistent_workers=task.workers > 0
    )
    if task.workers:
        loader = loader.unbatched().shuffle(min(buffer, 1000)).batched(task.batch_size)

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        return (DeliveredBatch(*parts) for parts in loader)

    return PeerFeed(epoch)


if __name__ == "__main__":
    run(prepare, open_feed)
