"""What a study found: a table as Markdown and CSV, a plot, and all of it as one document."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dataio.atomic import write_file, write_json
from tonari.ablate_stats import Difference, Mean, mean_over_seeds, paired_difference, verdict
from trainer.study_config import Arm, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CellFile = Mapping[str, object]
"""A cell's results, as its JSON file holds them."""

POINTS = 100.0


@dataclass(frozen=True)
class Line:
    """An arm in the table; accuracies and differences in points (hundredths)."""

    arm: str
    baseline: str
    accuracy: Mean | None
    difference: Difference | None
    verdict: str
    wall_s: float | None
    cpu_s: float | None


def report_lines(study: Study, found: Mapping[str, Mapping[int, CellFile]]) -> list[Line]:
    """Sum up every arm.

    Args:
        study: Its arms and margin.
        found: Cells that are there, by arm and seed.
    """
    accuracies = {
        arm: {seed: POINTS * number(cell, "accuracy") for seed, cell in cells.items()}
        for arm, cells in found.items()
    }
    return [
        _line(arm, accuracies, found.get(arm.name, {}), margin=study.study.margin_points)
        for arm in study.arms
    ]


def _line(
    arm: Arm,
    accuracies: Mapping[str, Mapping[int, float]],
    cells: Mapping[int, CellFile],
    *,
    margin: float,
) -> Line:
    own = accuracies.get(arm.name, {})
    wall_s, cpu_s = (
        sum(number(cell, name) for cell in cells.values()) / len(cells) if cells else None
        for name in ("wall_s", "cpu_s")
    )
    difference, words = None, "baseline"
    if arm.name != arm.baseline:
        difference = paired_difference(own, accuracies.get(arm.baseline, {}))
        words = verdict(difference, margin=margin)
    return Line(
        arm.name,
        arm.baseline,
        mean_over_seeds(list(own.values())) if own else None,
        difference,
        words,
        wall_s,
        cpu_s,
    )


def write_report(
    directory: Path, study: Study, found: Mapping[str, Mapping[int, CellFile]], command: str
) -> dict[str, object]:
    """Write table.md, table.csv, study.json and accuracy.png.

    Args:
        directory: Where to; made if need be.
        study: What was compared.
        found: Cells that are there, by arm and seed.
        command: What was typed.

    Returns:
        The document that study.json holds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lines = report_lines(study, found)
    cells = [cell for by_seed in found.values() for cell in by_seed.values()]
    document: dict[str, object] = {
        "table": _table(lines),
        "command": command,
        "commits": sorted({str(cell["commit"]) for cell in cells}),
        "seeds": study.study.seeds,
        "cells": len(cells),
        "cells_expected": len(study.cells()),
        "wall_s": sum(number(cell, "wall_s") for cell in cells),
        "cpu_s": sum(number(cell, "cpu_s") for cell in cells),
        "margin_points": study.study.margin_points,
        "data": asdict(study.data),
        "arms": [asdict(line) for line in lines],
        "settings": {arm.name: asdict(arm.settings) for arm in study.arms},
    }
    write_file(directory / "table.md", markdown(document).encode())
    write_file(directory / "table.csv", _csv(lines).encode())
    write_json(directory / "study.json", document)
    if cells:
        draw(directory / "accuracy.png", study, lines, found)
    return document


def markdown(document: Mapping[str, object]) -> str:
    """Lay out the table of a report's document, and say below how it was made."""
    commits = document["commits"]
    assert isinstance(commits, list)
    return "\n".join(
        [
            str(document["table"]),
            "",
            f"Mean and standard deviation over seeds; differences are paired by seed. "
            f"{document['cells']} of {document['cells_expected']} cells, "
            f"{number(document, 'wall_s') / 60:.0f} minutes of training in all, "
            f"{number(document, 'cpu_s') / 60:.0f} of the processor.",
            "",
            f"Command: `{document['command']}`; commit {', '.join(commits) or 'none yet'}.",
            "",
        ]
    )


def _table(lines: Sequence[Line]) -> str:
    rows = [
        "| arm | test accuracy, % | difference, points | 95 % interval | compared with | verdict "
        "| seconds a cell (CPU) |",
        "|---|---:|---:|---:|---|---|---:|",
    ]
    rows += [f"| {' | '.join(_words(line))} |" for line in lines]
    return "\n".join(rows)


def number(document: Mapping[str, object], name: str) -> float:
    """Take a number out of a document."""
    value = document[name]
    assert isinstance(value, int | float), f"{name} is {value!r}"
    return float(value)


def _words(line: Line) -> list[str]:
    accuracy, difference, interval = "-", "-", "-"
    if line.accuracy:
        spread = line.accuracy.deviation
        accuracy = f"{line.accuracy.mean:.2f}" + ("" if spread is None else f" ± {spread:.2f}")
    if line.difference:
        difference = f"{line.difference.mean:+.2f}"
        if line.difference.low is not None:
            interval = f"[{line.difference.low:+.2f}, {line.difference.high:+.2f}]"
    seconds = "-" if line.wall_s is None else f"{line.wall_s:.0f} ({line.cpu_s:.0f})"
    against = "-" if line.arm == line.baseline else line.baseline
    return [line.arm, accuracy, difference, interval, against, line.verdict, seconds]


def _csv(lines: Sequence[Line]) -> str:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(
        ["arm", "compared_with", "seeds", "accuracy_mean_points", "accuracy_deviation_points",
         "difference_mean_points", "difference_low_points", "difference_high_points", "verdict",
         "wall_s", "cpu_s"]
    )  # fmt: skip
    for line in lines:
        accuracy, difference = line.accuracy, line.difference
        writer.writerow(
            [
                line.arm, line.baseline, accuracy.num_seeds if accuracy else 0,
                accuracy and accuracy.mean, accuracy and accuracy.deviation,
                difference and difference.mean, difference and difference.low,
                difference and difference.high, line.verdict, line.wall_s, line.cpu_s,
            ]
        )  # fmt: skip
    return file.getvalue()


def draw(
    path: Path,
    study: Study,
    lines: Sequence[Line],
    found: Mapping[str, Mapping[int, CellFile]],
) -> None:
    """Draw every seed's accuracy and the mean of each arm, and the paired differences."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.5 + 0.32 * len(lines)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, line in enumerate(lines):
        cells = found.get(line.arm, {}).values()
        values = [POINTS * number(cell, "accuracy") for cell in cells]
        left.plot(values, [place] * len(values), "o", color="#1f77b4", alpha=0.35, markersize=4)
        if line.accuracy:
            left.plot(line.accuracy.mean, place, "|", color="black", markersize=14)
        if line.difference:
            _draw_difference(right, place, line.difference)
    margin = study.study.margin_points
    right.axvspan(-margin, margin, color="#2ca02c", alpha=0.15)
    right.axvline(0, color="black", linewidth=0.8)
    left.set_yticks(range(len(lines)), [line.arm for line in lines])
    left.invert_yaxis()
    left.set(xlabel="test accuracy, % (dots: seeds, bar: mean)")
    right.set(xlabel=f"points against its baseline, 95 % interval (green: within {margin:g})")
    figure.savefig(path, dpi=120)


def _draw_difference(axes: "Axes", place: int, difference: Difference) -> None:
    if difference.low is not None and difference.high is not None:
        axes.plot([difference.low, difference.high], [place, place], color="#1f77b4", linewidth=2)
    axes.plot(difference.mean, place, "o", color="#1f77b4")
