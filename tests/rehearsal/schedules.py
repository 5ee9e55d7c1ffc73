"""What a seed draws of a rehearsal: the job, its starts, their faults; and shorter ones. Pure."""

import random  # noqa: TID251 - of no sample: of what happens to a job
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import shuffle
from dataio import Staging, Workers
from importance import Full, InfoBatch, Kakurenbo, RandomPrune, Weighted
from tests.faults.recording import KINDS
from tests.faults.samples import WIDE, Job

POINTS = (20, 300, 3000)
"""A fault comes within so many points of a start: while it opens, stages, or trains."""
FATAL = ("all", "one", "error", "full", "hang", "link")
HARMLESS = ("pause", "slow", "clock", "second")
GROWS = "grow"
GROWS_FRACTION = 0.15
Nodes = tuple[int, ...]


@dataclass(frozen=True)
class Fault:
    """What happens to a start of a job.

    Attributes:
        point: After so many points of the start.
        how: ``"all"``: every process is killed; ``"one"``: that whose point it is; ``"hang"``: that
            one stops for longer than others wait, and comes back; ``"error"``, ``"full"``: its next
            operation on a file fails, as by a broken or a full disk; ``"link"``: its connections
            are lost. Those end the start. These do not: ``"pause"``: it stops for less than others
            wait; ``"slow"``: what it does takes long; ``"clock"``: the clock of the day is set;
            ``"second"``: another job begins with the same cache; ``"grow"``: a shard is appended.
    """

    point: int
    how: str


@dataclass(frozen=True)
class Planned:
    """A start of a job.

    Attributes:
        nodes: Ranks of each node.
        faults: In the order of their points.
        kept: What the disks keep if it is ended, as `recording.KINDS` names it; ``"torn"``: of
            what was not flushed any part.
        lost: Node whose cache is gone altogether then; None: no node's.
    """

    nodes: Nodes
    faults: tuple[Fault, ...] = ()
    kept: str = "kill"
    lost: int | None = None


@dataclass(frozen=True)
class Schedule:
    """What a seed draws of a rehearsal.

    Attributes:
        seed: Of the order of events.
        job: What is run.
        starts: Of it, in order; the last comes to its end.
        mixed: Whether it draws from two datasets.
        logs_rows: Whether it keeps a log of rows.
        evaluates: Whether it evaluates as each epoch ends.
        one_save: Whether all saves have one name, else each has its own.
        grows: Whether shards are appended to its dataset.
    """

    seed: int
    job: Job
    starts: tuple[Planned, ...]
    mixed: bool = False
    logs_rows: bool = False
    evaluates: bool = False
    one_save: bool = False
    grows: bool = False

    @property
    def same_nodes(self) -> bool:
        """Whether all starts have the same ranks and samples: they train as an undisturbed one."""
        return len({start.nodes for start in self.starts}) == 1 and not self.grows

    def __str__(self) -> str:
        job = ", ".join(
            f"{name}={value}"
            for name, value in (vars(self.job) | vars(self)).items()
            if name not in ("job", "starts", "seed", "nodes") and value
        )
        starts = "".join(f"\n    {start}" for start in self.starts)
        return f"seed {self.seed}: {job}{starts}"


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
    mixed = draw.random() < 0.15
    if draw.random() < 0.5 and not mixed:
        options["importance"] = draw.choice(importances)
    if draw.random() < 0.3:
        options["staging"] = Staging(when="overlap")
    if draw.random() < 0.2:
        options["workers"] = Workers(threads=2)
    epochs = 3
    saves = tuple((draw.randrange(epochs), draw.randint(1, 5)) for _ in range(draw.randint(0, 4)))
    layouts: list[Nodes] = [(1, 1), (2, 1), (2, 2), (1, 1, 1), (2, 2, 2, 2), (1,)]
    nodes = draw.choice(layouts)
    job = Job(
        nodes, draw.choice(["fixed", "variable", "both"]), epochs=epochs, saves=saves,
        options=options,
    )  # fmt: skip
    if nodes == (1, 1) and "staging" not in options and not mixed and draw.random() < 0.5:
        job = replace(job, width=WIDE, num_samples=120, cache={"quota": 620_000})
    # Mixtures and quotas belong to the ranks that they were drawn for.
    moves = draw.random() < 0.3 and not (mixed or job.cache)
    starts = tuple(
        Planned(
            draw.choice(layouts) if moves and number else nodes, _draw_faults(draw),
            draw.choice([*KINDS, "torn"]),
        )
        for number in range(draw.choice([0, 1, 1, 2, 3]))
    )  # fmt: skip
    last = Planned(draw.choice(layouts) if moves else nodes)
    if not (moves or mixed or job.cache) and len(nodes) > 1 == len(set(nodes)):
        job = replace(job, cache=draw.choice([{}, {"copies": 2}]))
        lost = [None, *range(len(nodes))] if job.cache else [None]
        starts = tuple(replace(start, lost=draw.choice(lost)) for start in starts)
    schedule = Schedule(
        seed, job, (*starts, last), mixed=mixed, logs_rows=not mixed and draw.random() < 0.3,
        evaluates=not (mixed or job.cache) and draw.random() < 0.2,
        one_save=not moves and draw.random() < 0.3,
    )  # fmt: skip
    if mixed or job.cache or draw.random() >= GROWS_FRACTION:
        return schedule
    grown = tuple(
        replace(start, faults=_in_order(*start.faults, *_draw_growth(draw)))
        for start in schedule.starts
    )
    return replace(schedule, starts=grown, one_save=False, grows=True)


def _draw_growth(draw: random.Random) -> list[Fault]:
    return [Fault(draw.randrange(draw.choice(POINTS)), GROWS) for _ in range(draw.randint(0, 2))]


def _draw_faults(draw: random.Random) -> tuple[Fault, ...]:
    faults = [
        Fault(draw.randrange(draw.choice(POINTS)), draw.choice(hows))
        for hows, share in (
            (FATAL[:1] * 4 + FATAL, 0.95),
            ((*HARMLESS, "second"), 0.4),
            (FATAL + HARMLESS, 0.2),
        )
        if draw.random() < share
    ]
    return _in_order(*faults)


def _in_order(*faults: Fault) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.point))


LIVE = ("kill", "power", "hang", "pause", "part", "late", "slow", "error", "join", "leave")
PLACES = (
    "", "", "", "averages", "sum", "has averaged", "has stepped", "meeting-", "rank-", "list-",
    "members", "store", "connect", "shut", "take over", "failed",
)  # fmt: skip
"""Words of what is done at a point, while all is well first."""
NUM_TRAINING = 7


@dataclass(frozen=True)
class LiveFault:
    """What happens to a job under `dataio.live`.

    Attributes:
        point: After so many points since it began, or since the fault before.
        where: A word of what is done there.
        how: ``"kill"``: a process ends, and its connections; ``"power"``: a node ends, and nobody
            is told; ``"hang"``: a rank stops for longer than others wait, and comes back;
            ``"pause"``: for less; ``"part"``: the network falls in two for a while; ``"late"``: a
            node sees the files of others late; ``"slow"``: what it does takes long; ``"error"``:
            an operation on a file fails; ``"join"``: a node comes; ``"leave"``: a rank is asked to.
    """

    point: int
    where: str
    how: str


@dataclass(frozen=True)
class LiveSchedule:
    """What a seed draws of a rehearsal of `dataio.live`.

    Attributes:
        seed: Of the order of events.
        job: What is run, in one start.
        faults: One after the other.
        late_reports: Whether a step is reported behind it, else before it.
    """

    seed: int
    job: Job
    faults: tuple[LiveFault, ...]
    late_reports: bool = False

    def __str__(self) -> str:
        faults = "".join(f"\n    {fault}" for fault in self.faults)
        return f"live seed {self.seed}: {self.job}{faults}"


def draw_live(seed: int) -> LiveSchedule:
    """Draw a rehearsal of `dataio.live`."""
    draw = random.Random(f"live {seed}")
    options: dict[str, Any] = {
        "shuffle": draw.choice([shuffle.Local(), shuffle.Partial(0.4), shuffle.Global()])
    }
    if draw.random() < 0.2:
        options["staging"] = Staging(when="overlap")
    if draw.random() < 0.2:
        options["workers"] = Workers(threads=2)
    nodes = draw.choice([(1, 1), (1, 1, 1), (2, 2), (1, 1, 1, 1), (2, 1)])
    copies = {"copies": 2} if len({*nodes}) == 1 and draw.random() < 0.4 else {}
    job = Job(
        nodes, draw.choice(["fixed", "variable", "both"]), epochs=2, options=options, cache=copies
    )
    faults = tuple(
        LiveFault(
            draw.randrange(draw.choice([20, 300, most])), draw.choice(places), draw.choice(hows)
        )
        for hows, places, most, share in (
            (LIVE[:1] * 4 + LIVE, PLACES[:NUM_TRAINING], 1500, 1.0), (LIVE, PLACES, 600, 0.5),
            (LIVE, PLACES, 600, 0.3),
        )
        if draw.random() < share
    )  # fmt: skip
    if draw.random() < 0.6:
        policies: list[Any] = [
            Full(columns=("loss", "wrong")), InfoBatch(0.5, delta=1.0), RandomPrune(0.3, delta=1.0),
            Kakurenbo(0.4, tau=0.3, drops=(), alphas=(1.0,), warmup_epochs=0),
            Weighted([1 + i % 4 for i in range(job.num_samples)]),
        ]  # fmt: skip
        chosen = options | {"importance": draw.choice(policies)}
        job = replace(job, epochs=draw.choice([2, 3]), options=chosen)
    return LiveSchedule(seed, job, faults, late_reports=draw.random() < 0.5)


def shorter_live(schedule: LiveSchedule) -> Iterator[LiveSchedule]:
    """Yield schedules with less in them, the shortest first."""
    faults, job = schedule.faults, schedule.job
    for number in range(len(faults)):
        yield replace(schedule, faults=faults[:number] + faults[number + 1 :])
    smaller = [replace(job, epochs=1)] if job.epochs > 1 else []
    smaller += [replace(job, cache={})] if job.cache else []
    smaller += [replace(job, options={})] if job.options else []
    smaller += [replace(job, kind="fixed")] if job.kind != "fixed" else []
    smaller += [replace(job, nodes=job.nodes[:-1])] if len(job.nodes) > 2 else []
    for less in smaller:
        yield replace(schedule, job=less)


def shorter(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules with less in them, the shortest first."""
    starts, job = schedule.starts, schedule.job
    for number in range(len(starts) - 1):
        yield replace(schedule, starts=starts[:number] + starts[number + 1 :])
    for number, start in enumerate(starts):
        for fault in range(len(start.faults)):
            fewer = replace(start, faults=start.faults[:fault] + start.faults[fault + 1 :])
            yield replace(schedule, starts=(*starts[:number], fewer, *starts[number + 1 :]))
    for name in ("mixed", "logs_rows", "evaluates", "one_save", "grows"):
        if getattr(schedule, name):
            without: dict[str, Any] = {name: False}
            yield replace(schedule, **without)
    smaller = [replace(job, epochs=epochs) for epochs in range(1, job.epochs)]
    smaller += [
        replace(job, saves=job.saves[:number] + job.saves[number + 1 :])
        for number in range(len(job.saves))
    ]
    smaller += [
        replace(job, options={name: value for name, value in job.options.items() if name != gone})
        for gone in job.options
    ]
    smaller += [replace(job, kind="fixed")] if job.kind != "fixed" else []
    for less in smaller:
        yield replace(schedule, job=less)
    for nodes in ((1,), (1, 1), (2, 2)):
        if sum(nodes) < sum(job.nodes) and not job.cache:
            fewer_ranks = tuple(replace(start, nodes=nodes) for start in starts)
            yield replace(schedule, job=replace(job, nodes=nodes), starts=fewer_ranks)
