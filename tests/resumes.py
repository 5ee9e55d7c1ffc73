"""One run of a loader, whole or in several jobs: what each batch held, and which scores remain."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataio import Loader, NodeCache, Reports, Workers
from dataio.rows.fields import Field
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.loaders import digest
from tests.importance.hidden import losses
from tests.memory_source import FIELDS, MemorySource

Row = tuple[int, float, str]
"""Its sample, its weight, a hash of its fields."""


@dataclass(frozen=True)
class RunData:
    """What a run is of.

    Attributes:
        num_samples: By epoch.
        open: Opens it for a rank of a job, in the run's directory.
        fields: Of a row.
        begin: Writes what is opened, before the first job.
        grow: Adds what the next epoch has; called once an epoch, while it runs.
        cache: Options of the cache.
    """

    num_samples: Sequence[int]
    open: Callable[[Path], Any]
    fields: Mapping[str, Field] = field(default_factory=lambda: FIELDS)
    begin: Callable[[Path], None] = lambda root: None
    grow: Callable[[Path, int], None] = lambda root, epoch: None
    cache: Mapping[str, Any] = field(default_factory=dict)


def in_memory(num_samples: int, epochs: int, source: type[MemorySource] = MemorySource) -> RunData:
    """Samples without files."""
    return RunData([num_samples] * epochs, lambda root: source(num_samples))


@dataclass(frozen=True)
class RunJob:
    """A start of a run.

    Attributes:
        nodes: Ranks of each node.
        stop: Batches after which it saves and ends. Defaults to the end of the run.
        cache: Directory of its caches, in the run's.
        saved: What it saves, in the run's directory.
        by_save: Whether it goes on from what ``save`` wrote, else from ``state_dict``.
        save_again: Whether it goes on from a save that it makes as soon as it is restored.
        save_each: Whether it saves after every batch, in the run's directory as "at-<batches>".
        options: Of the loader, beside the run's.
    """

    nodes: Sequence[int]
    stop: int | None = None
    cache: str = "cache"
    saved: str = "saved"
    by_save: bool = True
    save_again: bool = False
    save_each: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SeenBatch:
    """A batch.

    Attributes:
        epoch: Its epoch.
        kind: "train" or "refresh".
        digest: Of all that it holds.
        rows: Those that are not padding.
    """

    epoch: int
    kind: str
    digest: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class JobEnd:
    """How a job ended.

    Attributes:
        batches: Of each rank.
        state: What the next job goes on from; None at the end of the run.
        scores: Of each rank, at the end of the run: by sample, all columns.
    """

    batches: list[list[SeenBatch]]
    state: Any
    scores: list[dict[int, bytes]]

    def steps(self) -> list[tuple[int, str, list[Row]]]:
        """All ranks' rows of each step, in order of their samples."""
        return [
            (step[0].epoch, step[0].kind, sorted(row for batch in step for row in batch.rows))
            for step in zip(*self.batches, strict=True)
        ]


@dataclass(frozen=True)
class ResumedRun:
    """A run on any ranks.

    Attributes:
        root: Its directory.
        dataset: What it is of.
        options: Of the loader.
        epochs: Its length.
    """

    root: Path
    dataset: RunData
    options: Mapping[str, Any]
    epochs: int

    def start(self, job: RunJob, state: Any = None) -> JobEnd:
        """Run a job, anew or from where another one ended."""
        if state is None:
            self.root.mkdir(exist_ok=True)
            self.dataset.begin(self.root)
        worlds = thread_worlds(list(job.nodes), timeout_s=30)
        ranks = run_threads(worlds, lambda world: self._train(world, job, state))
        batches, states, scores = zip(*ranks, strict=True)
        assert all(state == states[0] for state in states), "all ranks stand at the same place"
        assert len({len(seen) for seen in batches}) == 1, "all ranks have equally many steps"
        return JobEnd(list(batches), states[0], list(scores))

    def start_all(self, jobs: Sequence[RunJob], state: Any = None) -> list[JobEnd]:
        """Run jobs, each from where the one before it ended."""
        ended: list[JobEnd] = []
        for number, job in enumerate(jobs):
            named = replace(job, saved=f"saved-{number}")
            ended.append(self.start(named, ended[-1].state if ended else state))
        return ended

    def open(self, world: World, job: RunJob) -> Loader:
        options: dict[str, Any] = {
            "batch_size": 5, "seed": 7, "workers": Workers(threads=0),
            "reports": Reports(progress=False), "fields": self.dataset.fields,
        }  # fmt: skip
        cache = NodeCache(self.root / job.cache, **self.dataset.cache)
        options |= {**self.options, **job.options}
        return Loader(self.dataset.open(self.root), world=world, cache=cache, **options)

    def _train(
        self, world: World, job: RunJob, state: Any
    ) -> tuple[list[SeenBatch], Any, dict[int, bytes]]:
        seen: list[SeenBatch] = []
        if job.save_again and state is not None:
            with self.open(world, job) as loader:
                loader.restore(state)
                loader.save(state := self.root / f"{state.name}-again")
        with self.open(world, job) as loader:
            if state is not None:
                (loader.restore if job.by_save else loader.load_state_dict)(state)
            for epoch in loader.epochs(self.epochs):
                for kind, batches in (("train", loader), ("refresh", loader.refresh())):
                    for batch in batches:
                        loader.report(batch, *losses(batch["sample_id"], epoch))
                        seen.append(SeenBatch(epoch, kind, digest(batch), rows_of(batch)))
                        if world.rank == 0:
                            self.dataset.grow(self.root, epoch)
                        if job.save_each:
                            loader.save(self.root / f"at-{len(seen)}")
                        if len(seen) == job.stop:
                            if not job.by_save:
                                return seen, loader.state_dict(), {}
                            loader.save(self.root / job.saved)
                            return seen, self.root / job.saved, {}
            assert job.stop is None, f"the run has ended after {len(seen)} batches"
            loader.flush()
            pool = loader._session.pool
            ids = np.array(pool.sample_ids).tolist()
            return seen, None, {i: pool.scores[slot].tobytes() for slot, i in enumerate(ids)}


def rows_of(batch: Mapping[str, Any]) -> tuple[Row, ...]:
    """A batch's rows, without padding."""
    weights = batch["weight"].tolist()
    names = sorted(set(batch) - {"sample_id", "slot", "weight"})
    return tuple(
        (sample_id, round(weights[row], 5), _hash([batch[name] for name in names], row))
        for row, sample_id in enumerate(batch["sample_id"].tolist())
        if batch["slot"][row] >= 0
    )


def _hash(columns: Sequence[Any], row: int) -> str:
    seen = hashlib.sha256()
    for column in columns:
        if len(column) > row:
            value = column[row]
            seen.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else value)
    return seen.hexdigest()


def joined(parts: Sequence[JobEnd]) -> JobEnd:
    """What jobs on the same ranks have trained together."""
    ranks = zip(*(part.batches for part in parts), strict=True)
    batches = [[batch for seen in rank for batch in seen] for rank in ranks]
    return JobEnd(batches, parts[-1].state, parts[-1].scores)


def counted(parts: Sequence[JobEnd], epoch: int, kind: str = "train") -> Counter[int]:
    """How often each sample came in an epoch, over all ranks and jobs."""
    steps = [step for part in parts for step in part.steps()]
    return Counter(
        row[0] for at, what, rows in steps if (at, what) == (epoch, kind) for row in rows
    )
