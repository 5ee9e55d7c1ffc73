"""One start of a rehearsed job: its ranks train, and what was drawn happens to them."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dataio import Loader, Mixture, Reports
from dataio.base.errors import DataioError, StallError
from dataio.world import World
from tests.faults.kill.job import outcome
from tests.faults.samples import Samples
from tests.rehearsal import audit
from tests.rehearsal.audit import Course, Delivered
from tests.rehearsal.growth import Growth
from tests.rehearsal.network import Network
from tests.rehearsal.scheduler import Scheduler, Task
from tests.rehearsal.schedules import FATAL, GROWS, Fault, Planned, Schedule

TIMEOUT_S = 0.5
LONGEST_S = 30.0
"""Virtual time that one start may take, if nothing ends it."""
ENDS_S = 3.0
"""Virtual time within which all ranks end after a fault: who hangs is back after half of it."""
SECOND = 100
"""Numbers of the second job's ranks begin here."""


class Saved(NamedTuple):
    """A save that is whole.

    Attributes:
        path: Its directory.
        num_batches: Of each rank before it, since the run or this start began.
    """

    path: Path
    num_batches: int


class Start:
    """One start of a job, until it ends or is ended.

    Args:
        schedule: What was drawn.
        planned: Of this start.
        root: Of caches and saves.
        scheduler: Of the rehearsal.
        path: The save that it goes on from; None: it begins anew.
        number: Of this start.
        growth: The shards that are read, if others are appended to them.

    Attributes:
        saved: Its newest save that is whole.
        saving: The one that is being written.
        course: What it trained.
        evaluated: Samples that each rank evaluated, for each time.
        read_bytes: What each rank has read from the source.
        ended: What was done where it was ended; empty: it was not.
        happened: The faults that did happen.
    """

    def __init__(
        self, schedule: Schedule, planned: Planned, root: Path, scheduler: Scheduler, *,
        path: Path | None = None, number: int = 0, growth: Growth | None = None,
    ) -> None:  # fmt: skip
        self._growth = growth
        self._schedule, self._planned, self._number = schedule, planned, number
        source = None if growth is None else growth.source
        self.job = replace(schedule.job, nodes=planned.nodes, source=source)
        self._root, self._scheduler, self._faults = root, scheduler, list(planned.faults)
        self._from = path
        self.saved: Saved | None = None
        self.saving: Saved | None = None
        self.course: Course = [[] for _ in range(sum(planned.nodes))]
        self.evaluated: list[list[list[int]]] = [[] for _ in self.course]
        self.read_bytes = [0] * len(self.course)
        self.ended = ""
        self.happened: list[str] = []
        self._living: set[int] = set()
        self._gone: set[int] = set()
        self._errors: dict[int, BaseException] = {}
        self._first_point = scheduler.num_points
        self._network = Network(scheduler, timeout_s=TIMEOUT_S)

    def run(self) -> None:
        """Run all ranks.

        Raises:
            AssertionError: If what they trained or how long they waited is wrong.
            BaseException: What a rank raised that nothing had disturbed.
        """
        scheduler = self._scheduler
        self._begin(self._train, self._network, first=0)
        scheduler.run(until=lambda: not self._living, latest_s=scheduler.now + LONGEST_S)
        for rank in {task.rank for task in scheduler.tasks}:
            scheduler.freeze(rank)
        for error in self._errors.values():
            if not (self.ended and isinstance(error, DataioError | OSError)):
                raise error
        said = " ".join(
            str(error) for error in self._errors.values() if isinstance(error, StallError)
        )
        named = "ranks " in said or any(f"for rank {rank}" in said for rank in self._gone)
        # Who waits for a rank that pauses, for a slow disk, or for a cache of the second job, is
        # late itself, and may be named for it.
        named |= not {"pause", "second", "slow"}.isdisjoint(self.happened)
        assert named or not (said and self._gone), f"{self._gone} are not named: {said}"
        audit.check_steps(self.course)
        for ranks in zip(*self.evaluated, strict=False):
            assert sorted(i for ids in ranks for i in ids) == [*range(13)], f"evaluated: {ranks}"

    def _begin(self, train: Callable[[World], None], network: Network, *, first: int) -> None:
        for world in network.worlds(self._planned.nodes):
            number = first + world.rank
            self._living.add(number)
            self._scheduler.spawn(
                lambda world=world, number=number: self._rank(world, number, train, network),  # type: ignore[misc]
                name=f"rank {number}", rank=number,
            )  # fmt: skip

    def pass_point(self, task: Task, what: str) -> None:
        """Let happen what is to happen at this point.

        Raises:
            OSError: If it is an operation on a file that is to fail.
        """
        if not self._faults:
            return
        passed = self._scheduler.num_points - self._first_point
        for fault in self._faults:
            if passed < fault.point:
                return
            if fault.how in ("error", "full") and not _is_of_files(
                what, writes=fault.how == "full"
            ):
                continue
            self._faults.remove(fault)
            self._happen(fault, task, what)
            return

    def _happen(self, fault: Fault, task: Task, what: str) -> None:
        scheduler = self._scheduler
        self.happened.append(fault.how)
        if fault.how in FATAL:
            self.ended = self.ended or what
            scheduler.latest_s = min(scheduler.latest_s, scheduler.now + ENDS_S)
        if fault.how == "all":
            self._kill(set(self._living))
        elif fault.how in ("one", "hang"):
            self._gone |= {task.rank} if task.rank < SECOND else set()
            if fault.how == "hang":
                scheduler.suspend(task.rank, 3 * TIMEOUT_S)
                # Who is alone and comes back goes on.
                scheduler.latest_s += 3 * TIMEOUT_S * (self.happened.count("hang") - 1)
            else:
                self._kill({task.rank})
        elif fault.how == "pause":
            scheduler.suspend(task.rank, TIMEOUT_S / 3)
        elif fault.how == "error":
            raise OSError(5, f"a broken disk, as rehearsed: {what}")
        elif fault.how == "full":
            raise OSError(28, f"a full disk, as rehearsed: {what}")
        elif fault.how == "link":
            self._network.ended = f"rank {task.rank}: the connection was lost"
        elif fault.how == "slow":
            scheduler.sleep(TIMEOUT_S / 4)
        elif fault.how == GROWS and self._growth is not None:
            self._growth.append()
        elif fault.how == "clock":
            scheduler.wall_s += scheduler.random.choice([-1e6, -60.0, 3600.0, 1e6])
        else:
            network = Network(scheduler, timeout_s=TIMEOUT_S)
            first = SECOND * self.happened.count("second")
            self._begin(self._train_beside, network, first=first)

    def _kill(self, ranks: set[int]) -> None:
        for rank in ranks:
            self._scheduler.freeze(rank)
        self._living -= ranks

    def _rank(
        self, world: World, number: int, train: Callable[[World], None], network: Network
    ) -> None:
        try:
            train(world)
        except BaseException as error:
            self._errors[number] = error
            network.ended = network.ended or f"rank {world.rank}: {error}"
        # What it has begun ends with it, as a process does: nothing may be left that writes.
        self._scheduler.wait(
            lambda: sum(task.rank == number for task in self._scheduler.tasks) == 1,
            "wait for its threads", timeout_s=LONGEST_S,
        )  # fmt: skip
        self._living.discard(number)

    def _train(self, world: World) -> None:
        job, growth = self.job, self._growth
        before = growth.num_samples if growth is not None else 0
        with self._open(world) as loader:
            if self._from is not None:
                loader.restore(self._from)
            evaluation = None
            if self._schedule.evaluates and isinstance(loader, Loader):
                evaluation = loader.evaluation(Samples(13, job.width, "measured"))
            is_first = self._from is not None
            for epoch in loader.epochs(job.epochs):
                if growth is not None and world.rank == 0 and isinstance(loader, Loader):
                    growth.check(loader, before, is_first=is_first)
                for batch in loader:
                    self._take("train", loader, epoch, batch, world.rank)
                    if (epoch, loader.step) in job.saves:
                        self._save(loader, world.rank)
                if isinstance(loader, Loader):
                    for batch in loader.refresh():
                        self._take("refresh", loader, epoch, batch, world.rank)
                if evaluation is not None:
                    batches = [self._check_rows(batch) for batch in evaluation]
                    self.evaluated[world.rank].append([i for ids in batches for i in ids if i >= 0])
                before, is_first = growth.num_samples if growth is not None else 0, False
            loader.save(self._root / "saves" / "final")

    def _train_beside(self, world: World) -> None:
        """Train two epochs as another job that finds the same cache."""
        job = replace(self.job, options=self.job.options | {"seed": 6, "importance": None})
        with job.make(world, self._root / "cache") as loader:
            for _ in loader.epochs(2):
                for batch in loader:
                    self._check_rows(batch)

    def _open(self, world: World) -> Loader | Mixture:
        job, cache = self.job, self._root / "cache"
        if self._schedule.logs_rows:
            reports = Reports(progress=False, rows=self._root / "rows")
            job = replace(job, options=job.options | {"reports": reports})
        if not self._schedule.mixed:
            return job.make(world, cache)
        others = replace(
            job, num_samples=20, name="others", options=job.options | {"batch_size": 2}
        )
        with ExitStack() as opened:
            loaders = {
                name: opened.enter_context(each.make(world, cache))
                for name, each in {"samples": job, "others": others}.items()
            }
            opened.pop_all()  # The mixture closes them.
        return Mixture(loaders, {"samples": 2, "others": 1}, steps=9, seed=3)

    def _save(self, loader: Loader | Mixture, rank: int) -> None:
        at = "last" if self._schedule.one_save else f"{self._number}-{loader.epoch}-{loader.step}"
        saved = Saved(self._root / "saves" / at, len(self.course[rank]))
        self.saving = saved
        loader.save(saved.path)
        if rank == 0:
            self.saved, self.saving = saved, None

    def _take(self, kind: str, loader: Loader | Mixture, epoch: int, batch: Any, rank: int) -> None:
        ids = self._check_rows(batch)
        dataset = batch.get("dataset", "samples")
        lap = loader.loaders[dataset].epoch if isinstance(loader, Mixture) else loader.epoch
        self.course[rank].append(Delivered(kind, dataset, epoch, lap, loader.step, tuple(ids)))
        if isinstance(loader, Loader):
            self.read_bytes[rank] = loader._session.source.bytes_read
        # What is reported is a function of the sample and the epoch.
        values = outcome(batch["sample_id"].numpy(), lap)
        loader.report(batch, *map(torch.from_numpy, values.values()))

    def _check_rows(self, batch: Any) -> list[int]:
        valid = batch["slot"].numpy() >= 0
        for row in np.flatnonzero(valid).tolist():
            self.job.check_row(batch, row)
        return np.where(valid, batch["sample_id"].numpy(), -1).tolist()  # type: ignore[no-any-return]


def _is_of_files(what: str, *, writes: bool) -> bool:
    verbs = ("create", "write", "claim", "store") if writes else ("",)
    below = any(f" {name}/" in what for name in ("cache", "saves", "rows"))
    return below and what.startswith(verbs)
