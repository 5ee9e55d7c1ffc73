"""What each seed does: which job, and when and how it is interrupted. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.faults.kill.job import Options
from tests.faults.kill.points import ON_FILE, TO_NAME, Kill
from tests.faults.kill.train_job import TrainOptions

What = Literal["loader", "train"]
Launcher = Literal["fork", "mpiexec"]
Trace = Sequence[tuple[str, str]]
"""Name and part of each moment of a rank, in order."""
END_OF_EPOCH = "epoch end"
"""The part of a run between the last batch of an epoch and the first of the next."""

SLOW_SHARE = 0.3
"""Of the kills: those that come behind a call that takes long."""
SOON = 60
"""Moments of a rank after a slow call in which the kill comes."""

SHUFFLES = ("local", "partial", "global", "dealt")
STAGES = ("before", "overlap")
POLICIES = ("none", "full", "kakurenbo", "infobatch", "selective", "random", "weighted", "pooled")
NUM_PLAIN = len(SHUFFLES) * len(STAGES) * len(POLICIES)
MPI_EVERY = 23
PROCESSES_EVERY = 40
NUM_TRAININGS = 16
QUOTA = {"fixed": ("190KB", "190KB"), "variable": ("210KB", "260KB"), "both": ("210KB", "260KB")}
"""By kind and ranks on a node: less than the node's rows take."""


@dataclass(frozen=True)
class Configuration:
    """A job and its ranks.

    Attributes:
        options: Of the job.
        ranks: How many.
        per_node: Ranks on a node; the last may have fewer.
    """

    options: Options | TrainOptions
    ranks: int
    per_node: int

    def __str__(self) -> str:
        plain, own = vars(type(self.options)()), vars(self.options)
        told = [f"{name}={value}" for name, value in own.items() if value != plain[name]]
        return " ".join([f"{self.ranks} ranks ({self.per_node} a node)", *told])


@dataclass(frozen=True)
class Interruption:
    """How one start of the job ends early.

    Attributes:
        kill: The moment; None: it stops by itself, as before a time limit.
        slow: A call that takes long before that, so that what comes after it in another thread
            comes first.
        stop: Batches after which it does.
        saves: Whether it saves then.
    """

    kill: Kill | None = None
    slow: Kill | None = None
    stop: int | None = None
    saves: bool = False

    @property
    def part(self) -> str:
        """Of the run in which it comes."""
        return self.kill.part if self.kill else "clean stop"

    def __str__(self) -> str:
        if self.kill:
            return f"{self.slow}, then {self.kill}" if self.slow else str(self.kill)
        return f"clean stop after batch {self.stop}, {'' if self.saves else 'not '}saved"


def configuration(seed: int, *, what: What) -> tuple[Configuration, Launcher]:
    """Choose the job of a seed: seeds in a row go through all shuffles, stages and policies."""
    if what == "train":
        launcher: Launcher = "mpiexec" if seed % MPI_EVERY == MPI_EVERY - 1 else "fork"
        return _training(seed % NUM_TRAININGS, on_mpi=launcher == "mpiexec"), launcher
    if seed % PROCESSES_EVERY == PROCESSES_EVERY - 1:
        stage = STAGES[seed // PROCESSES_EVERY % 2]
        options = Options(stage=stage, importance="kakurenbo", num_processes=2)  # type: ignore[arg-type]
        return Configuration(options, 2, 1), "fork"
    launcher = "mpiexec" if seed % MPI_EVERY == MPI_EVERY - 1 else "fork"
    return _plain(seed % NUM_PLAIN, on_mpi=launcher == "mpiexec"), launcher


def _plain(number: int, *, on_mpi: bool) -> Configuration:
    rng = np.random.default_rng([number, 1])
    shuffle = SHUFFLES[number % 4]
    stage = STAGES[number // 4 % 2]
    importance = POLICIES[(number // 8 + number) % len(POLICIES)]
    kind = str(rng.choice(["fixed", "variable", "both", "both"]))
    mixed = bool(rng.random() < 0.15)
    limited = stage == "before" and not mixed and rng.random() < 0.3
    layouts = [(2, 1), (2, 1), (2, 1), (4, 2), (3, 2), (2, 2), (1, 1)]
    ranks, per_node = layouts[rng.integers(len(layouts))]
    if on_mpi:
        ranks, per_node = 4, 2
    options = Options(
        shuffle=shuffle,  # type: ignore[arg-type]
        importance=importance,  # type: ignore[arg-type]
        stage=stage,  # type: ignore[arg-type]
        exchange=float(rng.choice([0.1, 0.1, 0.4])),
        kind=kind,  # type: ignore[arg-type]
        quota=QUOTA[kind][per_node - 1] if limited else None,
        mixed=mixed,
        num_threads=int(rng.choice([0, 0, 2])),
        saves=str(rng.choice(["own", "same", "turns"])),  # type: ignore[arg-type]
        save_steps=int(rng.choice([2, 3, 5])),
        # Else an epoch may end and be committed with no save since the one before.
        save_ends=bool(rng.random() < 0.6),
    )
    return Configuration(options, ranks, per_node)


def _training(number: int, *, on_mpi: bool) -> Configuration:
    rng = np.random.default_rng([number, 3])
    shuffles = (
        ("shuffle.exchange=0.1",),
        ("shuffle.kind=global", "shuffle.moves=true"),
        ("shuffle.kind=local",),
        ("shuffle.rows=scores", "shuffle.exchange=0.2"),
    )
    policies = ("full", "kakurenbo", "random", "infobatch")
    shuffle, policy = shuffles[number % 4], policies[(number // 4 + number) % 4]
    importance: tuple[str, ...] = ()
    if policy != "full":
        importance = (f"importance.kind={policy}", "importance.fraction=0.4")
    if policy == "kakurenbo":
        importance = (*importance, "importance.tau=0")
    if "shuffle.rows=scores" in shuffle and policy in ("full", "random"):
        importance = ("importance.kind=full", 'importance.columns=["loss"]')
    ranks = 2 if on_mpi else int(rng.choice([1, 2, 2]))
    overrides = (
        *shuffle, *importance, "data.batch_size=8",
        f"run.checkpoint_steps={rng.choice([0, 2, 3])}",
        f"run.checkpoint_async={'true' if rng.random() < 0.3 else 'false'}",
        f"mesh.dp_replicate={ranks}",
    )  # fmt: skip
    stage = STAGES[number // 2 % 2]
    return Configuration(TrainOptions(stage=stage, overrides=overrides), ranks, 1)


def draw(
    seed: int, attempt: int, *, first: Sequence[Trace], later: Sequence[Trace], batches: int,
    what: What,
) -> list[Interruption]:  # fmt: skip
    """Draw one to three interruptions.

    Args:
        seed: Of the schedule.
        attempt: Drawn anew where no moment of the one before came.
        first: The moments of each rank of an undisturbed run.
        later: Those of a start that goes on from a save.
        batches: Of an undisturbed run, on a rank.
        what: A trainer is stopped by a signal, not by itself.
    """
    rng = np.random.default_rng([seed, attempt, 2])
    found = []
    for number in range(int(rng.integers(1, 4))):
        if what == "loader" and rng.random() < 0.2:
            stop = int(rng.integers(1, max(batches // (number + 1), 2)))
            found.append(Interruption(stop=stop, saves=bool(rng.random() < 0.6)))
        else:
            fresh = number == 0
            traces = first if fresh or rng.random() < 0.5 else later
            if what == "loader" and rng.random() < SLOW_SHARE:
                found.append(_behind_a_slow_call(rng, traces))
            else:
                found.append(Interruption(kill=_moment(rng, traces, fresh=fresh, what=what)))
    return found


def _behind_a_slow_call(rng: np.random.Generator, traces: Sequence[Trace]) -> Interruption:
    """Draw a change of a file between or after epochs that takes long, and what soon follows."""
    rank = int(rng.integers(len(traces)))
    counts: Counter[str] = Counter()
    numbered: list[tuple[str, str, int]] = []
    for name, part in parts(traces[rank]):
        counts[name] += 1
        numbered.append((name, part, counts[name]))
    first = next((n for n, (_, part, _) in enumerate(numbered) if part == END_OF_EPOCH), 0)
    changes = {
        name: [n for n in range(first, len(numbered)) if numbered[n][:2] == (name, part)]
        for name, part, _ in numbered[first:]
        if name.split()[0] in (*TO_NAME, *ON_FILE) and part in (END_OF_EPOCH, "train")
    }
    if not changes:
        return Interruption(kill=_moment(rng, traces, fresh=True, what="loader"))
    at = int(rng.choice(changes[_pick(rng, changes)]))
    slow = Kill(rank=rank, name=numbered[at][0], number=numbered[at][2],
                after=False, how="slow", part=numbered[at][1])  # fmt: skip
    soon = numbered[at + 1 : at + 1 + SOON] or numbered[-1:]
    # By name, so that what is seldom done, such as writing a new base, comes too.
    named = _pick(rng, {name for name, _, _ in soon})
    name, part, number = next(moment for moment in soon if moment[0] == named)
    how = str(rng.choice(["one", "all"]))
    kill = Kill(rank=rank, name=name, number=number, after=False, how=how, part=part)  # type: ignore[arg-type]
    return Interruption(kill=kill, slow=slow)


def _moment(rng: np.random.Generator, traces: Sequence[Trace], *, fresh: bool, what: What) -> Kill:
    """Draw a part of the run, of its names one, and of its moments one: rare ones come too."""
    rank = int(rng.integers(len(traces)))
    moments: dict[str, dict[str, list[int]]] = {}
    counts: Counter[str] = Counter()
    for name, part in parts(traces[rank]):
        counts[name] += 1
        moments.setdefault(part, {}).setdefault(name, []).append(counts[name])
    # What an epoch's end does is where most can go wrong: it comes as often as three other parts.
    part = _pick(rng, [*moments, *(END_OF_EPOCH for _ in range(2) if END_OF_EPOCH in moments)])
    name = _pick(rng, moments[part])
    number = int(rng.choice(moments[part][name]))
    if not fresh:
        # A start that goes on has fewer of them.
        number = int(rng.integers(1, number + 1))
    how = str(rng.choice(["one", "one", "one", "all", "all", "error"]))
    if what == "train" and rng.random() < 0.25:
        how = "term"
    if how == "error" and name.split()[0] not in (*TO_NAME, *ON_FILE):
        how = "one"
    after = bool(rng.random() < 0.5) and how != "error"
    own = name in ("step", "refresh", "report", "save", "restore", "close")
    return Kill(
        rank=rank, name=name, number=number, after=after and not own, how=how, part=part  # type: ignore[arg-type]
    )  # fmt: skip


def _pick(rng: np.random.Generator, among: Iterable[str]) -> str:
    return str(rng.choice(sorted(among)))


def parts(trace: Trace) -> list[tuple[str, str]]:
    """Tell staging, and what comes between the last staged file and the commit of all, apart."""
    staged = [number for number, (name, _) in enumerate(trace) if name == "replace staged"]
    if not staged:
        return list(trace)
    last = staged[-1]
    after = range(last + 1, len(trace))
    committed = next((n for n in after if trace[n][0] == "replace manifest.json"), last + 6)
    return [
        (name, "staging" if number <= last else "fill" if number <= committed else part)
        for number, (name, part) in enumerate(trace)
    ]
