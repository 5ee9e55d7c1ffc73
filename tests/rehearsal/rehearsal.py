"""A job of several ranks rehearsed: ended where a seed says, started again, and audited.

What runs is the shipped loader with its plan, cache, exchange and saves. The seed draws the job,
the order of all threads, how long messages take, when and how the job ends, what the disks keep.
"""

import random  # noqa: TID251 - of no sample: of what happens to a job
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shuffle
from dataio import Loader, Staging
from dataio.base.errors import DataioError
from dataio.world import World
from importance import Full, InfoBatch, Kakurenbo
from tests.faults.kill.job import outcome
from tests.faults.recording import KINDS
from tests.faults.samples import WIDE, Job, Trained, check_each_once, check_files
from tests.rehearsal.disks import Disks
from tests.rehearsal.network import Network
from tests.rehearsal.scheduler import TEMPORARY, Scheduler, Task, rehearsed

TIMEOUT_S = 2.0
LONGEST_S = 60.0
"""Virtual time that one start may take, whatever happens."""
POINTS = (20, 300, 3000)
"""A job ends within so many points of its start: while it opens, stages, or trains."""


@dataclass(frozen=True)
class End:
    """How one start of a job is ended.

    Attributes:
        point: After so many points of the start.
        how: ``"all"``: every process is killed; ``"one"``: that whose point it is, and the others
            wait for it in vain; ``"error"``: its next operation on a file fails.
        kept: What the disks keep, as `recording.KINDS` names it.
        lost: Node whose cache is gone altogether; None: no node's.
    """

    point: int
    how: str
    kept: str
    lost: int | None = None


@dataclass(frozen=True)
class Schedule:
    """What a seed draws of a rehearsal.

    Attributes:
        seed: Of the order of events.
        job: What is run.
        ends: Of its starts, in order; the start after the last runs to its end.
    """

    seed: int
    job: Job
    ends: tuple[End, ...]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.job.options.items())
        job = f"{self.job.nodes} {self.job.kind}, saves {self.job.saves}, {options}"
        return f"seed {self.seed}: {job}, {self.job.cache}; ends {self.ends}"


@dataclass(frozen=True)
class Audited:
    """A rehearsal that went well.

    Attributes:
        digest: A hash of all that happened.
        num_points: Passed, of all its starts.
        ended: What was being done where starts were ended.
    """

    digest: str
    num_points: int
    ended: tuple[str, ...]


def draw_schedule(seed: int) -> Schedule:
    """Draw a rehearsal."""
    draw = random.Random(seed)
    shuffles: list[Any] = [
        shuffle.Local(), shuffle.Partial(0.4), shuffle.Partial(0.1), shuffle.Global(),
        shuffle.Global(moves=True),
    ]  # fmt: skip
    importances: list[Any] = [
        Full(columns=("loss", "forgotten")), InfoBatch(0.5),
        Kakurenbo(0.4, tau=0.3, drops=(), alphas=(1.0,), warmup_epochs=0),
    ]  # fmt: skip
    options: dict[str, Any] = {"shuffle": draw.choice(shuffles)}
    if draw.random() < 0.4:
        options["importance"] = draw.choice(importances)
    if draw.random() < 0.3:
        options["staging"] = Staging(when="overlap")
    epochs = 3
    saves = tuple((draw.randrange(epochs), draw.randint(1, 5)) for _ in range(draw.randint(0, 4)))
    job = Job(
        draw.choice([(1, 1), (2, 1), (2, 2), (1, 1, 1), (2, 2, 2, 2)]),
        draw.choice(["fixed", "variable", "both"]), epochs=epochs, saves=saves, options=options,
    )  # fmt: skip
    if job.nodes == (1, 1) and "staging" not in options and draw.random() < 0.5:
        job = replace(job, width=WIDE, num_samples=120, cache={"quota": 620_000})
    ends = tuple(
        End(
            draw.randrange(draw.choice(POINTS)), draw.choice(["all", "all", "one", "error"]),
            draw.choice(KINDS),
        )
        for _ in range(draw.choice([0, 1, 1, 2, 3]))
    )  # fmt: skip
    if len(job.nodes) > 1 == len(set(job.nodes)) and not job.cache and draw.random() < 0.5:
        job = replace(job, cache={"copies": 2})
        lost = [None, *range(len(job.nodes))]
        ends = tuple(replace(end, lost=draw.choice(lost)) for end in ends)
    return Schedule(seed, job, ends)


class Start:
    """One start of a job, until it ends or is ended.

    Args:
        job: What is run.
        root: Of caches and saves.
        scheduler: Of the rehearsal.
        newest: The save that it goes on from; None: it begins anew.
        end: How it is ended; None: it is not.

    Attributes:
        newest: The save that is whole.
        trained: The rows of each step.
        ended: What was done where it was ended; empty: it was not.
    """

    def __init__(
        self, job: Job, root: Path, scheduler: Scheduler, *, newest: Path | None, end: End | None
    ) -> None:
        self._job, self._root, self._scheduler, self._end = job, root, scheduler, end
        self.newest, self._from = newest, newest
        self.trained: Trained = {}
        self.ended = ""
        self._living = set(range(sum(job.nodes)))
        self._errors: dict[int, BaseException] = {}
        self._first_point, self._fails = scheduler.num_points, False

    def run(self) -> None:
        """Run all ranks.

        Raises:
            AssertionError: If what they trained or how long they waited is wrong.
            BaseException: What a rank raised that nothing had disturbed.
        """
        network, begun_s = Network(self._scheduler, timeout_s=TIMEOUT_S), self._scheduler.now
        for world in network.worlds(self._job.nodes):
            self._scheduler.spawn(
                lambda world=world: self._rank(world, network),  # type: ignore[misc]
                name=f"rank {world.rank}", rank=world.rank,
            )  # fmt: skip
        self._scheduler.run(until=lambda: not self._living, latest_s=begun_s + LONGEST_S)
        for rank in range(sum(self._job.nodes)):
            self._scheduler.freeze(rank)
        for error in self._errors.values():
            if not self.ended or not isinstance(error, (DataioError, OSError)):
                raise error

    def pass_point(self, task: Task, what: str) -> None:
        """End what is to be ended at this point.

        Raises:
            OSError: If it is an operation on a file that is to fail.
        """
        end = self._end
        if end is None or self._scheduler.num_points - self._first_point < end.point:
            return
        if end.how == "error":
            if " cache/" not in what and " saves/" not in what:
                return
            self._end, self.ended = None, TEMPORARY.sub("", what)
            raise OSError(5, f"a broken disk, as rehearsed: {what}")
        self._end, self.ended = None, TEMPORARY.sub("", what)
        for rank in list(self._living) if end.how == "all" else [task.rank]:
            self._scheduler.freeze(rank)
            self._living.discard(rank)

    def _rank(self, world: World, network: Network) -> None:
        try:
            self._train(world)
        except BaseException as error:
            self._errors[world.rank] = error
            network.ended = network.ended or f"rank {world.rank}: {error}"
        # What it has begun ends with it, as a process does: nothing may be left that writes.
        self._scheduler.wait(
            lambda: sum(task.rank == world.rank for task in self._scheduler.tasks) == 1,
            "wait for its threads", timeout_s=LONGEST_S,
        )  # fmt: skip
        self._living.discard(world.rank)

    def _train(self, world: World) -> None:
        job = self._job
        with job.make(world, self._root / "cache") as loader:
            if self._from is not None:
                loader.restore(self._from)
            for epoch in loader.epochs(job.epochs):
                for batch in loader:
                    self._take(loader, epoch, batch, world.rank)
                    if (epoch, loader.step) in job.saves:
                        loader.save(path := self._root / "saves" / f"{epoch}-{loader.step}")
                        if world.rank == 0:
                            self.newest = path
                for batch in loader.refresh():
                    _report(loader, batch)

    def _take(self, loader: Loader, epoch: int, batch: Any, rank: int) -> None:
        valid = batch["slot"].numpy() >= 0
        for row in np.flatnonzero(valid).tolist():
            self._job.check_row(batch, row)
        ids = np.where(valid, batch["sample_id"].numpy(), -1)
        self.trained[epoch, loader.step, rank] = tuple(ids.tolist())
        _report(loader, batch)


def _report(loader: Loader, batch: Any) -> None:
    """Report what is a function of the sample and the epoch."""
    values = outcome(batch["sample_id"].numpy(), loader.epoch)
    loader.report(batch, *map(torch.from_numpy, values.values()))


def rehearse(schedule: Schedule, root: Path) -> Audited:
    """Run a job as drawn, and audit it.

    Args:
        schedule: What is drawn.
        root: A new directory.

    Raises:
        AssertionError: If an invariant does not hold.
    """
    job = schedule.job
    expected = _undisturbed(job, root / "undisturbed")
    if "importance" not in job.options:
        check_each_once(job, expected)
    start: Start

    def on_point(task: Task, what: str) -> None:
        start.pass_point(task, what)

    scheduler = Scheduler(schedule.seed, on_point=on_point)
    disks = Disks(root / "rehearsed", scheduler)
    disks.root.mkdir(parents=True)
    newest: Path | None = None
    ended: list[str] = []
    trained: set[tuple[int, int, int]] = set()
    with rehearsed(scheduler), disks.recording():
        for end in (*schedule.ends, None):
            start = Start(job, disks.root, scheduler, newest=newest, end=end)
            start.run()
            newest = start.newest
            differs = sorted(at for at, ids in start.trained.items() if expected[at] != ids)
            assert not differs, f"after {ended}, other rows in steps {differs}"
            trained |= start.trained.keys()
            ended.append(start.ended or "the end")
            disks.close_all()
            if end is not None and start.ended:
                disks.crash(end.kept)
                for file in disks.root.glob(f"cache/*/node{end.lost}/*"):
                    file.unlink()
    missed = sorted(expected.keys() - trained)
    assert not missed, f"after {ended}, not trained: {missed}"
    if "quota" not in job.cache:
        check_files(job, disks.root / "cache")
    return Audited(scheduler.digest(), scheduler.num_points, tuple(ended))


def _undisturbed(job: Job, root: Path) -> Trained:
    scheduler = Scheduler(0)
    root.mkdir(parents=True)
    with rehearsed(scheduler):
        start = Start(job, root, scheduler, newest=None, end=None)
        start.run()
    return start.trained


def shorter(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules with less in them: one end less, or one that comes at once."""
    for number in range(len(schedule.ends)):
        yield replace(schedule, ends=_without(schedule.ends, number))
    if len(schedule.job.saves):
        for number in range(len(schedule.job.saves)):
            fewer = schedule.job.saves[:number] + schedule.job.saves[number + 1 :]
            yield replace(schedule, job=replace(schedule.job, saves=fewer))


def _without(ends: Sequence[End], number: int) -> tuple[End, ...]:
    return (*ends[:number], *ends[number + 1 :])
