"""LitData: optimised chunks on a local disk, read in place."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import litdata

from benchmarks.loader.peers.harness import Batch, Feed, Task, run
from benchmarks.loader.peers.pixels import decode_one
from benchmarks.loader.sets import SetSpec, open_set

Sample = dict[str, object]


def read_sample(source: str, sample_id: int) -> Sample:
    """Read one sample of the set, for the chunks."""
    packed = open_set(Path(source))
    data = packed.sample(sample_id)
    payload = data.tobytes() if packed.spec.is_jpeg else data.copy()
    return {"id": sample_id, "label": int(packed.labels[sample_id]), "payload": payload}


def decoded(sample: Sample, *, spec: SetSpec) -> Sample:
    """Turn a JPEG into pixels."""
    data = sample["payload"]
    assert isinstance(data, bytes)
    return {**sample, "payload": decode_one(data, spec.shape)}


def prepare(task: Task) -> None:
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


def open_feed(task: Task) -> Feed:
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
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=task.batch_size,
        num_workers=task.workers,
        persistent_workers=task.workers > 0,
    )

    def epoch(number: int) -> Iterator[Batch]:
        for batch in loader:
            yield Batch(batch["id"], batch["label"], batch["payload"])

    return Feed(epoch)


if __name__ == "__main__":
    run(prepare, open_feed)
