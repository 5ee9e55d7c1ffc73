"""What a run writes beside its checkpoints: its directory, settings and metrics."""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from dataio.base.atomic import read_record, write_record
from dataio.base.claim import Claimant, NoLocksError, claim, claimant
from dataio.base.errors import DamagedFileError
from dataio.base.location import bare_within
from dataio.job.launch import Job
from tonari.trainer.checkpoint.directory import EVALUATIONS, read_progress
from tonari.trainer.config.config import Config
from tonari.trainer.config.saved import SETTINGS
from tonari.trainer.config.settings import as_tables
from tonari.trainer.errors import ConfigError
from tonari.trainer.watch.metrics import Board, MetricsLog, import_writer
from tonari.trainer.watch.monitoring import (
    Monitored,
    PrometheusFile,
    Stats,
    Telemetry,
    check_prometheus,
    import_exporter,
)
from tonari.trainer.watch.page import RunPage
from tonari.trainer.watch.record import CLAIM, METRICS, Noted, Record, Start, read_run
from tonari.trainer.watch.trackers import MlflowRun, Tracker, WandbRun, import_tracker

log = logging.getLogger(__name__)

Log = MetricsLog | Board | PrometheusFile | Telemetry | RunPage | Tracker
"""What takes a run's lines."""


TRACKERS = (WandbRun, MlflowRun)
"""Each has the name of the key of ``[run]`` that asks for it."""


def claim_directory(config: Config, opened: contextlib.ExitStack) -> None:
    """Refuse what a run could not write; then make its directory, and keep other runs out of it.

    Raises:
        ConfigError: If the directory cannot be made, or another run writes it.
    """
    directory = Path(config.run.directory).absolute()
    standing = next(path for path in (directory, *directory.parents) if path.exists())
    if not (standing.is_dir() and os.access(standing, os.W_OK | os.X_OK)):
        raise _cannot_make(directory, f"{standing} is no directory that may be written")
    if config.run.tensorboard:
        import_writer()
    if config.run.otel:
        import_exporter()
    for tracker in TRACKERS:
        if value := getattr(config.run, tracker.key):
            import_tracker(tracker.key, value)
    if config.run.prometheus:
        check_prometheus(Path(config.run.prometheus))
    _make(directory)
    _claim(directory, opened)


def open_logs(
    config: Config, job: Job, opened: contextlib.ExitStack, *, found: Path | None,
    metrics_path: Path | None, stats: Stats, replica: int, lost_after: int | None = None,
) -> list[Log]:  # fmt: skip
    """Open this rank's logs: most are rank 0's alone.

    One that goes on, from a checkpoint or behind a step after which ranks were lost, keeps its
    lines up to there.
    """
    world, directory = job.world, Path(config.run.directory)
    labels: dict[str, str | int] = {
        "run": directory.name, "node": world.node, "rank": world.rank, "replica": replica
    }  # fmt: skip
    watching: list[Log] = []
    if config.run.prometheus:
        path = Path(config.run.prometheus)
        watching.append(PrometheusFile(path, Monitored(stats, labels)))
    if config.run.otel:
        watching.append(opened.enter_context(Telemetry(Monitored(stats, labels))))
    if world.rank:
        return watching
    if found:
        _compare(directory / SETTINGS, bare_within(as_tables(config)))
    kept = read_progress(found).steps if found else lost_after
    path = metrics_path or directory / METRICS
    logs: list[Log] = [opened.enter_context(MetricsLog(path, after_step=kept))]
    if config.run.tensorboard:
        logs.append(opened.enter_context(Board(directory / "tensorboard")))
    return logs + watching


def note_start(
    config: Config, job: Job, opened: contextlib.ExitStack, logs: list[Log], *, done_steps: int,
    planned_steps: int, metrics_path: Path | None,
) -> Noted:  # fmt: skip
    """Write the settings, and what start this is, once both fit what lies in the run's directory.

    For one rank. More logs, which show the run as a whole, join ``logs``. Evaluations of steps that
    come again are forgotten.

    Args:
        config: The settings.
        job: This rank.
        opened: Closes what is opened.
        logs: This rank's.
        done_steps: Optimizer steps that the run goes on from; 0: it starts anew.
        planned_steps: Those at its end.
        metrics_path: Instead of ``metrics.jsonl`` in the run's directory.
    """
    directory = Path(config.run.directory)
    settings = bare_within(as_tables(config))
    if (directory / EVALUATIONS).exists():
        from tonari.trainer.run.beside.records import forget_later

        forget_later(directory, steps=done_steps)
    write_record(directory / SETTINGS, settings)
    try:
        before = read_run(directory) if done_steps else Record([])
    except (OSError, DamagedFileError):
        before = Record([])
    start = Start(time.time(), job.world.world_size, done_steps)
    metrics = str(metrics_path.absolute()) if metrics_path else METRICS
    record = Record([*before.starts, start], planned_steps, metrics, before.ids)
    noted = Noted(directory, record)
    # Closed after what notes the end
    logs.append(opened.enter_context(RunPage(directory, noted, settings)))
    opened.enter_context(noted)
    for tracker in TRACKERS:
        if value := getattr(config.run, tracker.key):
            logs.append(opened.enter_context(tracker(value, directory, noted, settings)))
    return noted


OTHER_DATA = (
    "the run goes on, as the same data may lie elsewhere. If it is other data, stop, and give it a "
    "run.directory of its own"
)
OTHER_LENGTH = "the schedule goes by it, so that the learning rate leaves its curve here"


def _compare(path: Path, now: Mapping[str, Mapping[str, object]]) -> None:
    """Say so where a run goes on with data of another name, or to another length."""
    try:
        before = read_record(path)
        by_steps = [n for n in ("max_steps", "max_tokens") if now["run"][n] or before["run"][n]]
        compared = [("data", "train", OTHER_DATA), ("data", "test", OTHER_DATA)]
        compared += [("run", name, OTHER_LENGTH) for name in by_steps or ["epochs"]]
        changed = [each for each in compared if before[each[0]][each[1]] != now[each[0]][each[1]]]
    except (OSError, DamagedFileError, KeyError):
        return
    for part, name, why in changed:
        log.warning(
            "[rank 0] %s: %s.%s was %s when this run was started last, and is %s now; %s",
            path.parent, part, name, before[part][name], now[part][name], why,
        )  # fmt: skip


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_make(directory, error) from error


def _claim(directory: Path, opened: contextlib.ExitStack) -> None:
    """Keep every other run out of a directory, until this one ends."""
    try:
        if not opened.enter_context(claim(directory / CLAIM)):
            raise _in_use(directory, claimant(directory / CLAIM))
    except NoLocksError as error:
        log.warning(
            "[rank 0] %s: its filesystem has no locks (%s), so that a second run in this directory "
            "would not be noticed", directory, error.strerror,
        )  # fmt: skip


def _in_use(directory: Path, by: Claimant | None) -> ConfigError:
    return ConfigError(
        f"run.directory is {directory}, into which {by or 'another process'} writes a run; wait "
        "for it to end, or give this run a directory of its own"
    )


def _cannot_make(directory: Path, why: object) -> ConfigError:
    return ConfigError(
        f"run.directory is {directory}, which cannot be made ({why}); give a directory that can be "
        "written, on a filesystem that every rank sees"
    )
