"""What a run writes beside its checkpoints: its directory, settings and metrics."""

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from dataio.base.atomic import read_record, write_record
from dataio.base.claim import Claimant, NoLocksError, claim, claimant
from dataio.base.errors import DamagedFileError
from dataio.base.location import bare_within
from dataio.job.launch import Job
from tonari.trainer.checkpoint.directory import read_progress
from tonari.trainer.config.config import Config
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

log = logging.getLogger(__name__)

Log = MetricsLog | Board | PrometheusFile | Telemetry
"""What takes a run's lines."""


SETTINGS = "config.json"
"""In a run's directory: the settings of its last start."""
CLAIM = "run.lock"
"""In a run's directory: held by the run that writes it."""


def check_outputs(config: Config) -> None:
    """Refuse what a run could not write, and leave nothing: other settings may still be wrong.

    Raises:
        ConfigError: If the directory cannot be made, or another run writes it.
    """
    directory = Path(config.run.directory).absolute()
    standing = next(path for path in (directory, *directory.parents) if path.exists())
    if not (standing.is_dir() and os.access(standing, os.W_OK | os.X_OK)):
        raise _cannot_make(directory, f"{standing} is no directory that may be written")
    if by := claimant(directory / CLAIM):
        raise _in_use(directory, by)
    if config.run.tensorboard:
        import_writer()
    if config.run.otel:
        import_exporter()
    if config.run.prometheus:
        check_prometheus(Path(config.run.prometheus))


def open_logs(
    config: Config, job: Job, opened: contextlib.ExitStack, *, found: Path | None,
    metrics_path: Path | None, stats: Stats, replica: int,
) -> list[Log]:  # fmt: skip
    """Make the run's directory, and open this rank's logs: most are rank 0's alone.

    Raises:
        ConfigError: If the directory cannot be made, or another run writes it.
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
    _make(directory)
    _claim(directory, opened)
    if found:
        _compare_data(directory / SETTINGS, bare_within(as_tables(config))["data"])
    kept = read_progress(found).steps if found else None
    path = metrics_path or directory / "metrics.jsonl"
    logs: list[Log] = [opened.enter_context(MetricsLog(path, after_step=kept))]
    if config.run.tensorboard:
        logs.append(opened.enter_context(Board(directory / "tensorboard")))
    return logs + watching


def keep_settings(config: Config) -> None:
    """Write the settings into the run's directory, once they are known to fit what lies there."""
    write_record(Path(config.run.directory) / SETTINGS, bare_within(as_tables(config)))


def _compare_data(path: Path, now: Mapping[str, object]) -> None:
    """Say so where a run goes on with data of another name: a checkpoint does not know its own."""
    try:
        before = read_record(path)["data"]
    except (OSError, DamagedFileError, KeyError):
        return
    for name in ("train", "test"):
        was, given = before.get(name), now[name]
        if was != given:
            log.warning(
                "[rank 0] %s: data.%s was %s when this run was started last, and is %s now; the "
                "run goes on, as the same data may lie elsewhere. If it is other data, stop, and "
                "give it a run.directory of its own", path.parent, name, was, given,
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
