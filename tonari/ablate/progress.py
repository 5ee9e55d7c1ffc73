"""How far a study is, and how long the rest will take."""

import heapq
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tonari.ablate.report import CellFile, number
from tonari.ablate.study import Cell


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened to a cell; who trains reports it to who counts.

    Attributes:
        kind: ``"begun"``, ``"done"`` or ``"failed"``; ``"refused"`` is of no cell: nothing can be
            trained, for the reason in ``error``.
        cell: Its file's name.
        accuracy: When done, as is ``test_loss``.
        wall_s: When done.
        error: When failed or refused.
    """

    kind: Literal["begun", "done", "failed", "refused"]
    cell: str = ""
    accuracy: float = 0.0
    test_loss: float = 0.0
    wall_s: float = 0.0
    error: str = ""


class Durations:
    """Seconds that a cell takes: the mean of its arm's, of all where its arm has none yet."""

    def __init__(self, found: Mapping[str, Mapping[int, CellFile]]) -> None:
        self._known = {
            arm: [number(cell, "wall_s") for cell in cells.values()] for arm, cells in found.items()
        }

    def add(self, arm: str, wall_s: float) -> None:
        self._known.setdefault(arm, []).append(wall_s)

    def of(self, arm: str) -> float | None:
        """Estimate a cell of this arm; None while nothing is known."""
        known = self._known.get(arm) or [s for each in self._known.values() for s in each]
        return sum(known) / len(known) if known else None


def seconds_left(running_s: Sequence[float], waiting_s: Iterable[float], *, jobs: int) -> float:
    """Say when the last of some cells ends, each taken by the first process that is free.

    Args:
        running_s: What is left of those that run, one a process.
        waiting_s: Of those that wait, in their order.
        jobs: Processes that take the next when they have ended theirs, >= 1.
    """
    free = [max(0.0, left) for left in running_s]
    free += [0.0] * (jobs - len(free))
    heapq.heapify(free)
    for cell_s in waiting_s:
        heapq.heappush(free, heapq.heappop(free) + cell_s)
    return max(free)


def duration(seconds: float) -> str:
    """Write a duration as it is read best."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    minutes = seconds / 60
    return f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"


class Progress:
    """Counts cells and says on stderr how far they are."""

    def __init__(self, missing: Sequence[Cell], durations: Durations, *, jobs: int) -> None:
        self._left = {cell.file_name: cell for cell in missing}
        self._total, self._jobs, self._durations = len(missing), jobs, durations
        self._begun: dict[str, float] = {}

    def notify(self, event: Event) -> None:
        """Take an event in."""
        if event.kind == "begun":
            self._begun[event.cell] = time.monotonic()
            return
        self._begun.pop(event.cell, None)
        cell = self._left.pop(event.cell, None)
        if cell is None:
            return
        if event.kind == "done":
            self._durations.add(cell.arm.name, event.wall_s)
            words = f"{event.accuracy:.2%}, loss {event.test_loss:.4f}, in {event.wall_s:.0f} s"
        else:
            words = f"failed: {event.error}"
        count = self._total - len(self._left)
        print(
            f"[{count}/{self._total}] {cell.arm.name}, seed {cell.seed}: {words}{self._rest()}",
            file=sys.stderr,
            flush=True,
        )

    def _rest(self) -> str:
        running, waiting = [], []
        for name, cell in self._left.items():
            cell_s = self._durations.of(cell.arm.name)
            if cell_s is None:
                return ""
            if name in self._begun:
                running.append(cell_s - (time.monotonic() - self._begun[name]))
            else:
                waiting.append(cell_s)
        if not running and not waiting:
            return ""
        jobs = max(self._jobs, len(running))
        return f"; about {duration(seconds_left(running, waiting, jobs=jobs))} left"
