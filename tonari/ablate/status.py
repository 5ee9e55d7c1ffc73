"""Which cells of a study are there, running, missing or failed, without training any."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dataio.base.claim import Claimant
from tonari.ablate.cells import missing_cells, read_failure
from tonari.ablate.claims import claimant
from tonari.ablate.progress import Durations, duration, seconds_left
from tonari.ablate.report import CellFile
from tonari.ablate.study import Cell

State = Literal["there", "running", "missing", "failed"]
STATES: tuple[State, ...] = ("there", "running", "missing", "failed")


@dataclass(frozen=True)
class CellState:
    """A cell, and who trains it or why it failed."""

    arm: str
    seed: int
    file: str
    state: State
    by: Claimant | None = None
    error: str = ""


def cell_states(cells: Sequence[Cell], out: Path) -> list[CellState]:
    """Look at some cells. A failed one is trained again by the next call."""
    missing = {cell.file_name for cell in missing_cells(cells, out)}
    return [_state(cell, out, is_missing=cell.file_name in missing) for cell in cells]


def _state(cell: Cell, out: Path, *, is_missing: bool) -> CellState:
    named = (cell.arm.name, cell.seed, cell.file_name)
    if not is_missing:
        return CellState(*named, "there")
    if by := claimant(out, cell):
        return CellState(*named, "running", by=by)
    if failure := read_failure(out, cell):
        return CellState(*named, "failed", error=failure["error"])
    return CellState(*named, "missing")


def status_document(
    states: Sequence[CellState], found: Mapping[str, Mapping[int, CellFile]], *, jobs: int
) -> dict[str, object]:
    """Sum up.

    Args:
        states: Of the cells.
        found: Cells that are there, whose seconds say how long others take.
        jobs: Processes that train the rest, if more than do so now.
    """
    durations, now = Durations(found), time.time()
    running, waiting = [], []
    for cell in states:
        cell_s = durations.of(cell.arm) or 0.0
        if cell.by:
            running.append(cell_s - (now - cell.by.since_s))
        elif cell.state != "there":
            waiting.append(cell_s)
    return {
        "counts": {name: sum(cell.state == name for cell in states) for name in STATES},
        "jobs": max(jobs, len(running)),
        "seconds_left": seconds_left(running, waiting, jobs=jobs) if found else None,
        "cells": [asdict(cell) for cell in states],
    }


def status_text(states: Sequence[CellState], document: Mapping[str, object]) -> str:
    """Lay out a status: a line an arm, then what runs and what failed."""
    arms = list(dict.fromkeys(cell.arm for cell in states))
    width = max(len(arm) for arm in [*arms, "all"])
    lines = [" ".join([" " * width, *(f"{name:>8}" for name in STATES)])]
    rows = [(arm, [cell.state for cell in states if cell.arm == arm]) for arm in arms]
    for name, own in [*rows, ("all", [cell.state for cell in states])]:
        lines.append(" ".join([f"{name:<{width}}", *(f"{own.count(s):>8}" for s in STATES)]))
    for cell in states:
        if cell.by:
            since = duration(max(0.0, time.time() - cell.by.since_s))
            lines.append(f"running for {since}: {cell.arm}, seed {cell.seed}: {cell.by}")
        if cell.state == "failed":
            lines.append(f"failed: {cell.arm}, seed {cell.seed}: {cell.error}")
    return "\n".join([*lines, _rest(states, document)])


def _rest(states: Sequence[CellState], document: Mapping[str, object]) -> str:
    if all(cell.state == "there" for cell in states):
        return "all cells are there"
    seconds = document["seconds_left"]
    if not isinstance(seconds, float):
        return "no cell is there yet to say how long the rest will take"
    jobs = document["jobs"]
    with_them = "one process" if jobs == 1 else f"{jobs} processes"
    return f"about {duration(seconds)} for the rest with {with_them}"
