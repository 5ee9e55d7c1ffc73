"""MosaicML Streaming: MDS shards on a local disk, shuffled by its default py1e."""

import os
from pathlib import Path

import streaming

from tonari.bench.loader.peers.harness import (
    NamedSample,
    PeerFeed,
    PeerTask,
    named_batches,
    named_sample,
    run,
)  # fmt: skip
from tonari.bench.loader.peers.pixels import decode_one


class Decoding(streaming.StreamingDataset):  # type: ignore[misc]
    """Decodes a JPEG where a worker reads it."""

    shape: tuple[int, ...]

    def __getitem__(self, index: int) -> NamedSample:
        sample = dict(super().__getitem__(index))
        return {**sample, "payload": decode_one(sample["payload"], self.shape)}


def prepare(task: PeerTask) -> None:
    """Write the shards."""
    packed = task.open_source()
    spec = packed.spec
    kind = "bytes" if spec.is_jpeg else f"ndarray:uint8:{spec.sample_bytes}"
    columns = {"id": "int", "label": "int", "payload": kind}
    with streaming.MDSWriter(out=task.prepared, columns=columns) as writer:
        for sample_id in range(spec.num_samples):
            writer.write(named_sample(packed, sample_id))


def open_feed(task: PeerTask) -> PeerFeed:
    """Make the loader."""
    os.environ |= {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.world_size),
        "LOCAL_RANK": str(task.rank),
        "LOCAL_WORLD_SIZE": str(task.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.port),
    }
    spec = task.open_source().spec
    kind = Decoding if spec.is_jpeg else streaming.StreamingDataset
    # Two sessions at once may not name one local directory: each sees it through a link.
    local = Path(f"{task.socket}.mds")
    if task.rank == 0:
        local.symlink_to(task.prepared)
    dataset = kind(
        local=str(local), shuffle=True, batch_size=task.batch_size, shuffle_seed=task.seed
    )
    if spec.is_jpeg:
        dataset.shape = spec.shape
    loader = streaming.StreamingDataLoader(dataset, **task.loader_options())
    return PeerFeed(lambda number: named_batches(loader))


if __name__ == "__main__":
    run(prepare, open_feed)
