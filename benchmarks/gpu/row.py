"""A row of what a card is asked, its cases, and how what was measured is kept."""

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dataio.base.atomic import write_json
from tonari.report.machine import describe_machine

MOST_S = 480.0
"""For a row, before it is ended; what it has measured by then is kept."""
MOST_WORDS = 400

Ways = dict[str, dict[str, float]]
"""What a case found: the figures of each way that was compared in it, each with its unit's name."""

UNFINISHED = "cells_missing"
"""A figure of a way that is not 0 where the case should go on in a later call."""


@dataclass(frozen=True)
class Goal:
    """What a figure of a way should be: at most, or at least, so much."""

    way: str
    figure: str
    most: float | None = None
    least: float | None = None

    def reached(self, ways: Ways) -> bool | None:
        """Say whether it was; None: the figure is not there."""
        found = ways.get(self.way, {}).get(self.figure)
        if found is None:
            return None
        return (self.most is None or found <= self.most) and (
            self.least is None or found >= self.least
        )


@dataclass(frozen=True)
class Case:
    """Ways that are measured together, by turns.

    Attributes:
        name: In its row.
        measure: Takes the figures, medians of the turns; runs where the row runs.
        goals: What they should be.
        lacks: What is not here that it needs; empty: nothing.
    """

    name: str
    measure: Callable[[], Ways]
    goals: tuple[Goal, ...] = ()
    lacks: str = ""


@dataclass(frozen=True)
class Setting:
    """Where, and how large, rows are measured.

    Attributes:
        device: "cuda" or "cpu".
        tiny: All as small as it gets: seconds on a CPU, and figures of no meaning.
        work: Directory for data that is made, caches and checkpoints; kept between calls.
        data: Directory of CIFAR-10, where it was carried.
        ends: When nothing new is begun, by `time.monotonic`.
    """

    device: str
    tiny: bool
    work: Path
    data: Path
    ends: float

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()


class Row(Protocol):
    """A file of this folder: one question, asked of one card within `MOST_S`."""

    @property
    def QUESTION(self) -> str:
        """What it asks, for the report."""
        ...

    def cases(self, setting: Setting) -> Sequence[Case]:
        """List its cases in the order of worth; of the same names whatever the setting."""
        ...


class RowFile:
    """The figures of a row's cases, by card and torch, in a file of JSON.

    Args:
        path: The file; made with the first case.
        commit: Of the code, where it does not lie in a git repository.
    """

    def __init__(self, path: Path, *, commit: str = "") -> None:
        self._path = path
        self._where = describe_card() | ({"commit": commit} if commit else {})
        self._cases = read_cases(path)

    def is_measured(self, case: Case) -> bool:
        """Whether it has all its figures, of a card and a torch as they are here."""
        ways = self._cases.get(self._key(case), {}).get("ways", {})
        return bool(ways) and not any(figures.get(UNFINISHED) for figures in ways.values())

    def add(self, case: Case, *, ways: Ways | None = None, problem: str = "") -> None:
        """Keep what a case found, or why it found nothing, beside what it had found before."""
        if ways is None:
            ways = self._cases.get(self._key(case), {}).get("ways", {})
        goals = [vars(goal) | {"reached": goal.reached(ways)} for goal in case.goals]
        found = {"case": case.name, "ways": ways, "goals": goals, "problem": problem}
        self._cases[self._key(case)] = found | self._where
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, self._cases)

    def _key(self, case: Case) -> str:
        return f"{case.name}, {self._where['card']}, torch {self._where['torch']}"


def read_cases(path: Path) -> dict[str, dict[str, Any]]:
    """Read what a row has found so far, a case a card and torch."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def describe_card() -> dict[str, object]:
    """Name the card, or the CPU where there is none, its driver and torch, beside the machine."""
    machine, on_gpu = describe_machine(Path.cwd()), torch.cuda.is_available()
    return {name: machine[name] for name in ("date", "commit", "cpu", "cores", "python")} | {
        "card": torch.cuda.get_device_name() if on_gpu else f"no GPU: {machine['cpu']}",
        "driver": _driver() if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    return (ended.stdout.splitlines() or [""])[0].strip() or None


def run_row(row: Row, setting: Setting, kept: RowFile) -> None:
    """Measure the cases that have no figures yet, while there is time; one that fails says so."""
    for case in row.cases(setting):
        if kept.is_measured(case):
            continue
        if case.lacks:
            kept.add(case, problem=f"left out: {case.lacks}")
            continue
        if setting.seconds_left <= 0:
            print(f"{case.name}: no time was left", flush=True)
            return
        print(f"{case.name} ...", flush=True)
        started = time.monotonic()
        try:
            kept.add(case, ways=case.measure())
        except (Exception, SystemExit) as error:
            traceback.print_exc(file=sys.stdout)
            words = (str(error).strip().splitlines() or [""])[-1][:MOST_WORDS]
            kept.add(case, problem=f"{type(error).__name__}: {words}")
        print(f"{case.name}: {time.monotonic() - started:.0f} s", flush=True)
