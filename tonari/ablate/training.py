"""Train one cell: a run of `tonari train` in a directory of its own, and what its metrics say."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dataio import DataioError
from dataio.base.location import bare_within
from dataio.rowlog.reading import ROWS
from tonari import rows
from tonari.ablate.oracle import is_not_zero
from tonari.ablate.study import Cell, StudyConfig
from tonari.errors import CommandError
from tonari.processes import GRACE_S
from tonari.trainer.config.config import Config, build_config
from tonari.trainer.config.settings import apply_override
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.loop import train

RUNS = "runs"

COST_PARTS = ("train_s", "epoch_end_s", "exchange_s", "refresh_s")
"""Parts of an epoch, see `tonari.trainer.watch.parts`, that training costs: what is left are
evaluations and checkpoints."""

LAST_WORDS = 2000
"""Characters of what a launched run wrote last that are shown if it fails."""


class Stopped(KeyboardInterrupt):
    """A signal ended a run early; the next call goes on with it."""


@dataclass(frozen=True)
class Point:
    """What is known after an epoch.

    Attributes:
        epoch: Which one.
        loss: Mean weighted training loss.
        accuracy: Of the test data, in [0, 1]; None where nothing was evaluated.
        test_loss: Mean loss on the test data; None where nothing was evaluated.
        train_s: Seconds of training until its end; see `Trained`, as for the next one.
        rows_trained: Rows until its end.
        hidden_fraction: Share of the rows that it left out.
    """

    epoch: int
    loss: float
    accuracy: float | None
    test_loss: float | None
    train_s: float
    rows_trained: int
    hidden_fraction: float


@dataclass(frozen=True)
class Trained:
    """A cell that was trained.

    Attributes:
        epochs: What is known after each.
        accuracy: Of the test data after the last epoch: that of the averaged weights, if there are
            some.
        test_loss: Of the same weights.
        wall_s: Seconds that its epochs took, evaluations and checkpoints included.
        train_s: Seconds of steps, selections, exchange and passes for new scores.
        rows_trained: Rows passed forward and backward, padding left out.
        cost_rows: ``rows_trained`` and all else that training took, such as passes for new scores,
            in rows of the same time: ``rows_trained * train_s / (seconds in steps)``. A machine
            that is slow for a while changes both alike.
        hidden_fraction: Share of the rows left out, mean over epochs.
        hidden_precision: Share of these, over all epochs, that are wrong; rows that no epoch has,
            such as excluded ones, count too. None where nothing is left out, or nothing is known to
            be wrong.
        hidden_recall: Share of the wrong ones that is left out, mean over epochs; None as above.
    """

    epochs: tuple[Point, ...]
    accuracy: float
    test_loss: float
    wall_s: float
    train_s: float
    rows_trained: int
    cost_rows: float
    hidden_fraction: float
    hidden_precision: float | None = None
    hidden_recall: float | None = None


def train_cell(study: StudyConfig, cell: Cell, out: Path) -> Trained:
    """Train a cell, or go on where its run was stopped.

    Args:
        study: Says how.
        cell: Which.
        out: Directory of the study; the run's is below it, see `run_directory`.

    Raises:
        ConfigError: If the settings do not fit this machine, or the data.
        DataioError: If the data or the cache cannot be used.
        CommandError: If ranks that were launched failed.
        Stopped: If a signal ended it early.
    """
    directory = run_directory(cell, out)
    directory.mkdir(parents=True, exist_ok=True)
    tables = cell.arm.tables_of(cell.seed)
    apply_override(tables, ("run", "directory"), str(directory))
    config, kept = build_config(tables), bare_within(tables)
    file = directory / "train.toml"
    file.write_text(as_toml(kept))
    if launcher := study.launcher:
        if kept != tables:
            raise ConfigError(
                "study.launch is set, and a URL of the settings holds a secret, which the ranks "
                "would have to read from a file; give credentials by variables of the "
                "environment, or leave study.launch out"
            )
        _launch([*launcher, sys.executable, "-m", "tonari", "train", str(file)], directory)
    elif not (ended := train(config, quiet=True)).finished:
        raise Stopped(ended.stopped_by)
    return replace(read_metrics(directory), **_wrong_shares(study, config))


def run_directory(cell: Cell, out: Path) -> Path:
    """Name the directory of a cell's run, below that of the study."""
    return out / RUNS / cell.name


def _launch(command: list[str], directory: Path) -> None:
    """Start the ranks of a run, and wait for them; they end with this process's wait."""
    log = directory / "ranks.log"
    with log.open("w") as written:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise CommandError(
                f"study.launch: {command[0]!r} cannot be started ({error}); name a launcher that "
                "this machine has, such as mpiexec or srun"
            ) from error
        try:
            status = process.wait()
        except BaseException:
            # The launcher hands it on: ranks save where they are.
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
    if status:
        raise CommandError(
            f"`{' '.join(command)}` ended with status {status}, and said last: "
            f"{log.read_text(errors='replace').strip()[-LAST_WORDS:]}"
        )


def read_metrics(directory: Path) -> Trained:
    """Read what a run's metrics say of its epochs and of what they cost.

    What of the hidden rows is wrong is not known here.

    Raises:
        Stopped: If the last epoch was not ended: a launched run stops without an error.
    """
    lines = list(_epoch_lines(directory))
    settings = json.loads((directory / "config.json").read_text())
    epochs = settings["run"]["epochs"]
    if not lines or lines[-1]["epoch"] + 1 != epochs:
        raise Stopped(f"{len(lines)} of {epochs} epochs are trained")
    points, wall_s, train_s, steps_s, rows_trained = [], 0.0, 0.0, 0.0, 0
    for line in lines:
        wall_s += line["measured_s"]
        train_s += sum(line[part] for part in COST_PARTS)
        steps_s += line["train_s"]
        rows_trained += round(line["train_samples_per_s"] * line["epoch_s"])
        # What the run is judged by at its end.
        by = "ema_" if "ema_accuracy" in line else ""
        last = line[f"{by}accuracy"], line[f"{by}evaluation_loss"]
        points.append(
            Point(
                line["epoch"], line["loss"], *last, train_s, rows_trained, line["hidden_fraction"],
            )
        )  # fmt: skip
    return Trained(
        epochs=tuple(points),
        accuracy=last[0],
        test_loss=last[1],
        wall_s=wall_s,
        train_s=train_s,
        rows_trained=rows_trained,
        cost_rows=rows_trained * train_s / steps_s,
        hidden_fraction=statistics.fmean(point.hidden_fraction for point in points),
    )


def _epoch_lines(directory: Path) -> Iterator[dict[str, Any]]:
    for text in (directory / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line.get("kind") == "epoch":
            yield line


def _wrong_shares(study: StudyConfig, config: Config) -> Mapping[str, Any]:
    """Compute precision and recall of what was left out, from the log of trained rows."""
    if not study.wrong:
        return {}
    try:
        is_wrong = is_not_zero(config.data.train, study.wrong)
    except DataioError as error:
        raise ConfigError(
            f"study.wrong is {study.wrong!r}, expected a field of whole numbers in data.train: "
            f"{error}; correct it, or leave it out"
        ) from error
    trained = rows.open(Path(config.run.directory) / ROWS)
    hidden, caught = 0, 0
    for epoch in range(config.run.epochs):
        left_out = np.ones(len(is_wrong), np.bool_)
        left_out[trained.at(epoch=epoch).column("sample_id").to_numpy()] = False
        hidden += int(left_out.sum())
        caught += int((left_out & is_wrong).sum())
    if not hidden or not is_wrong.any():
        return {}
    recall = caught / (int(is_wrong.sum()) * config.run.epochs)
    return {"hidden_precision": caught / hidden, "hidden_recall": recall}


def as_toml(tables: Mapping[str, object]) -> str:
    """Write the tables of a run as its file."""
    parts = []
    for section, table in tables.items():
        assert isinstance(table, Mapping), "checked as the study was read"
        settings = [f"{name} = {_value(value)}" for name, value in table.items()]
        parts.append("\n".join([f"[{section}]", *settings]))
    return "\n\n".join(parts) + "\n"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{json.dumps(name)} = {_value(its)}" for name, its in value.items())
        return f"{{{inner}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
