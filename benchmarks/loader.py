"""How fast does the loader deliver batches, beside other loaders and beside the machine's limits?

Every contender gets the same set in its own form and delivers whole epochs, shuffled. All that are
compared are open at once and take turns, an epoch or more each, in an order that rotates, so that what else
the machine does hits all alike; ratios are taken within a turn and then their median. The first
epoch proves that every sample came once and whole, and shows memory; it is not among the repeats.
Cold: each turn starts anew, its files dropped from the page cache before.
"""

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.contenders import Contender
from benchmarks.environments import interpreter, versions
from benchmarks.errors import BenchError
from benchmarks.launch import prepare
from benchmarks.peers.harness import Task
from benchmarks.peers.shards import write_tars
from benchmarks.processes import disk_bytes, evict, resident_fraction
from benchmarks.session import EpochFigures, Session
from benchmarks.sets import SetSpec, make_set, open_set

Temperature = Literal["warm", "cold"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        sets: The sets, scaled.
        contenders: Who.
        ranks: Numbers of ranks on this node, measured one after the other.
        workers: Worker processes or threads a rank; measured among each other.
        temperatures: Page cache.
        repeats: Epochs measured of each.
        turn_s: A warm turn is as many epochs as fill this time.
        time_limit_s: After it, nothing new is begun.
        directory: For the sets and every form of them.
        environments: Where the peers' environments are.
        keep: Whether the sets stay for the next run.
        timeout_s: Longest wait for a contender's answer.
    """

    sets: Sequence[SetSpec]
    contenders: Sequence[Contender]
    ranks: Sequence[int]
    workers: Sequence[int]
    temperatures: Sequence[Temperature]
    repeats: int
    time_limit_s: float
    directory: Path
    environments: Path
    turn_s: float = 0.5
    keep: bool = False
    timeout_s: float = 600.0


@dataclass(kw_only=True)
class Record:
    """One contender in one case.

    Attributes:
        set_name: Of the set.
        contender: Name.
        kind: ours, peer or limit.
        ranks: On this node.
        workers: Processes or threads a rank.
        temperature: warm or cold.
        versions: Of its packages.
        problem: Why there are no figures, or "".
        prepare_s: Turning the set into its own form.
        source_bytes: Read for that.
        cache_bytes: Disk space of that form.
        first: Figures of the first epoch, where warm.
        epochs: Of the repeats.
        resident_fraction: Cold: part of the files that stayed in memory, the most of all repeats.
        eviction: Cold: how the files were dropped.
    """

    set_name: str
    contender: str
    kind: str
    ranks: int
    workers: int
    temperature: Temperature
    versions: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    prepare_s: float | None = None
    source_bytes: int | None = None
    cache_bytes: int | None = None
    first: EpochFigures | None = None
    epochs: list[EpochFigures] = field(default_factory=list)
    resident_fraction: float | None = None
    eviction: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether every sample came once and whole, in every epoch."""
        all_epochs = [*([self.first] if self.first else []), *self.epochs]
        return all(figures.is_exact for figures in all_epochs)


@dataclass(frozen=True)
class Prepared:
    """A contender whose form of the set is there."""

    contender: Contender
    python: Path
    directory: Path
    source: Path
    spec: SetSpec


Say = Callable[[str], None]


def measure_loaders(settings: Settings, say: Say) -> Iterator[Record]:
    """Measure, set by set and case by case.

    Args:
        settings: What.
        say: Told what is being done, in a line.

    Yields:
        Every contender's record in every case, those that cannot run included.
    """
    deadline = time.monotonic() + settings.time_limit_s
    for spec in settings.sets:
        say(f"{spec.name}: {spec.num_samples:,} samples, generating and converting")
        prepared, problems = _prepare_all(settings, spec, deadline, say)
        for ranks in settings.ranks:
            for temperature in settings.temperatures:
                if time.monotonic() > deadline:
                    say(f"{spec.name}, {ranks} ranks, {temperature}: left out, the time is over")
                    continue
                yield from _measure_case(
                    settings, spec, prepared, problems, ranks, temperature, deadline, say
                )
        if not settings.keep:
            for form in prepared.values():
                for path in (form.directory, Path(f"{form.directory}.source"), form.source):
                    shutil.rmtree(path, ignore_errors=True)


def _prepare_all(
    settings: Settings, spec: SetSpec, deadline: float, say: Say
) -> tuple[dict[str, Prepared], dict[str, str]]:
    prepared: dict[str, Prepared] = {}
    problems: dict[str, str] = {}
    for contender in settings.contenders:
        if contender.sets != "all" and (contender.sets == "jpeg") != spec.is_jpeg:
            continue
        python = interpreter(contender, settings.environments)
        if python is None:
            problems[contender.name] = "not installed"
            continue
        if time.monotonic() > deadline:
            problems[contender.name] = "the time was over"
            continue
        say(f"{spec.name}: preparing {contender.name}")
        try:
            prepared[contender.name] = _prepare(settings, contender, python, spec)
        except BenchError as error:
            problems[contender.name] = str(error)
            say(str(error))
    return prepared, problems


def _prepare(settings: Settings, contender: Contender, python: Path, spec: SetSpec) -> Prepared:
    own = spec.doubled() if contender.nodes > 1 else spec
    source = settings.directory / f"{own.name}-set"
    make_set(own, source)
    directory = settings.directory / f"{own.name}-{contender.name}"
    form = Prepared(contender, python, directory, source, own)
    report = Path(f"{directory}.json")
    stamp = Path(f"{directory}.of.json")
    said = json.dumps([str(own), versions(contender, settings.environments)])
    if report.exists() and stamp.exists() and stamp.read_text() == said:
        return form
    for path in (directory, Path(f"{directory}.source"), Path(f"{directory}.tmp")):
        shutil.rmtree(path, ignore_errors=True)
    report.unlink(missing_ok=True)
    if contender.kind == "ours":
        write_tars(open_set(source), Path(f"{directory}.source"))
    task = Task(source=str(source), prepared=str(directory), batch_size=own.batch_size)
    prepare(contender, python, task, timeout_s=settings.timeout_s)
    stamp.write_text(said)
    return form


def _measure_case(
    settings: Settings,
    spec: SetSpec,
    prepared: dict[str, Prepared],
    problems: dict[str, str],
    ranks: int,
    temperature: Temperature,
    deadline: float,
    say: Say,
) -> list[Record]:
    records: list[Record] = []
    running: list[tuple[Record, Prepared]] = []
    for contender in settings.contenders:
        for workers in settings.workers:
            if not contender.suits(is_jpeg=spec.is_jpeg, ranks=ranks, workers=workers):
                continue
            record = Record(
                set_name=spec.name, contender=contender.name, kind=contender.kind, ranks=ranks,
                workers=workers, temperature=temperature,
                versions=versions(contender, settings.environments),
                problem=problems.get(contender.name, ""),
            )  # fmt: skip
            records.append(record)
            if contender.name in prepared:
                form = prepared[contender.name]
                report = json.loads(Path(f"{form.directory}.json").read_text())
                record.prepare_s, record.source_bytes = report["prepare_s"], report["source_bytes"]
                record.cache_bytes = disk_bytes(form.directory)
                running.append((record, form))
    where = f"{spec.name}, {ranks} rank{'s' if ranks > 1 else ''}, {temperature}"
    measure = _measure_warm if temperature == "warm" else _measure_cold
    measure(settings, running, deadline, lambda words: say(f"{where}: {words}"))
    return records


def _measure_warm(
    settings: Settings, running: list[tuple[Record, Prepared]], deadline: float, say: Say
) -> None:
    with contextlib.ExitStack() as open_sessions:
        sessions: list[tuple[Record, Session]] = []
        for record, form in running:
            say(f"first epoch of {record.contender}, {record.workers} workers")
            session = _session(settings, record, form)
            with _noting(record, say):
                open_sessions.enter_context(session)
                record.first = session.epoch(watch=True)
                sessions.append((record, session))
        for repeat in range(settings.repeats):
            if time.monotonic() > deadline:
                say(f"{repeat} of {settings.repeats} repeats, the time is over")
                return
            say(f"repeat {repeat + 1} of {settings.repeats}")
            turn = repeat % max(len(sessions), 1)
            for record, session in sessions[turn:] + sessions[:turn]:
                if not record.problem:
                    with _noting(record, say):
                        record.epochs.append(session.turn(settings.turn_s))


def _measure_cold(
    settings: Settings, running: list[tuple[Record, Prepared]], deadline: float, say: Say
) -> None:
    for repeat in range(settings.repeats):
        if time.monotonic() > deadline:
            say(f"{repeat} of {settings.repeats} repeats, the time is over")
            return
        say(f"repeat {repeat + 1} of {settings.repeats}")
        turn = repeat % max(len(running), 1)
        for record, form in running[turn:] + running[:turn]:
            if record.problem:
                continue
            with _noting(record, say):
                record.eviction = evict(form.directory)
                stayed = resident_fraction(form.directory)
                record.resident_fraction = max(record.resident_fraction or 0.0, stayed)
                with _session(settings, record, form) as session:
                    record.epochs.append(session.epoch())


def _session(settings: Settings, record: Record, form: Prepared) -> Session:
    task = Task(
        source=str(form.source), prepared=str(form.directory), batch_size=form.spec.batch_size,
        workers=record.workers, world_size=record.ranks,
    )  # fmt: skip
    return Session(form.contender, form.python, task, timeout_s=settings.timeout_s)


@contextlib.contextmanager
def _noting(record: Record, say: Say) -> Iterator[None]:
    """Write a contender's failure into its record; the others go on."""
    try:
        yield
    except BenchError as error:
        record.problem = str(error)
        say(str(error))


def say_on_stderr(words: str) -> None:
    """Show progress."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {words}\n")
    sys.stderr.flush()
