"""How fast does the loader deliver batches, beside other loaders and beside the machine's limits?

Every contender gets the same set in its own form and delivers whole epochs, shuffled. All that are
compared are open at once and run one after the other, an epoch or more each, in an order that
rotates, so that what else the machine does slows all of them alike. Ratios are taken within a round
of all of them; the median of the rounds counts. The first epoch proves that every sample was
delivered once and whole, and shows memory; it is not among the repeats.
Cold: each round opens every loader anew, after its files were dropped from the page cache.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from tonari.bench.loader.environments import versions
from tonari.bench.loader.figures import LoaderJob, LoaderRecord, LoaderSettings, Temperature
from tonari.bench.loader.forms import Form, make_forms, own_directory
from tonari.bench.loader.peers.harness import PeerTask
from tonari.bench.loader.processes import disk_bytes, evict, resident_fraction
from tonari.bench.loader.session import ContenderSession
from tonari.bench.loader.sets import SampleSet
from tonari.bench.notify import Notify
from tonari.errors import CommandError

Measured = TypeVar("Measured")


def measure_loaders(job: LoaderJob, notify: Notify) -> Iterator[LoaderRecord]:
    """Measure, set by set and case by case.

    Args:
        job: What, and where.
        notify: Receives progress.

    Yields:
        Every contender's record in every case, those that cannot run included.
    """
    settings, deadline = job.settings, time.monotonic() + job.settings.time_limit_s
    for spec in job.sets:
        notify(f"{spec.name}: {spec.num_samples:,} samples, generating and converting")
        prepared, problems = make_forms(job, spec, deadline, notify)
        for ranks in settings.ranks:
            for temperature in settings.temperatures:
                if time.monotonic() > deadline:
                    notify(f"{spec.name}, {ranks} ranks, {temperature}: skipped, the time is up")
                    continue
                yield from _measure_case(
                    job, spec, prepared, problems, ranks, temperature, deadline, notify
                )
        if not job.keep:
            for path in job.directory.glob(f"{spec.name}-*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _measure_case(
    job: LoaderJob,
    spec: SampleSet,
    prepared: dict[str, Form],
    problems: dict[str, str],
    ranks: int,
    temperature: Temperature,
    deadline: float,
    notify: Notify,
) -> list[LoaderRecord]:
    records: list[LoaderRecord] = []
    running: list[tuple[LoaderRecord, Form]] = []
    for contender in job.contenders:
        for workers in job.settings.workers:
            if not contender.suits(kind=spec.kind, ranks=ranks, workers=workers):
                continue
            record = LoaderRecord(
                set_name=spec.name, contender=contender.name, kind=contender.kind, ranks=ranks,
                workers=workers, temperature=temperature,
                versions=versions(contender, job.environments),
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
    measure(job.settings, running, deadline, lambda line: notify(f"{where}: {line}"))
    return records


def _measure_warm(
    settings: LoaderSettings,
    running: list[tuple[LoaderRecord, Form]],
    deadline: float,
    notify: Notify,
) -> None:
    with contextlib.ExitStack() as open_sessions:
        sessions: list[tuple[LoaderRecord, ContenderSession]] = []
        for record, form in running:
            notify(f"first epoch of {record.contender}, {record.workers} workers")
            session = _session(settings, record, form)
            with _noting(record, notify):
                open_sessions.enter_context(session)
                record.first = session.epoch(watch=True)
                sessions.append((record, session))
        for record, session in _rounds(settings, sessions, deadline, notify):
            if not record.problem:
                with _noting(record, notify):
                    record.epochs.append(session.round(settings.round_s))


def _measure_cold(
    settings: LoaderSettings,
    running: list[tuple[LoaderRecord, Form]],
    deadline: float,
    notify: Notify,
) -> None:
    for record, form in _rounds(settings, running, deadline, notify):
        if record.problem:
            continue
        with _noting(record, notify):
            directory = own_directory(form, record.workers)
            record.eviction = evict(directory)
            stayed = resident_fraction(directory)
            record.resident_fraction = max(record.resident_fraction or 0.0, stayed)
            with _session(settings, record, form) as session:
                record.epochs.append(session.epoch())


def _rounds(
    settings: LoaderSettings, measured: list[Measured], deadline: float, notify: Notify
) -> Iterator[Measured]:
    """Yield each in every repeat, in an order that rotates, until the time limit."""
    for repeat in range(settings.repeats):
        if time.monotonic() > deadline:
            notify(f"{repeat} of {settings.repeats} repeats, the time limit has passed")
            return
        notify(f"repeat {repeat + 1} of {settings.repeats}")
        first = repeat % max(len(measured), 1)
        yield from measured[first:] + measured[:first]


def _session(settings: LoaderSettings, record: LoaderRecord, form: Form) -> ContenderSession:
    task = PeerTask(
        source=str(form.source),
        prepared=str(own_directory(form, record.workers)),
        batch_size=form.spec.batch_size,
        workers=record.workers, world_size=record.ranks,
    )  # fmt: skip
    return ContenderSession(form.contender, form.python, task, timeout_s=settings.timeout_s)


@contextlib.contextmanager
def _noting(record: LoaderRecord, notify: Notify) -> Iterator[None]:
    """Write a contender's failure into its record; the others continue."""
    try:
        yield
    except CommandError as error:
        record.problem = str(error)
        notify(str(error))
