"""The training runs of `tonari demo`, on one rank; `tonari.demo.command` starts it by mpiexec.

Takes a JSON file with the settings of several runs, which it does one after the other. Rank 0
writes one with a record for each: a list per figure, an entry an epoch.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

import importance
import shuffle
from dataio import Image, Importance, Int, Loader, Reports, Shards, Throttle
from dataio.job.launch import Job, join
from dataio.rows.samples import Batch
from tonari.demo.baseline import BaselineBatches, IndexedTar, index_shards
from tonari.trainer.mesh.mesh import axis_sizes, make_mesh
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.mesh.place import place_of
from tonari.trainer.models import SmallCNN
from tonari.trainer.run.schedule import learning_rate
from tonari.trainer.run.step import TakesReports, evaluate, rescore, train_step
from tonari.trainer.run.tasks import Classify

PROGRESS = "@epoch"
"""Marks the lines by which rank 0 reports to the parent how far it is."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One run: ``kind`` is dataloader, tonari or tonari_hiding."""

    kind: str
    shared: str
    train_shards: list[str]
    test_shards: list[str]
    extension: str
    image_shape: tuple[int, int, int]
    num_classes: int
    num_train: int
    wrong: list[int]
    cache: str
    throttle_path: str
    pfs_bandwidth: float
    pfs_latency_s: float
    epochs: int
    batch_size: int
    exchange: float
    hide: float
    num_workers: int
    seed: int
    lr: float


@dataclass
class DemoRecord:
    """What is measured: a list an epoch each, and staging apart."""

    epoch_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)
    source_bytes: list[int] = field(default_factory=list)
    exchanged_rows: list[int] = field(default_factory=list)
    hidden_fraction: list[float] = field(default_factory=list)
    hidden_wrong_fraction: list[float] = field(default_factory=list)
    staging_s: float = 0.0


class LoopMeter:
    """Sums and means over ranks, and bytes of the shared directory by epoch."""

    def __init__(self, job: Job, throttle: Throttle) -> None:
        self.job = job
        self.throttle = throttle
        self.record = DemoRecord()
        self._bytes_before = 0

    def total(self, values: list[float]) -> list[float]:
        """Sum over ranks. Collective."""
        return list(
            self.job.world.allreduce(np.array(values), op="sum", doing="add figures").tolist()
        )

    def close_epoch(
        self, *, epoch_s: float, wait_s: float, accuracy: float, exchanged: int = 0,
        hidden: float = 0.0, hidden_wrong: float = 0.0,
    ) -> None:  # fmt: skip
        """Record an epoch. Collective."""
        record, num_ranks = self.record, self.job.world.world_size
        sums = self.total([wait_s, float(exchanged), hidden])
        read = self.throttle.total_bytes
        record.epoch_s.append(epoch_s)
        record.wait_s.append(sums[0] / num_ranks)
        record.exchanged_rows.append(round(sums[1]))
        record.hidden_fraction.append(sums[2] / num_ranks)
        record.hidden_wrong_fraction.append(hidden_wrong)
        record.test_accuracy.append(accuracy)
        record.source_bytes.append(read - self._bytes_before)
        self._bytes_before = read
        self.job.world.barrier(doing="count bytes")
        if self.job.world.rank == 0:
            sys.stdout.write(f"{PROGRESS} {len(record.epoch_s)} {epoch_s:.3f} {accuracy:.4f}\n")
            sys.stdout.flush()


@dataclass
class DemoTraining:
    """The model and what updates it: the same for all kinds of run."""

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def make_training(settings: RunSettings, job: Job) -> DemoTraining:
    """Build the same model from the same weights on every rank."""
    torch.manual_seed(settings.seed)
    height, _, channels = settings.image_shape
    model = SmallCNN(settings.num_classes, channels, height)
    mesh = make_mesh(axis_sizes(job.world.world_size), device_type="cpu")
    (spread,) = parallelize(model, mesh)
    pipeline = Pipeline(
        [spread], place_of(job.world.rank, mesh.shape, schedule="1f1b", virtual=1), mesh,
        Classify(), schedule="1f1b", microbatches=1, batch_size=settings.batch_size,
        device=job.device,
    )  # fmt: skip
    return DemoTraining(
        pipeline, torch.optim.SGD(spread.parameters(), lr=settings.lr, momentum=0.9)
    )


def train_epoch(training: DemoTraining, batches: Iterable[Batch], reports: TakesReports) -> float:
    """Train an epoch; returns the seconds spent waiting for batches. Collective."""
    wait_s = 0.0
    source: Iterator[Batch] = iter(batches)
    while True:
        started = time.perf_counter()
        batch = next(source, None)
        wait_s += time.perf_counter() - started
        if batch is None:
            return wait_s
        train_step(training.pipeline, training.optimizer, reports, [batch])


def rate_of(settings: RunSettings, epoch: int) -> float:
    """The schedule that all runs share."""
    return learning_rate(epoch, length=settings.epochs, lr=settings.lr)


def run_dataloader(settings: RunSettings, job: Job, throttle: Throttle) -> DemoRecord:
    """Train on torch's own loader, reading the shared directory every epoch."""
    channels = settings.image_shape[2]
    extents = index_shards([Path(p) for p in settings.train_shards], extension=settings.extension)
    world = job.world
    batches = BaselineBatches(
        IndexedTar(extents, throttle=throttle, channels=channels),
        batch_size=settings.batch_size, num_workers=settings.num_workers, rank=world.rank,
        world_size=world.world_size, seed=settings.seed,
    )  # fmt: skip
    test = list(_test_batches(settings, job, throttle))
    training, meter = make_training(settings, job), LoopMeter(job, throttle)
    for epoch in range(settings.epochs):
        training.set_rate(rate_of(settings, epoch))
        batches.sampler.set_epoch(epoch)
        world.barrier(doing="start the epoch")
        started = time.perf_counter()
        wait_s = train_epoch(training, batches, batches)
        world.barrier(doing="end the epoch")
        epoch_s = time.perf_counter() - started
        accuracy = evaluate(training.pipeline, test).accuracy
        meter.close_epoch(epoch_s=epoch_s, wait_s=wait_s, accuracy=accuracy)
    return meter.record


def _test_batches(settings: RunSettings, job: Job, throttle: Throttle) -> Iterator[Batch]:
    """The baseline's test set, read once: its bytes count, as Tonari's do, its time does not."""
    extents = index_shards([Path(p) for p in settings.test_shards], extension=settings.extension)
    mine = extents[job.world.rank :: job.world.world_size]
    dataset = IndexedTar(mine, throttle=throttle, channels=settings.image_shape[2])
    for first in range(0, len(mine), settings.batch_size):
        items = [dataset[n] for n in range(first, min(first + settings.batch_size, len(mine)))]
        valid = torch.arange(settings.batch_size) < len(items)
        # A pipeline takes batches of one shape.
        items += [items[0]] * (settings.batch_size - len(items))
        yield {
            "image": torch.stack([image for image, _ in items]),
            "label": torch.tensor([label for _, label in items]),
            "valid": valid,
        }


class CountedBatches:
    """Batches of a loader, which counts the rows in them, and those of a wrong label."""

    def __init__(self, batches: Iterable[Batch], wrong: list[int]) -> None:
        self._batches, self._wrong = batches, torch.tensor(wrong, dtype=torch.int64)
        self._num_rows = self._num_wrong = 0.0

    def __iter__(self) -> Iterator[Batch]:
        self._num_rows = self._num_wrong = 0.0
        for batch in self._batches:
            ids = batch["sample_id"][batch["sample_id"] >= 0]
            self._num_rows += len(ids)
            self._num_wrong += float(torch.isin(ids, self._wrong).sum())
            yield batch

    def hidden_wrong(self, num_samples: int, total: Callable[[list[float]], list[float]]) -> float:
        """Give the share of this epoch's hidden rows whose label is wrong. Collective."""
        num_rows, num_wrong = total([self._num_rows, self._num_wrong])
        return (len(self._wrong) - num_wrong) / max(num_samples - num_rows, 1)


def run_tonari(settings: RunSettings, job: Job, throttle: Throttle) -> DemoRecord:
    """Stage once, take the shared directory away, and train from the nodes' caches."""
    world = job.world
    policy: Importance | None = None
    if settings.kind == "tonari_hiding":
        # Of labels that can be trusted what is easy is hidden, else what the model calls wrong.
        policy = importance.Kakurenbo(settings.hide)
        if settings.wrong:
            policy = importance.KeepAgreed(settings.hide, begins=max(2, settings.epochs // 4))
    started = time.perf_counter()
    loader = Loader(
        Shards(settings.train_shards, throttle=throttle),
        batch_size=settings.batch_size,
        fields={
            "image": Image(settings.extension, channels=settings.image_shape[2]),
            "label": Int("cls"),
        },
        cache=settings.cache,
        shuffle=shuffle.Partial(exchange=settings.exchange),
        importance=policy,
        seed=settings.seed,
        world=world,
        reports=Reports(progress=False),
    )
    evaluation = loader.evaluation(Shards(settings.test_shards, throttle=throttle))
    world.barrier(doing="finish staging")
    staging_s = time.perf_counter() - started
    if world.rank == 0:
        os.rename(settings.shared, f"{settings.shared}.away")
    world.barrier(doing="take the shared directory away")
    training, meter = make_training(settings, job), LoopMeter(job, throttle)
    meter.record.staging_s = staging_s
    exchanged, trained = 0, CountedBatches(loader, settings.wrong)
    epochs = loader.epochs(settings.epochs)
    while True:
        world.barrier(doing="start the epoch")
        started = time.perf_counter()
        epoch = next(epochs, None)  # what lies between two epochs belongs to the later one
        if epoch is None:
            break
        training.set_rate(rate_of(settings, epoch) * loader.lr_factor)
        wait_s = train_epoch(training, trained, loader)
        rescore(training.pipeline, loader, loader.refresh())
        world.barrier(doing="end the epoch")
        epoch_s = time.perf_counter() - started
        accuracy = evaluate(training.pipeline, evaluation).accuracy
        stats = loader.stats()
        meter.close_epoch(
            epoch_s=epoch_s,
            wait_s=wait_s,
            accuracy=accuracy,
            exchanged=int(stats["exchanged_rows"]) - exchanged,
            hidden=stats["hidden_fraction"],
            hidden_wrong=trained.hidden_wrong(settings.num_train, meter.total),
        )
        exchanged = int(stats["exchanged_rows"])
    evaluation.close()
    loader.close()
    return meter.record


def main() -> None:
    """Do the runs that the settings file lists; rank 0 writes their records."""
    settings_path, records_path = Path(sys.argv[1]), Path(sys.argv[2])
    runs = [RunSettings(**each) for each in json.loads(settings_path.read_text())]
    with join(device="cpu") as job:
        records = [asdict(_run(each, job)) for each in runs]
        if job.world.rank == 0:
            records_path.write_text(json.dumps(records))


def _run(settings: RunSettings, job: Job) -> DemoRecord:
    throttle = Throttle(
        settings.throttle_path, bytes_per_s=settings.pfs_bandwidth, latency_s=settings.pfs_latency_s
    )
    if settings.kind == "dataloader":
        return run_dataloader(settings, job, throttle)
    record = run_tonari(settings, job, throttle)
    if job.world.rank == 0:
        os.rename(f"{settings.shared}.away", settings.shared)
    job.world.barrier(doing="bring the shared directory back")
    return record


if __name__ == "__main__":
    main()
