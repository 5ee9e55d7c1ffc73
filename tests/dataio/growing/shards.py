"""Shards that are appended, and loaders of them."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import shuffle
from dataio import Bytes, Field, Int, Loader, NodeCache, Reports, Shards, Workers
from dataio.plan.policies import Local, Shuffle
from importance import Kakurenbo
from tests.dataio.loaders import digest, jitter, loss_of

FIELDS: dict[str, Field] = {"label": Int("cls"), "data": Bytes("bin")}
SHUFFLES: dict[str, Shuffle] = {
    "local": Local(),
    "partial": shuffle.Partial(0.3),
    "global": shuffle.Global(),
    "moves": shuffle.Global(moves=True),
}
HIDES = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)
EPOCHS = 5
GROWTH = {1: 13, 2: 0, 3: 22}
"""Samples that are appended while an epoch runs."""


def payload(sample_id: int) -> bytes:
    return sample_id.to_bytes(4, "little") * (1 + sample_id % 7)


def write_shard(path: Path, first: int, count: int) -> None:
    """Write samples from ``first`` on, and rename the shard into place."""
    partial = path.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        for sample_id in range(first, first + count):
            members = {"cls": str(sample_id % 10).encode(), "bin": payload(sample_id)}
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{sample_id:06d}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    os.replace(partial, path)


class Directory:
    """A directory of shards that knows how many samples it holds."""

    def __init__(self, path: Path, counts: tuple[int, ...] = (30, 31)) -> None:
        path.mkdir(parents=True)
        self.path, self.num_samples, self.num_shards = path, 0, 0
        for count in counts:
            self.append(count)

    def append(self, count: int) -> Path:
        path = self.path / f"shard-{self.num_shards:03d}.tar"
        write_shard(path, self.num_samples, count)
        self.num_samples, self.num_shards = self.num_samples + count, self.num_shards + 1
        return path


def make(
    world: Any, root: Path, shards: Path, name: str = "partial", *, quota: Any = None,
    **options: Any,
) -> Loader:  # fmt: skip
    chosen: dict[str, Any] = {"batch_size": 5, "fields": FIELDS, "seed": 7, "transform": jitter}
    chosen |= {"workers": Workers(threads=1), "reports": Reports(progress=False)}
    return Loader(
        Shards(str(shards / "*.tar"), grows=True),
        cache=NodeCache(root, quota=quota),
        world=world,
        shuffle=SHUFFLES[name],
        **(chosen | options),
    )


def train(loader: Loader, epochs: int = EPOCHS, *, on_step: Any = None) -> list[Any]:
    """Run to the end: of each batch the epoch, its samples and a digest of all that is in it."""
    seen = []
    for epoch in loader.epochs(epochs):
        for batch in loader:
            for sample_id, data in zip(batch["sample_id"].tolist(), batch["data"], strict=True):
                assert sample_id < 0 or data == payload(sample_id)
            loader.report(batch, *loss_of(batch["sample_id"], epoch))
            seen.append((epoch, batch["sample_id"].tolist(), digest(batch)))
            if on_step is not None:
                on_step(epoch, loader.step, len(seen))
        for batch in loader.refresh():
            loader.report(batch, *loss_of(batch["sample_id"], epoch + 0.5))
    return seen


def grow(world: Any, directory: Directory, growth: dict[int, int] = GROWTH) -> Any:
    """Append shards in the middle of epochs, on rank 0."""

    def on_step(epoch: int, step: int, number: int) -> None:
        if world.rank == 0 and step == 2 and growth.get(epoch):
            directory.append(growth[epoch])

    return on_step


def samples_of(results: list[list[Any]], epoch: int) -> list[int]:
    """All samples of an epoch, over all ranks, sorted; padding left out."""
    ids = [i for seen in results for at, ids, _ in seen if at == epoch for i in ids]
    return sorted(i for i in ids if i >= 0)
