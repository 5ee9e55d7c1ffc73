"""Cells on disk: train those that are missing, read those that are there."""

import json
import math
import socket
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch

from dataio.base.atomic import write_json
from dataio.base.location import bare_within
from tonari.ablate.claims import claim
from tonari.ablate.progress import Event
from tonari.ablate.report import CellFile
from tonari.ablate.study.config import Cell, DataConfig, Study
from tonari.ablate.study.corrupt import Found, corrupt, spoil_text
from tonari.ablate.study.data import (
    LabelledText,
    Samples,
    draw_subset,
    draw_subsets,
    load_images,
    load_text,
)
from tonari.ablate.study.run import CellResult, train_cell
from tonari.errors import CommandError
from tonari.report.machine import commit, describe_machine
from tonari.trainer.config.settings import as_tables
from tonari.trainer.errors import ConfigError

CELLS = "cells"

FIGURES = (
    "train_s", "rows_trained", "rows_refreshed", "cost_rows", "flops", "hidden_fraction",
    "hidden_precision", "hidden_recall",
)  # fmt: skip
"""Of a cell's results, what files of earlier versions lack."""


def train_missing(
    study: Study,
    cells: Sequence[Cell],
    out: Path,
    *,
    command: str,
    call: str,
    tell: Callable[[Event], None],
    max_cells: int | None = None,
) -> None:
    """Train cells that are not there and that nobody works on, one after the other.

    Each is kept at its end. One that fails is kept as an error, told, and left to another call.

    Args:
        study: What they belong to.
        cells: All that are wanted, those to be tried first in front.
        out: Directory of the study.
        command: What was typed, to be kept with each result.
        call: Names what was started at once; a cell fails only once in it.
        tell: Takes what happens to each cell.
        max_cells: Cells to try at most; all if left out.
    """
    if not missing_cells(cells, out):
        return
    if study.study.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "study.device is 'cuda', but torch sees no CUDA device here; give study.device=cpu"
        )
    # One thread a cell, however many there are: sums, and so results, depend on their number
    torch.set_num_threads(1)
    train, test = _load(study)
    (out / CELLS).mkdir(parents=True, exist_ok=True)
    tried = -1
    # Again until nothing is left: a cell whose owner died meanwhile has become free
    while tried and (max_cells is None or max_cells > 0):
        tried = 0
        for cell in cells:
            if tried == max_cells:
                return
            with claim(out, cell) as mine:
                # Only a claim makes sure: it may have been trained since
                if mine and is_wanted(cell, out, call=call):
                    tell(Event(kind="begun", cell=cell.file_name))
                    tell(_train(study, cell, train, test, out, command=command, call=call))
                    tried += 1
        max_cells = None if max_cells is None else max_cells - tried


def _train(
    study: Study,
    cell: Cell,
    train: Samples,
    test: Samples,
    out: Path,
    *,
    command: str,
    call: str,
) -> Event:
    try:
        data = study.data
        drawn, validation = draw_subsets(
            train, data.train_samples, data.validation_samples, seed=cell.seed
        )
        if data.validation_samples:
            test = _validating(validation, data, seed=cell.seed)
        result = train_cell(
            cell.arm.settings,
            _worsened(drawn, data, seed=cell.seed),
            test,
            num_classes=study.data.num_classes,
            seed=cell.seed,
            device=study.study.device,
        )
    # Whatever it is: other cells may well succeed, and the command says it again at its end
    except Exception as error:
        plain = isinstance(error, ConfigError)
        words = str(error) if plain else f"{type(error).__name__}: {error}"
        write_failure(out, cell, call=call, error=words, trace=traceback.format_exc())
        return Event(kind="failed", cell=cell.file_name, error=words)
    write_json(out / CELLS / cell.file_name, _document(study, cell, result, command))
    error_path(out, cell).unlink(missing_ok=True)
    return Event(kind="done", cell=cell.file_name, accuracy=result.accuracy, wall_s=result.wall_s)


def _worsened(drawn: Samples, data: DataConfig, *, seed: int) -> Found:
    """Make training samples as they are found."""
    if isinstance(drawn, LabelledText):
        return spoil_text(drawn, seed=seed, junk=data.junk)
    return corrupt(
        drawn, num_classes=data.num_classes, seed=seed, noise=data.noise,
        duplicates=data.duplicates, junk=data.junk, imbalance=data.imbalance,
        repeats=data.repeats, repeats_of=data.repeats_of,
    )  # fmt: skip


def _validating(drawn: Samples, data: DataConfig, *, seed: int) -> Samples:
    """Make samples to validate on: labels of images are as noisy, text stays clean."""
    if isinstance(drawn, LabelledText):
        return drawn
    return corrupt(drawn, num_classes=data.num_classes, seed=seed, noise=data.noise).data


def missing_cells(cells: Sequence[Cell], out: Path) -> list[Cell]:
    """Leave out the cells that have their file."""
    there = _names(out)
    return [cell for cell in cells if cell.file_name not in there]


def is_wanted(cell: Cell, out: Path, *, call: str) -> bool:
    """Whether a cell is to be trained by a call: it has no file, and did not fail in this call."""
    if not missing_cells([cell], out):
        return False
    failure = read_failure(out, cell)
    return failure is None or failure["call"] != call


def _names(out: Path) -> set[str]:
    # Listed, not looked up: NFS may remember for a minute that a name is not there
    try:
        return {path.name for path in (out / CELLS).iterdir()}
    except FileNotFoundError:
        return set()


def error_path(out: Path, cell: Cell) -> Path:
    """Name the file that keeps why a cell failed."""
    return (out / CELLS / cell.file_name).with_suffix(".error")


def write_failure(out: Path, cell: Cell, *, call: str, error: str, trace: str = "") -> None:
    """Keep why a cell failed."""
    document = {
        "arm": cell.arm.name,
        "seed": cell.seed,
        "call": call,
        "error": error,
        "host": socket.gethostname(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "trace": trace.splitlines(),
    }
    write_json(error_path(out, cell), document)


def read_failure(out: Path, cell: Cell) -> Mapping[str, str] | None:
    """Read why a cell failed last, under ``error``, and in which ``call``; None if it did not."""
    try:
        document = json.loads(error_path(out, cell).read_text())
        return {name: str(document[name]) for name in ("call", "error")}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        return {"call": "", "error": f"{error_path(out, cell)} cannot be read: {error}"}


def read_cells(study: Study, out: Path) -> dict[str, dict[int, CellFile]]:
    """Read the cells that are there: by arm, by seed."""
    found: dict[str, dict[int, CellFile]] = {}
    there = _names(out)
    for cell in study.cells():
        path = out / CELLS / cell.file_name
        if cell.file_name in there:
            found.setdefault(cell.arm.name, {})[cell.seed] = _read(path)
    return found


def _read(path: Path) -> CellFile:
    try:
        document = json.loads(path.read_text())
        if not {"accuracy", "wall_s", "cpu_s", "commit"} <= document.keys():
            raise ValueError("keys are missing")
        _check_numbers(document, ("accuracy", "wall_s", "cpu_s"))
        _check_numbers(document, [name for name in FIGURES if document.get(name) is not None])
        for point in document.get("epochs") or []:
            given = [name for name in ("accuracy", "train_s") if point.get(name) is not None]
            _check_numbers(point, given)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CommandError(
            f"{path}: cannot be read as a cell's results: {error}; remove it, and the same command "
            f"trains the cell again"
        ) from error
    result: CellFile = document
    return result


def _check_numbers(document: CellFile, names: Iterable[str]) -> None:
    for name in names:
        value = document[name]
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}, expected a number")


def _load(study: Study) -> tuple[Samples, Samples]:
    data = study.data
    train, test = _load_text(data) if data.kind == "text" else _load_images(data)
    # Too many are wrong for every cell
    draw_subsets(train, data.train_samples, data.validation_samples, seed=0)
    return train, draw_subset(test, data.test_samples, seed=0)


def _load_text(data: DataConfig) -> tuple[Samples, Samples]:
    train, test = (
        load_text(getattr(data, name), sequence_length=data.sequence_length, key=f"data.{name}")
        for name in ("train", "test")
    )
    return train, test


def _load_images(data: DataConfig) -> tuple[Samples, Samples]:
    assert data.image_size is not None, "the settings of images give it"
    train, test = (
        load_images(
            source, image=data.image, label=data.label, image_size=data.image_size, truth=truth
        )
        for source, truth in ((data.train, data.truth), (data.test, ""))
    )
    found = [("train", train.labels), ("test", test.labels)]
    if train.truth is not None:
        found.append(("truth", train.truth))
    for name, labels in found:
        if labels.min() < 0 or labels.max() >= data.num_classes:
            raise ConfigError(
                f"data.{name}: has classes {labels.min()} to {labels.max()}, expected 0 to "
                f"{data.num_classes - 1}; correct data.num_classes, or the labels"
            )
    return train, test


def _document(study: Study, cell: Cell, result: CellResult, command: str) -> dict[str, object]:
    return {
        "arm": cell.arm.name,
        "seed": cell.seed,
        "accuracy": result.accuracy,
        "test_loss": result.test_loss,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "train_s": result.train_s,
        "rows_trained": result.rows_trained,
        "rows_refreshed": result.rows_refreshed,
        "cost_rows": result.cost_rows,
        "flops": result.flops,
        "hidden_fraction": result.hidden_fraction,
        "hidden_precision": result.hidden_precision,
        "hidden_recall": result.hidden_recall,
        "epochs": [asdict(point) for point in result.points],
        "settings": as_tables(cell.arm.settings),
        "data": bare_within(asdict(study.data)),
        "device": study.study.device,
        "machine": _machine_words(),
        "torch": str(torch.__version__),
        "commit": commit(Path(__file__).parent) or "unknown",
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _machine_words() -> str:
    found = describe_machine(Path.cwd())
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{found['cpu']}, {found['cores']} cores{gpu}"
