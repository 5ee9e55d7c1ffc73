"""Cells on disk: train those that are missing, read those that are there."""

import json
import math
import shutil
import socket
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch

from dataio import DataioError
from dataio.base.atomic import write_json
from dataio.base.location import bare_within
from tonari.ablate.claims import claim
from tonari.ablate.progress import Event
from tonari.ablate.report import CellFile
from tonari.ablate.study import Cell, Study
from tonari.ablate.training import Trained, run_directory, train_cell
from tonari.errors import CommandError
from tonari.report.machine import commit, describe_machine

CELLS = "cells"

FIGURES = ("accuracy", "test_loss", "wall_s", "train_s", "rows_trained", "cost_rows",
           "hidden_fraction")  # fmt: skip
"""Of a cell's results."""


def train_missing(
    study: Study,
    cells: Sequence[Cell],
    out: Path,
    *,
    command: str,
    call: str,
    notify: Callable[[Event], None],
    max_cells: int | None = None,
) -> None:
    """Train cells that are not there and that nobody works on, one after the other.

    Each is kept at its end. One that fails is kept as an error, reported, and left to another
    call; one that a signal stops goes on from its checkpoint in the next call.

    Args:
        study: What they belong to.
        cells: All that are wanted, those to be tried first in front.
        out: Directory of the study.
        command: What was typed, to be kept with each result.
        call: Names what was started at once; a cell fails only once in it.
        notify: Takes what happens to each cell.
        max_cells: Cells to try at most; None: all.
    """
    if not missing_cells(cells, out):
        return
    # One thread a cell, however many there are: sums, and so results, depend on their number
    torch.set_num_threads(1)
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
                    notify(Event(kind="begun", cell=cell.file_name))
                    notify(_train(study, cell, out, command=command, call=call))
                    tried += 1
        max_cells = None if max_cells is None else max_cells - tried


def _train(study: Study, cell: Cell, out: Path, *, command: str, call: str) -> Event:
    try:
        trained = train_cell(study.study, cell, out)
    # Whatever it is: other cells may well succeed, and the command says it again at its end
    except Exception as error:
        plain = isinstance(error, (DataioError, CommandError))
        words = str(error) if plain else f"{type(error).__name__}: {error}"
        write_failure(out, cell, call=call, error=words, trace=traceback.format_exc())
        return Event(kind="failed", cell=cell.file_name, error=words)
    write_json(out / CELLS / cell.file_name, _document(cell, trained, command))
    error_path(out, cell).unlink(missing_ok=True)
    # Not before: a kill in between would cost the cell.
    if not study.study.keep_runs:
        shutil.rmtree(run_directory(cell, out))
    accuracy, loss = trained.accuracy, trained.test_loss
    return Event(
        kind="done", cell=cell.file_name, accuracy=accuracy, test_loss=loss, wall_s=trained.wall_s
    )


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
        if missing := {"epochs", "commit", *FIGURES} - document.keys():
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        _check_numbers(document, FIGURES)
        for point in document["epochs"]:
            judged = ("accuracy", "test_loss") if point["accuracy"] is not None else ()
            _check_numbers(point, ("train_s", *judged))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
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


def _document(cell: Cell, trained: Trained, command: str) -> dict[str, object]:
    return {
        "arm": cell.arm.name,
        "seed": cell.seed,
        **asdict(trained),
        "settings": bare_within(cell.arm.settings),
        "device": cell.arm.config(cell.seed).run.device,
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
