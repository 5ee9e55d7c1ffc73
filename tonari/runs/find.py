"""Runs as their directories describe them."""

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dataio.base.atomic import read_record
from dataio.base.errors import DamagedFileError
from dataio.base.lines import parse_checked_line
from tonari.errors import CommandError
from tonari.trainer.config.saved import SETTINGS
from tonari.trainer.watch.history import read_history
from tonari.trainer.watch.page import page_of
from tonari.trainer.watch.record import NAME, Record, read_run, seconds_of, state_of

LAST = ("loss", "accuracy", "evaluation_loss")


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run that lies in a directory.

    Attributes:
        directory: Its own.
        state: ``running``, ``complete``, ``stopped`` (the same command goes on) or ``failed``.
        how: How it ended, in words; empty: it runs, or was killed.
        started_s: When it was started first, in seconds since 1970.
        duration_s: Of all its starts.
        epochs: Those that are done, of ``planned_epochs``.
        steps: Optimizer steps that are done, of ``planned_steps``.
        last: Newest of its loss, accuracy and evaluation loss, as far as they are known.
        model: Its kind.
        ranks: Of its last start.
        data: What it is trained on.
        ids: Under which trackers know it.
    """

    directory: Path
    state: str
    how: str
    started_s: float
    duration_s: float
    epochs: int
    planned_epochs: int
    steps: int
    planned_steps: int
    last: dict[str, float]
    model: str
    ranks: int
    data: str
    ids: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "directory": str(self.directory)}


def find_runs(below: Path) -> tuple[list[FoundRun], list[str]]:
    """Find the runs in a directory and below, newest first; in a run none is looked for.

    Returns:
        The runs, and of those that cannot be read why.
    """
    found, unread = [], []
    for path in _directories(below):
        try:
            found.append(read_found(path))
        except CommandError as error:
            unread.append(str(error))
    return sorted(found, key=lambda run: -run.started_s), unread


def read_found(directory: Path) -> FoundRun:
    """Read one run.

    Raises:
        CommandError: If it is none, or damaged.
    """
    record, settings = _read(directory)
    state = state_of(directory, record.starts)
    metrics = directory / record.metrics
    alive_s = metrics.stat().st_mtime if metrics.exists() else record.starts[-1].at_s
    if state == "running":
        alive_s = time.time()
    newest = _newest(metrics)
    train = settings["data"]["train"]
    return FoundRun(
        directory=directory, state=state, how=record.starts[-1].how,
        started_s=record.starts[0].at_s,
        duration_s=sum(seconds_of(start, alive_s=alive_s) for start in record.starts),
        epochs=newest.get("epochs", 0), planned_epochs=settings["run"]["epochs"],
        steps=newest.get("step", record.starts[-1].from_step), planned_steps=record.planned_steps,
        last={name: newest[name] for name in LAST if name in newest},
        model=settings["model"]["kind"], ranks=record.starts[-1].ranks,
        data=train if isinstance(train, str) else ", ".join(train), ids=record.ids,
    )  # fmt: skip


def make_page(directory: Path) -> str:
    """Lay a run out as a page anew, from what it wrote.

    Raises:
        CommandError: If it is none, or damaged.
    """
    record, settings = _read(directory)
    state = record.starts[-1].how or state_of(directory, record.starts)
    history = read_history(directory / record.metrics)
    return page_of(directory, record, settings, history, state=state)


def _read(directory: Path) -> tuple[Record, dict[str, Any]]:
    try:
        return read_run(directory), read_record(directory / SETTINGS)
    except (OSError, DamagedFileError, TypeError) as error:
        raise CommandError(
            f"{directory}: cannot be read as a run ({error}); expected the run.directory of "
            "tonari train"
        ) from error


def _directories(below: Path) -> Iterator[Path]:
    for path, names, files in os.walk(below):
        if NAME in files:
            names.clear()
            yield Path(path)


def _newest(metrics: Path) -> dict[str, Any]:
    """Read a run's metrics from their end, until each of `LAST` is known or all are read."""
    found: dict[str, Any] = {}
    for text in reversed(metrics.read_bytes().split(b"\n") if metrics.exists() else []):
        try:
            line = parse_checked_line(text) or {}
        except ValueError:
            continue
        known = {name: value for name, value in line.items() if value is not None}
        if known.get("kind") == "epoch":
            known["epochs"] = known["epoch"] + 1
        steps = [each["step"] for each in (known, found) if "step" in each]
        # An evaluation may be of an earlier step than lines before it.
        found = known | found | ({"step": max(steps)} if steps else {})
        if "epochs" in found and {*LAST} <= {*found}:
            break
    return found
