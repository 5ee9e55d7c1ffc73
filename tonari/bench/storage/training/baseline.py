"""What staging is compared with: torch's DataLoader, reading the shared directory every epoch."""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from dataio import World
from tonari.bench.storage.training.shared_samples import SampleValues, SharedSamples, collate

BATCHES_TIMED = 5


class _RankBatches(Sampler[list[int]]):
    """A rank's batches of sample numbers: of an epoch, or one sample for each worker."""

    def __init__(self, num_samples: int, batch_size: int, *, world: World, seed: int) -> None:
        self.batch_size = batch_size
        self.warming_up = 0
        # The sampler asks no more of a dataset than its length.
        self.dealt: DistributedSampler[int] = DistributedSampler(
            range(num_samples),  # type: ignore[arg-type]
            num_replicas=world.world_size, rank=world.rank, shuffle=True, seed=seed,
        )  # fmt: skip

    def numbers(self) -> list[int]:
        return list(self.dealt)

    def __iter__(self) -> Iterator[list[int]]:
        if self.warming_up:
            yield from ([0] for _ in range(self.warming_up))
            return
        numbers = self.numbers()
        for first in range(0, len(numbers), self.batch_size):
            yield numbers[first : first + self.batch_size]


class SharedBatches:
    """A DataLoader over the shared directory, each rank its part of a common shuffle.

    Its workers are started here and stay: a job starts them once, so this is in no epoch's time.
    """

    def __init__(
        self, samples: SharedSamples, *, batch_size: int, workers: int, world: World, seed: int
    ) -> None:
        self.samples = samples
        self._batches = _RankBatches(len(samples), batch_size, world=world, seed=seed)
        # forkserver: forking a process that runs MPI is not safe
        self._loader: DataLoader[SampleValues] | None = DataLoader(
            samples, batch_sampler=self._batches, num_workers=workers,
            persistent_workers=workers > 0, collate_fn=collate,
            multiprocessing_context="forkserver" if workers else None,
        )  # fmt: skip
        before = set(_children())
        self._batches.warming_up = workers
        for _ in self:
            continue
        self._batches.warming_up = 0
        self._workers = set(_children()) - before

    def __iter__(self) -> Iterator[int]:
        """Yield the number of samples of every batch of the epoch."""
        assert self._loader is not None
        for batch in self._loader:
            yield len(next(iter(batch.values())))

    def set_epoch(self, epoch: int) -> list[int]:
        """Begin an epoch; returns the samples that this rank will read."""
        self._batches.dealt.set_epoch(epoch)
        return self._batches.numbers()

    def read_bytes(self) -> int:
        """Count what the workers fetched from block devices so far.

        The kernel does not count it for this process, whose own children they are not.
        """
        return sum(_read_bytes(worker) for worker in self._workers)

    def close(self) -> None:
        """End the workers."""
        self._loader = None
        self.samples.close()


def _children() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def _read_bytes(process: int) -> int:
    text = Path(f"/proc/{process}/io").read_text()
    return int(dict(line.split(": ") for line in text.splitlines())["read_bytes"])


def sample_work_s(samples: SharedSamples, batch_size: int, *, world: World) -> float:
    """Measure the DataLoader's work on a sample whose bytes are in memory. Collective."""
    fetched = samples.fetch(range(min(batch_size, len(samples))))
    took_s = []
    for _ in range(BATCHES_TIMED):
        started = time.perf_counter()
        collate(samples.decode(fetched))
        took_s.append(time.perf_counter() - started)
    mine = np.array([statistics.median(took_s) / len(fetched)])
    return float(world.allreduce(mine, op="max", doing="time the DataLoader's own work")[0])
