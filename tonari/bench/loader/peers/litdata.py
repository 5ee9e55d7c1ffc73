"""LitData: optimised chunks on a local disk, read in place."""

import os
from functools import partial
from pathlib import Path

import litdata

from tonari.bench.loader.peers.harness import (
    NamedSample,
    PeerFeed,
    PeerTask,
    named_batches,
    named_sample,
    run,
)  # fmt: skip
from tonari.bench.loader.peers.pixels import decode_one
from tonari.bench.loader.sets import SampleSet, open_set


def read_sample(source: str, sample_id: int) -> NamedSample:
    """Read one sample of the set, for the chunks."""
    return named_sample(open_set(Path(source)), sample_id)


def decoded(sample: NamedSample, *, spec: SampleSet) -> NamedSample:
    """Decode a JPEG."""
    return {**sample, "payload": decode_one(sample["payload"], spec.shape)}


def prepare(task: PeerTask) -> None:
    """Write the chunks."""
    spec = task.open_source().spec
    litdata.optimize(
        fn=partial(read_sample, task.source),
        inputs=list(range(spec.num_samples)),
        output_dir=task.prepared,
        chunk_bytes="64MB",
        num_workers=2,
        verbose=False,
    )


def open_feed(task: PeerTask) -> PeerFeed:
    """Make the loader."""
    os.environ |= {"WORLD_SIZE": str(task.world_size), "GLOBAL_RANK": str(task.rank)}
    spec = task.open_source().spec
    dataset = litdata.StreamingDataset(
        task.prepared,
        shuffle=True,
        drop_last=False,
        seed=task.seed,
        transform=partial(decoded, spec=spec) if spec.is_jpeg else None,
    )
    loader = litdata.StreamingDataLoader(dataset, **task.loader_options())
    return PeerFeed(lambda number: named_batches(loader))


if __name__ == "__main__":
    run(prepare, open_feed)
