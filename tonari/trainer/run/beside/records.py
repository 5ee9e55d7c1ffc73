"""What lies in a run's directory of evaluations: weights that are handed over, and results.

``evaluations/step-NUMBER`` holds the weights of one step. ``step-NUMBER.json`` is the result, after
which the weights go. Each is complete when it has its name, so a kill at any point leaves weights
to be evaluated, or a result. What a run is evaluated by from its checkpoints has results alone.
"""

import json
import shutil
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataio.base.atomic import read_record, write_record
from dataio.base.errors import DamagedFileError
from dataio.base.lines import read_checked_lines
from dataio.base.location import bare_within
from dataio.base.seeding import digest
from tonari.trainer.checkpoint.checkpoint import HANDED
from tonari.trainer.checkpoint.directory import (
    EVALUATIONS,
    PARTIAL,
    read_progress,
    whole_checkpoints,
)
from tonari.trainer.checkpoint.sums import MANIFEST
from tonari.trainer.config.config import Config
from tonari.trainer.config.settings import as_tables
from tonari.trainer.errors import EvaluationError

MODEL_AND_DATA = ("data", "model", "text", "augment", "recipe")
"""Sections of the settings that an evaluation goes by."""
NOT_COMPARED = ("cache", "workers", "staging", "exclude", "batch_size", "decoded")
"""Of ``[data]``: what changes no figure of an evaluation, or is noted by itself."""

BEAT = "evaluator.beat"
"""Touched at each batch that an evaluator takes; not there before the first."""
OF_RESULT = ("weights", "settings", "samples")
"""Of a result, by which it is known: what a line of the metrics does not have."""


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """How weights are to be evaluated, so that the figures are those of the ranks that trained.

    Attributes:
        epoch: That trains.
        step: After which they are.
        replicas: Among which the samples are divided.
        batch_size: Of each of them.
        threads: Of torch, by which sums within a layer may be divided; 0: not known.
        settings: What `settings_digest` gave.
    """

    epoch: int
    step: int
    replicas: int
    batch_size: int
    threads: int
    settings: str


def settings_digest(config: Config) -> str:
    """Hash the settings by which a model is made, and that it is evaluated by."""
    tables = bare_within(as_tables(config))
    by: dict[str, Any] = {name: tables[name] for name in MODEL_AND_DATA}
    by["data"] = {key: its for key, its in by["data"].items() if key not in NOT_COMPARED}
    by |= {"dtype": config.mesh.dtype, "ema": config.optimizer.ema, "seed": config.run.seed}
    return digest(json.dumps(by, sort_keys=True, default=str))


def read_handed(weights: Path, config: Config, *, replicas: int) -> HandedOver:
    """Read how weights are to be evaluated.

    Args:
        weights: What was handed over, or a checkpoint.
        config: Of the run.
        replicas: Of the run's last start, for a checkpoint, which does not say.

    Raises:
        ConfigError: If it is not whole.
    """
    if (weights / HANDED).exists():
        return HandedOver(**read_record(weights / HANDED))
    progress = read_progress(weights)
    return HandedOver(
        # Behind an epoch's last step a checkpoint counts the epoch as done.
        epoch=progress.epochs - (not progress.so_far), step=progress.steps, replicas=replicas,
        batch_size=config.data.batch_size, threads=0, settings=settings_digest(config),
    )  # fmt: skip


def result_path(run: Path, step: int) -> Path:
    """Name the file of a result."""
    return run / EVALUATIONS / f"step-{step:08d}.json"


def results(run: Path, *, known: Container[int] = ()) -> Iterator[dict[str, Any]]:
    """Read the results of a run, from the last step on; one that is damaged is not there.

    Args:
        run: Its directory.
        known: Steps whose results are not read.
    """
    for path in sorted((run / EVALUATIONS).glob("step-*.json"), reverse=True):
        if int(path.stem[5:]) not in known and (found := _read(path)):
            yield found


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return read_record(path)
    except (OSError, DamagedFileError):
        return None


def line_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Make a line of the metrics of a result."""
    return {"kind": "evaluation"} | {k: v for k, v in result.items() if k not in OF_RESULT}


def evaluated_steps(metrics: Path) -> set[int]:
    """Find the steps whose evaluation a run's metrics have."""
    lines = read_checked_lines(metrics) if metrics.exists() else ()
    return {
        line["step"] for line in lines
        if line["kind"] == "evaluation" or line.get("evaluation_loss") is not None
    }  # fmt: skip


def waiting(run: Path, *, checkpoints: bool = False) -> list[Path]:
    """List weights that have no result yet, from the first step on.

    Args:
        run: Its directory.
        checkpoints: Those of checkpoints, in place of those that are handed over.
    """
    there = whole_checkpoints(run / ("checkpoints" if checkpoints else EVALUATIONS))
    return [path for path in there if not _has_result(run, path)]


def _has_result(run: Path, weights: Path) -> bool:
    found = _read(run / EVALUATIONS / f"{weights.name}.json")
    return found is not None and found["weights"] == weights_digest(weights)


def weights_digest(weights: Path) -> str:
    """Hash the sums of all files: other weights of the same step have another."""
    try:
        return digest((weights / MANIFEST).read_bytes())
    except OSError:
        return ""  # It was removed, or was never whole.


def keep_result(run: Path, handed: HandedOver, figures: dict[str, Any], *, weights: Path) -> None:
    """Write a result; then weights that were handed over go.

    Raises:
        EvaluationError: If it cannot be written.
    """
    of = {"weights": weights_digest(weights), "settings": handed.settings}
    path = result_path(run, handed.step)
    try:
        path.parent.mkdir(exist_ok=True)
        write_record(path, {"epoch": handed.epoch, "step": handed.step, **figures, **of})
    except OSError as error:
        raise EvaluationError(
            f"{path}: an evaluation cannot be written ({error.strerror}); make room, and give "
            f"`tonari evaluate {run}`, which makes those that are left"
        ) from error
    if weights.parent == path.parent:
        remove(weights)


def remove(weights: Path) -> None:
    """Remove weights; a kill amid it leaves nothing that has the name of whole ones."""
    partial = weights.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    weights.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)


def forget_evaluated(run: Path) -> None:
    """Remove weights that a killed evaluator had a result of."""
    for path in whole_checkpoints(run / EVALUATIONS):
        if _has_result(run, path):
            remove(path)


def forget_later(run: Path, *, steps: int) -> None:
    """Remove what belongs to steps that the run will come to again, and what kills left."""
    directory = run / EVALUATIONS
    for path in sorted(directory.glob("step-*")):
        if PARTIAL.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif int(path.name[5:13]) > steps:
            remove(path) if path.is_dir() else path.unlink(missing_ok=True)
