"""A job of several ranks rehearsed: killed where a seed says, started again, and audited.

What runs is the shipped loader with its plan, cache, exchange and saves; the seed draws the order of
all threads, how long messages take, when the job is killed and what the disks keep of it.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import shuffle
from dataio import Staging
from dataio.world import World
from tests.faults.recording import KINDS
from tests.faults.samples import Job, Trained, check_each_once, check_files
from tests.rehearsal.disks import Disks
from tests.rehearsal.network import Network
from tests.rehearsal.scheduler import Scheduler, Task, rehearsed

TIMEOUT_S = 30.0
LONGEST_S = 120.0
"""Virtual time that one start may take."""
POINTS = 6000
"""Among so many points a kill is drawn: some come after the job's end."""


@dataclass
class Rehearsal:
    """One course of events.

    Attributes:
        seed: Of all of it.
        job: What is run.
        digest: A hash of all that happened.
        kills: What happened to each start: point, what was done there, and what the disks kept.
        num_points: Passed in all.
    """

    seed: int
    job: Job
    digest: str = ""
    kills: list[str] = field(default_factory=list)
    num_points: int = 0


def draw_job(draw: random.Random) -> Job:
    """Draw what is run."""
    shuffles: list[Any] = [
        shuffle.Local(), shuffle.Partial(0.4), shuffle.Partial(0.1), shuffle.Global(),
        shuffle.Global(moves=True),
    ]  # fmt: skip
    options: dict[str, Any] = {"shuffle": draw.choice(shuffles)}
    if draw.random() < 0.3:
        options["staging"] = Staging(when="overlap")
    epochs = 3
    saves = tuple((draw.randrange(epochs), draw.randint(1, 5)) for _ in range(draw.randint(0, 4)))
    nodes = draw.choice([(1, 1), (2, 1), (2, 2), (1, 1, 1), (2, 2, 2, 2)])
    return Job(
        nodes, draw.choice(["fixed", "variable", "both"]), epochs=epochs, saves=saves,
        options=options,
    )  # fmt: skip


class Start:
    """One start of a job, until it ends or is killed.

    Args:
        job: What is run.
        root: Of caches and saves.
        scheduler: Of the rehearsal.
    """

    def __init__(self, job: Job, root: Path, scheduler: Scheduler) -> None:
        self._job, self._root, self._scheduler = job, root, scheduler
        self.trained: Trained = {}
        self.restored: Path | None = None
        self.killed = ""
        self._ended: dict[int, BaseException | None] = {}

    def run(self, newest: Path | None) -> None:
        """Run all ranks, from a save if there is one.

        Raises:
            BaseException: What a rank raised, unless the job was killed.
        """
        network = Network(self._scheduler, timeout_s=TIMEOUT_S)
        self.newest, begun_s = newest, self._scheduler.now
        worlds = network.worlds(self._job.nodes)
        for world in worlds:
            self._scheduler.spawn(
                lambda world=world: self._rank(world), name=f"rank {world.rank}", rank=world.rank
            )
        self._scheduler.run(
            until=lambda: bool(self.killed)
            or (len(self._ended) == len(worlds) and not self._scheduler.tasks)
        )
        for rank in range(len(worlds)):
            self._scheduler.freeze(rank)
        for error in self._ended.values():
            if error is not None and not self.killed:
                raise error
        assert self._scheduler.now - begun_s < LONGEST_S, "a start took too long"

    def _rank(self, world: World) -> None:
        try:
            self._train(world)
            self._ended[world.rank] = None
        except BaseException as error:
            self._ended[world.rank] = error

    def _train(self, world: World) -> None:
        job, newest = self._job, self.newest
        with job.make(world, self._root / "cache") as loader:
            if newest is not None:
                loader.restore(newest)
            for epoch in loader.epochs(job.epochs):
                for batch in loader:
                    valid = batch["slot"].numpy() >= 0
                    for row in np.flatnonzero(valid).tolist():
                        job.check_row(batch, row)
                    ids = np.where(valid, batch["sample_id"].numpy(), -1)
                    self.trained[epoch, loader.step, world.rank] = tuple(ids.tolist())
                    if (epoch, loader.step) in job.saves:
                        loader.save(path := self._root / "saves" / f"{epoch}-{loader.step}")
                        if world.rank == 0:
                            self.newest = path


def rehearse(seed: int, root: Path, *, kills: int | None = None) -> Rehearsal:
    """Run a job as a seed draws it, and audit it.

    Args:
        seed: Of everything.
        root: A new directory.
        kills: Of the job; None: drawn.

    Raises:
        AssertionError: If an invariant does not hold.
    """
    draw = random.Random(seed)
    job = draw_job(draw)
    num_kills = draw.choice([0, 1, 1, 2, 3]) if kills is None else kills
    found = Rehearsal(seed, job)
    expected = _undisturbed(job, root / "undisturbed")
    check_each_once(job, expected)
    start: Start
    kill_at = draw.randrange(POINTS)

    def on_point(task: Task, what: str) -> None:
        if len(found.kills) < num_kills and scheduler.num_points - begun >= kill_at:
            start.killed = what
            for rank in range(sum(job.nodes)):
                scheduler.freeze(rank)

    scheduler = Scheduler(seed, on_point=on_point)
    disks = Disks(root / "rehearsed", scheduler)
    disks.root.mkdir(parents=True)
    newest: Path | None = None
    with rehearsed(scheduler), disks.recording():
        while True:
            begun = scheduler.num_points
            start = Start(job, disks.root, scheduler)
            start.run(newest)
            newest = start.newest
            differs = {step for step, ids in start.trained.items() if expected[step] != ids}
            assert not differs, f"seed {seed}, {found.kills}: other rows in steps {sorted(differs)}"
            if not start.killed:
                break
            disks.close_all()
            kind = draw.choice(KINDS)
            found.kills.append(f"{scheduler.num_points - begun}: {start.killed}: {kind}")
            disks.crash(kind)
            kill_at = draw.randrange(POINTS)
    missed = expected.keys() - start.trained.keys()
    assert newest is not None or not missed, f"not trained: {sorted(missed)}"
    check_files(job, disks.root / "cache")
    found.digest, found.num_points = scheduler.digest(), scheduler.num_points
    return found


def _undisturbed(job: Job, root: Path) -> Trained:
    scheduler = Scheduler(0)
    root.mkdir(parents=True)
    with rehearsed(scheduler):
        start = Start(job, root, scheduler)
        start.run(None)
    return start.trained
