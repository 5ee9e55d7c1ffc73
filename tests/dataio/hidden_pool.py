"""Pools whose epochs read from a disk that the kernel counts: hiding rows, and exchanging them."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dataio import Array, Bytes, Field, Int, Loader, Reports, Workers
from dataio.batch.figures import disk_bytes_read
from dataio.plan.policies import Importance, Local, Shuffle
from dataio.world import World, run_threads, single_world, thread_worlds
from importance import Kakurenbo, RandomPrune
from tonari.bench.generated import Generated

FRACTION = 0.3
PRUNE = RandomPrune(FRACTION, delta=1.0)
KAKURENBO = Kakurenbo(FRACTION, drops=(), alphas=(1.0,), warmup_epochs=0, refresh_every=None)


@dataclass(frozen=True)
class HiddenCase:
    """A pool of rows of one size on every node.

    Attributes:
        row_bytes: Of a row's data.
        fixed: Whether all rows lie in one array, or each where the heap had room.
        pool_bytes: Of all rows of a node.
        batch: Rows a batch.
    """

    row_bytes: int
    fixed: bool
    pool_bytes: int
    batch: int = 16

    @property
    def num_rows(self) -> int:
        return self.pool_bytes // self.row_bytes

    @property
    def name(self) -> str:
        return f"{self.row_bytes >> 10} KiB{'' if self.fixed else ', variable'}"

    def loader(
        self,
        root: Path,
        *,
        world: World | None = None,
        importance: Importance | None = None,
        shuffle: Shuffle | None = None,
    ) -> Loader:
        """Open the pool, staged in ``root`` once."""
        nodes = world.world_size if world is not None else 1
        field: Field = Array("x", (self.row_bytes,), "uint8") if self.fixed else Bytes("x")
        return Loader(
            Generated(self.name, nodes * self.num_rows, self.row_bytes),
            batch_size=self.batch,
            fields={"x": field, "label": Int("label")},
            cache=root,
            world=world if world is not None else single_world(),
            shuffle=shuffle if shuffle is not None else Local(),
            importance=importance,
            workers=Workers(threads=1),
            reports=Reports(progress=False),
        )


def forget(root: Path) -> None:
    """Drop the pages of a cache's rows, which nobody may have mapped."""
    for path in [*root.rglob("fixed-*.npy"), *root.rglob("heap-*.bin")]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@dataclass(frozen=True)
class Read:
    """What an epoch read from the disk, in what time, and the bytes of its rows."""

    disk_bytes: int
    epoch_s: float
    trained_bytes: int


def read_epoch(loader: Loader, epochs: Iterator[int], row_bytes: int) -> Read:
    """Train the next epoch, cold, without a model."""
    next(epochs)
    before, started = disk_bytes_read(), time.perf_counter()
    rows = sum(int((batch["slot"] >= 0).sum()) for batch in loader)
    seconds = time.perf_counter() - started
    return Read(disk_bytes_read() - before, seconds, rows * row_bytes)


def one_node(
    case: HiddenCase, root: Path, saved: Path | None, importance: Importance | None
) -> Read:
    """One epoch on one node; the one after what was saved, if anything."""
    forget(root)
    with case.loader(root, importance=importance) as loader:
        if saved is not None:
            loader.restore(saved)
        return read_epoch(loader, loader.epochs(2), case.row_bytes)


def report_losses(case: HiddenCase, root: Path, saved: Path) -> None:
    """Save a run after an epoch in which every row was right, sure, and had its own loss."""
    with case.loader(root, importance=KAKURENBO) as loader:
        next(loader.epochs(2))
        for batch in loader:
            ids = batch["sample_id"]
            loader.report(batch, loss_of(ids), ids >= 0, torch.ones(len(ids)))
        loader.save(saved)


def loss_of(ids: torch.Tensor) -> torch.Tensor:
    """A loss that a sample keeps, in no order of its id."""
    return (ids * 7919 % 10007).float() / 1000


def two_nodes(
    case: HiddenCase, root: Path, importance: Importance | None, shuffle: Shuffle | None
) -> Read:
    """One epoch on two nodes of this process, its exchange included; it takes no effect."""
    forget(root)
    gate = threading.Barrier(2)

    def node(world: World) -> tuple[int, float, int]:
        loader = case.loader(root, world=world, importance=importance, shuffle=shuffle)
        epochs = loader.epochs(2)
        gate.wait()
        before = disk_bytes_read()
        gate.wait()
        trained = read_epoch(loader, epochs, case.row_bytes)
        # What the exchange has still to send is sent before it is let go.
        started = time.perf_counter()
        loader._run.abandon()
        seconds = trained.epoch_s + time.perf_counter() - started
        gate.wait()
        read = disk_bytes_read() - before
        gate.wait()
        loader.close()
        return read, seconds, trained.trained_bytes

    ends = run_threads(thread_worlds([1, 1]), node)
    # Both count the bytes of the whole process.
    return Read(ends[0][0], max(end[1] for end in ends), sum(end[2] for end in ends))
