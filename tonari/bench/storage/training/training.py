"""Train with an emulated step on what is staged, or with a DataLoader; time every epoch."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from msgspec.structs import replace

from dataio import Loader, Staging, World
from dataio.base.progress import ProgressBar
from dataio.plan.policies import Importance, Shuffle
from tonari.bench.storage.patterns.threads import Deadline
from tonari.bench.storage.site.counters import Counters
from tonari.bench.storage.site.evidence import Watch, evict
from tonari.bench.storage.site.gathered import gather_moved, gather_verdict
from tonari.bench.storage.training.baseline import SharedBatches
from tonari.bench.storage.training.own_set import OwnShards
from tonari.bench.storage.training.predict import WayName
from tonari.bench.storage.training.shared_samples import SharedSamples, index_tars
from tonari.bench.storage.training.ways import Ran, add_read, shared_bytes
from tonari.cache.stage import along

OnEpoch = Callable[[WayName, int], None]


class TimedSteps:
    """Times its block from a common start to the end of the slowest rank. Collective."""

    def __init__(self, world: World, doing: str) -> None:
        self.world, self.doing, self.seconds = world, doing, 0.0

    def __enter__(self) -> "TimedSteps":
        self.world.barrier(doing=f"begin to {self.doing}")
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            took_s = np.array([time.perf_counter() - self._started])
            slowest = self.world.allreduce(took_s, op="max", doing=f"end to {self.doing}")
            self.seconds = float(slowest[0])


@dataclass(frozen=True, kw_only=True)
class TrainingRates:
    """A job that trains on shards, whatever feeds it.

    Attributes:
        step_s: Of compute, emulated by sleep.
        workers: Processes of each rank's DataLoader.
        staging_readers: Shards that each rank reads at once while staging.
        on_epoch: Called on every rank with the number of epochs that a way has completed; with 0
            when it may begin.
        until: When nothing new is begun: a way that was has two epochs in any case.
    """

    world: World
    data: OwnShards
    step_s: float
    batch_size: int
    workers: int
    staging_readers: int
    seed: int
    on_epoch: OnEpoch
    until: Deadline

    def over(self, share: Deadline | None = None) -> bool:
        """Whether the time, or a share of it, has passed for any rank. Collective."""
        passed = np.array([self.until.passed or (share is not None and share.passed)])
        return bool(self.world.allreduce(passed, op="max", doing="looking at the time")[0])

    def _epochs(self, name: WayName, most: int) -> Iterator[int]:
        """Count a way's epochs from 0: two, and more in its part of the time. Collective."""
        ways = get_args(WayName)
        share = Deadline((self.until.end - time.monotonic()) / (len(ways) - ways.index(name)))
        for done in range(most):
            if done >= 2 and self.over(share):
                return
            yield done

    def run_loader(
        self,
        name: WayName,
        *,
        paths: Sequence[str],
        cache: Path,
        epochs: int,
        shuffle: Shuffle | None = None,
        importance: Importance | None = None,
        bandwidth: float = 0.0,
    ) -> Ran:
        """Stage shards into a cache, and train from there. Collective."""
        world = self.world
        self._evict()
        with TimedSteps(world, f"stage ({name})") as staging:
            loader = Loader(
                along(paths, self.data.axis), batch_size=self.batch_size, fields=self.data.fields,
                cache=cache, shuffle=shuffle, importance=importance, seed=self.seed, world=world,
                staging=Staging(readers=self.staging_readers, bandwidth=bandwidth),
            )  # fmt: skip
        with loader:
            staged = loader.stats()
            epoch_s, samples = [], []
            numbers = loader.epochs(epochs)
            self.on_epoch(name, 0)
            for done in self._epochs(name, epochs):
                with TimedSteps(world, f"train ({name})") as epoch:
                    next(numbers)  # Ends the epoch before; its time counts for this one.
                    trained = self._train(name, _rows(loader), len(loader))
                self.on_epoch(name, done + 1)
                epoch_s.append(epoch.seconds)
                samples.append(self._sum(trained))
            if len(epoch_s) == epochs:
                next(numbers, None)
            ended = loader.stats()
        world.barrier(doing="leave the cache")
        tiers = {"shared": "source_bytes", "network": "peer_bytes", "local": "disk_bytes"}
        moved = {tier: self._sum(int(ended[of] - staged[of])) for tier, of in tiers.items()}
        source_bytes = self._sum(int(staged["source_bytes"]))
        return Ran(
            staging_s=staging.seconds, epoch_s=epoch_s, samples=samples, moved=moved,
            staging_bytes=source_bytes,
        )  # fmt: skip

    def run_dataloader(self, epochs: int) -> Ran:
        """Train from the shared directory, cold in the first epoch. Collective."""
        world, site = self.world, self.data.site
        samples = self.shared_samples()
        batches = SharedBatches(
            samples, batch_size=self.batch_size, workers=self.workers,
            world=world, seed=self.seed,
        )  # fmt: skip
        epoch_s, trained, verdicts = [], [], []
        before, read_before = Counters.read(site), batches.read_bytes()
        self.on_epoch("dataloader", 0)
        try:
            for epoch in self._epochs("dataloader", epochs):
                numbers = batches.set_epoch(epoch)
                asked = samples.asked_bytes(numbers, self.data.sample_bytes)
                steps = math.ceil(len(numbers) / self.batch_size)
                read = batches.read_bytes()
                with Watch(self.data.files, site, cold=epoch == 0) as watch:
                    with TimedSteps(world, "train (dataloader)") as timed:
                        number = self._train("dataloader", iter(batches), steps)
                self.on_epoch("dataloader", epoch + 1)
                epoch_s.append(timed.seconds)
                trained.append(self._sum(number))
                seen = watch.evidence(asked)
                seen = replace(seen, moved=add_read(seen.moved, batches.read_bytes() - read))
                verdicts.append(gather_verdict(seen, site, world))
            moved = Counters.read(site).since(before)
            moved = gather_moved(add_read(moved, batches.read_bytes() - read_before), world)
        finally:
            batches.close()
        shared = {"shared": shared_bytes(moved, site), "network": None, "local": None}
        return Ran(staging_s=0.0, epoch_s=epoch_s, samples=trained, moved=shared,
                    staging_bytes=None, verdicts=verdicts)  # fmt: skip

    def shared_samples(self) -> SharedSamples:
        """Open the shards as the DataLoader reads them. Collective."""
        index = None
        if all(path.endswith(".tar") for path in self.data.paths):
            index = index_tars(self.data.paths, self.data.fields, self.world)
        return SharedSamples(self.data, index)

    def _train(self, name: WayName, batches: Iterator[int], steps: int) -> int:
        """Do the epoch's steps; returns how many samples they had. Collective."""
        trained, shown = 0, self.world.rank == 0
        bar = ProgressBar(f"train ({name})", steps, shown=shown, unit="steps")
        for number in batches:
            time.sleep(self.step_s)
            # A step ends when all ranks have their gradients.
            self.world.barrier(doing="emulate a step")
            trained += number
            bar.add(1)
        bar.close()
        return trained

    def _evict(self) -> None:
        if self.world.local_rank == 0:
            evict(self.data.files)
        self.world.barrier(doing="evict the shards")

    def _sum(self, value: int) -> int:
        return int(self.world.allreduce(np.array([value]), op="sum", doing="add figures")[0])


def _rows(loader: Loader) -> Iterator[int]:
    """Count each batch's rows, padding apart."""
    for batch in loader:
        yield int((batch["slot"] >= 0).sum())
