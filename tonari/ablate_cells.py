"""Cells on disk: train those that are missing, read those that are there."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.machine import commit
from dataio.atomic import write_json
from tonari.ablate_report import CellFile
from tonari.errors import CommandError
from trainer.errors import ConfigError
from trainer.study_config import Cell, Study
from trainer.study_data import LabelledImages, draw_subset, load_images
from trainer.study_run import CellResult, train_cell

CELLS = "cells"


def train_missing(
    study: Study, cells: Sequence[Cell], out: Path, *, command: str, is_part: bool = False
) -> None:
    """Train the cells whose files are not there, one after the other; each is kept at its end.

    Args:
        study: What they belong to.
        cells: All that are wanted.
        out: Directory of the study.
        command: What was typed, to be kept with each result.
        is_part: Whether `train_in_processes` started this process, whose end then ends it too.
    """
    directory = out / CELLS
    directory.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if not (directory / cell.file_name).exists()]
    if not missing:
        return
    if study.study.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "study.device is 'cuda', but torch sees no CUDA device here; give study.device=cpu"
        )
    # One thread a cell, however many there are: sums, and so results, depend on their number
    torch.set_num_threads(1)
    train, test = _load(study)
    parent, begun = os.getppid(), time.perf_counter()
    for count, cell in enumerate(missing, start=1):
        result = train_cell(
            cell.arm.settings,
            draw_subset(train, study.data.train_samples, seed=cell.seed),
            test,
            num_classes=study.data.num_classes,
            seed=cell.seed,
            device=study.study.device,
        )
        write_json(directory / cell.file_name, _document(study, cell, result, command))
        _say(cell, result, count, len(missing), time.perf_counter() - begun)
        if is_part and os.getppid() != parent:
            return  # nobody waits for the rest


def train_in_processes(argv: Sequence[str], jobs: int, *, command: str) -> None:
    """Train the missing cells in some processes, each every jobs-th of them. Blocks until done.

    Raises:
        CommandError: If one of them failed; the others' cells are kept.
    """
    begin = [sys.executable, "-m", "tonari", "ablate", *argv, "--command", command, "--part"]
    running = [
        subprocess.Popen([*begin, str(part)], stdout=subprocess.DEVNULL) for part in range(jobs)
    ]
    try:
        statuses = [process.wait() for process in running]
    finally:
        for process in running:
            process.terminate()
    failed = [str(status) for status in statuses if status]
    if failed:
        raise CommandError(
            f"{len(failed)} of {jobs} training processes ended with status {', '.join(failed)}, "
            f"expected 0; what they said is above. The same command goes on from here"
        )


def read_cells(study: Study, out: Path) -> dict[str, dict[int, CellFile]]:
    """Read the cells that are there: by arm, by seed."""
    found: dict[str, dict[int, CellFile]] = {}
    for cell in study.cells():
        path = out / CELLS / cell.file_name
        if path.exists():
            found.setdefault(cell.arm.name, {})[cell.seed] = _read(path)
    return found


def _read(path: Path) -> CellFile:
    try:
        document = json.loads(path.read_text())
        if not {"accuracy", "wall_s", "cpu_s", "commit"} <= document.keys():
            raise ValueError("keys are missing")
    except (OSError, ValueError, AttributeError) as error:
        raise CommandError(
            f"{path}: cannot be read as a cell's results: {error}; remove it, and the same command "
            f"trains the cell again"
        ) from error
    result: CellFile = document
    return result


def _load(study: Study) -> tuple[LabelledImages, LabelledImages]:
    data = study.data
    train, test = (
        load_images(source, image=data.image, label=data.label, image_size=data.image_size)
        for source in (data.train, data.test)
    )
    for name, labels in (("train", train.labels), ("test", test.labels)):
        if labels.min() < 0 or labels.max() >= data.num_classes:
            raise ConfigError(
                f"data.{name}: has classes {labels.min()} to {labels.max()}, expected 0 to "
                f"{data.num_classes - 1}; correct data.num_classes, or the labels"
            )
    return train, draw_subset(test, data.test_samples, seed=0)


def _document(study: Study, cell: Cell, result: CellResult, command: str) -> dict[str, object]:
    return {
        "arm": cell.arm.name,
        "seed": cell.seed,
        "accuracy": result.accuracy,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "train_s": result.train_s,
        "rows_trained": result.rows_trained,
        "rows_refreshed": result.rows_refreshed,
        "flops": result.flops,
        "hidden_fraction": result.hidden_fraction,
        "epochs": [asdict(point) for point in result.points],
        "settings": asdict(cell.arm.settings),
        "data": asdict(study.data),
        "device": study.study.device,
        "torch": str(torch.__version__),
        "commit": commit(Path(__file__).parent) or "unknown",
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _say(cell: Cell, result: CellResult, count: int, total: int, elapsed_s: float) -> None:
    left_minutes = elapsed_s / count * (total - count) / 60
    print(
        f"[{count}/{total}] {cell.arm.name}, seed {cell.seed}: {result.accuracy:.2%} in "
        f"{result.wall_s:.0f} s; about {left_minutes:.0f} minutes left",
        file=sys.stderr,
        flush=True,
    )
