"""`dataio.Loader`, freshly staged; its ranks share the node's cache."""

from collections.abc import Iterator
from pathlib import Path

import dataio
from dataio.plan.policies import Shuffle
from tonari.bench.loader.peers.harness import DeliveredBatch, PeerFeed, PeerTask, run
from tonari.bench.loader.sets import CROP, SampleSet


def source_directory(task: PeerTask) -> Path:
    """Name the directory of the tar shards that are staged."""
    return Path(f"{task.source}.tar")


def make_loader(
    task: PeerTask, world: dataio.World, shuffle: Shuffle | None = None
) -> dataio.Loader:
    """Make a loader as its documentation does."""
    spec = task.open_source().spec
    field: dataio.Field = dataio.Array("bin", spec.shape, "uint8")
    if spec.kind == "jpeg":
        field = dataio.Image("jpg")
    elif spec.kind == "recipe":
        field = dataio.Image("jpg", crop=dataio.RandomResizedCrop(CROP), flip=0.5)
    return dataio.Loader(
        str(source_directory(task) / "train-*.tar"),
        batch_size=task.batch_size,
        fields={"payload": field, "label": dataio.Int("cls")},
        cache=task.prepared,
        shuffle=shuffle,
        seed=task.seed,
        world=world,
        workers=dataio.Workers(threads=task.workers),
        reports=dataio.Reports(progress=False),
    )


def batches(loader: dataio.Loader, spec: SampleSet) -> Iterator[DeliveredBatch]:
    """Take the rest of the loader's epoch."""
    for batch in loader:
        payload = batch["payload"]
        if spec.is_jpeg:
            payload = payload.permute(0, 2, 3, 1)
        yield DeliveredBatch(batch["sample_id"], batch["label"], payload)


def prepare(task: PeerTask) -> int:
    """Stage the shards."""
    world = dataio.discover_world()
    with make_loader(task, world) as loader:
        read = int(loader.stats()["source_bytes"])
    world.close()
    return read


def open_feed(task: PeerTask) -> PeerFeed:
    """Open the loader on the cache as it was left."""
    world = dataio.discover_world(timeout_s=3600)
    loader = make_loader(task, world)
    spec = task.open_source().spec

    def epoch(number: int) -> Iterator[DeliveredBatch]:
        loader.set_epoch(number)
        return batches(loader, spec)

    return PeerFeed(epoch, rank=world.rank)


if __name__ == "__main__":
    run(prepare, open_feed)
