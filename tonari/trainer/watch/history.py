"""What a run measured, thinned so that a page can show it whole."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dataio.base.lines import parse_checked_line
from tonari.report.chart import Curve
from tonari.trainer.watch.metrics import Line
from tonari.trainer.watch.parts import time_by_cause
from tonari.trainer.watch.spikes import Logged, Spike, find_spikes

MOST = 300
"""Points of a curve: of a longer run each is the mean of several lines."""
SPIKE = 10.0
"""As `tonari rows --spikes`."""


class History:
    """The lines of a run, as few as can be drawn: where there are more, the mean of several."""

    def __init__(self) -> None:
        self._lines: dict[str, list[dict[str, Any]]] = {"step": [], "epoch": [], "test": []}
        self._waiting: dict[str, list[dict[str, Any]]] = {kind: [] for kind in self._lines}
        self._together = dict.fromkeys(self._lines, 1)
        self.last: dict[str, Any] = {}
        self.spent: dict[str, float] = {}

    def add(self, line: Line) -> None:
        """Take a line of the metrics."""
        kind = str(line["kind"])
        known = {k: v for k, v in line.items() if not isinstance(v, float) or math.isfinite(v)}
        if isinstance(source := known.get("source_bytes"), int | float):
            known["source_mb"] = source / 1e6
        # An evaluation may be of an earlier step than lines before it.
        late = ("step", "epoch") if known["step"] < self.last.get("step", 0) else ()
        self.last |= {k: v for k, v in known.items() if v is not None and k not in late}
        if kind in ("epoch", "evaluation") and known.get("evaluation_loss") is not None:
            self._take("test", known)
        if kind == "epoch":
            for cause, seconds in time_by_cause(line).items():
                known[cause] = seconds
                self.spent[cause] = self.spent.get(cause, 0.0) + seconds
        if kind in ("step", "epoch"):
            self._take(kind, known)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """List the lines of a kind."""
        waiting = self._waiting[kind]
        return self._lines[kind] + ([_mean(waiting)] if waiting else [])

    def curve(self, kind: str, key: str, name: str) -> Curve:
        """Make a curve of a figure, perhaps without a point."""
        lines = [line for line in self.of(kind) if line.get(key) is not None]
        points = [(line["step"], line[key]) for line in lines]
        is_wide = key == "loss" and any("most" in line for line in lines)
        band = [(line.get("least", line[key]), line.get("most", line[key])) for line in lines]
        return Curve(name, points, band if is_wide else ())

    def spikes(self) -> list[Spike]:
        """Find steps whose loss rose far above that of those around."""
        before, found = 0, []
        for line in self.of("step"):
            loss = line.get("most", line.get("loss"))
            steps, before = range(before + 1, line["step"] + 1), line["step"]
            found.append(Logged(line["epoch"], steps, math.inf if loss is None else loss))
        return find_spikes(found, times=SPIKE)[0]

    def _take(self, kind: str, line: dict[str, Any]) -> None:
        lines, waiting = self._lines[kind], self._waiting[kind]
        waiting.append(line)
        if len(waiting) < self._together[kind]:
            return
        lines.append(_mean(waiting))
        waiting.clear()
        if len(lines) >= 2 * MOST:
            lines[:] = [_mean(lines[n : n + 2]) for n in range(0, len(lines), 2)]
            self._together[kind] *= 2


def _mean(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put lines together: the mean of each figure, of the loss its bounds too."""
    if len(lines) == 1:
        return lines[0]
    numbers = {
        key: [line[key] for line in lines if isinstance(line.get(key), int | float)]
        for key in {key: None for line in lines for key in line}
    }
    losses = [line for line in lines if line.get("loss") is not None]
    bounds = {
        "least": min(line.get("least", line["loss"]) for line in losses),
        "most": max(line.get("most", line["loss"]) for line in losses),
    } if losses else {}  # fmt: skip
    means = {key: fmean(values) for key, values in numbers.items() if values}
    return {**means, **bounds, "step": lines[-1]["step"], "epoch": lines[-1]["epoch"]}


def read_history(path: Path) -> History:
    """Read the metrics of a run; a line that is damaged, or not there yet, is left out."""
    history = History()
    for text in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            line = parse_checked_line(text)
        except ValueError:
            continue
        if line and "kind" in line:
            history.add(line)
    return history
