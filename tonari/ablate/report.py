"""What a study found: tables, plots, a page to look at, and all of it as one document."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dataio.base.atomic import write_file, write_json
from dataio.base.location import bare_within
from tonari.ablate.controls import CONTROLS
from tonari.ablate.equal_loss import EqualLoss, as_document, equal_loss, table_of
from tonari.ablate.findings import findings
from tonari.ablate.html import page
from tonari.ablate.lines import Line, report_lines
from tonari.ablate.measure import ACCURACY, LOSS, POINTS, measure_of
from tonari.ablate.plots import draw_accuracy, draw_pareto
from tonari.ablate.results import ArmResults, CellFile, gather_arms, number
from tonari.ablate.study import Study
from tonari.ablate.words import (
    COST_COLUMNS,
    WRONG_COLUMNS,
    has_costs,
    table_columns,
    table_row,
    verdict_sentence,
)
from tonari.report.pictures import render
from tonari.report.tables import Table, to_csv

__all__ = ["CellFile", "markdown", "number", "report_lines", "report_words", "write_report"]

LOSS_POINTS = (
    "Arms are judged by the mean loss on the test samples. A point is a hundredth of a nat, "
    "and more points are a lower loss."
)


def write_report(
    directory: Path, study: Study, found: Mapping[str, Mapping[int, CellFile]], command: str
) -> dict[str, object]:
    """Write report.html, table.md, table.csv, study.json, accuracy.png and pareto.png.

    Args:
        directory: Where to; made if need be.
        study: What was compared.
        found: Cells that are there, by arm and seed.
        command: What was typed.

    Returns:
        The document that study.json holds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lines, arms = report_lines(study, found), gather_arms(study, found)
    document = _document(study, lines, arms, command)
    write_file(directory / "table.md", markdown(document).encode())
    write_file(directory / "table.csv", _csv(lines).encode())
    write_json(directory / "study.json", document)
    if any(arm.cells for arm in arms):
        _write_plots(directory, arms, lines, study.study.margin_points)
    write_file(directory / "report.html", page(document, arms, lines).encode())
    return document


def _write_plots(
    directory: Path, arms: Sequence[ArmResults], lines: Sequence[Line], margin: float
) -> None:
    size = (12, 1.5 + 0.32 * len(lines))
    drawn = render(lambda f: draw_accuracy(f, arms, lines, margin), inches=size, kind="png")
    write_file(directory / "accuracy.png", drawn)
    if has_costs(lines):
        drawn = render(lambda f: draw_pareto(f, arms), inches=(8, 6.5), kind="png")
        write_file(directory / "pareto.png", drawn)


def _document(
    study: Study, lines: Sequence[Line], arms: Sequence[ArmResults], command: str
) -> dict[str, object]:
    cells = [cell for arm in arms for cell in arm.cells.values()]
    expected = len(study.cells())
    margin = study.study.margin_points
    measure = measure_of(study)
    equal = _equal(study, arms)
    return {
        "findings": findings(
            lines, margin=margin, num_cells=len(cells), expected=expected, chance=_chance(study)
        ),
        "verdicts": [verdict_sentence(x) for x in lines if x.is_policy and x.accuracy],
        "measure": measure.noun,
        "table": _table(lines),
        "equal_loss": as_document(equal),
        "equal_loss_table": "\n".join(_equal_table(study, equal).markdown()) if equal else "",
        "command": command,
        **{f"{name}s": _distinct(cells, name) for name in ("commit", "device", "machine")},
        "torch": _distinct(cells, "torch"),
        "dates": _dates(cells),
        "seeds": study.study.seeds,
        "first_seed": study.study.first_seed,
        "cells": len(cells),
        "cells_expected": expected,
        "cells_missing": {
            arm.name: missing
            for arm in arms
            if (missing := [s for s in study.study.all_seeds if s not in arm.cells])
        },
        "wall_s": sum(number(cell, "wall_s") for cell in cells),
        "margin_points": margin,
        "arms": [asdict(line) for line in lines],
        "settings": {arm.name: bare_within(arm.settings) for arm in arms},
    }


def _equal(study: Study, arms: Sequence[ArmResults]) -> list[EqualLoss]:
    return equal_loss(arms, cost=study.study.cost) if measure_of(study) is LOSS else []


def _equal_table(study: Study, found: Sequence[EqualLoss]) -> Table:
    return table_of(found, study.study.baseline, measure_of(study).noun)


def _chance(study: Study) -> float | None:
    """Say which accuracy guessing has, in points; None where the arms have no number of classes."""
    numbers = {arm.config(0).model.settings.get("num_classes") for arm in study.arms}
    number = numbers.pop() if len(numbers) == 1 and measure_of(study) is ACCURACY else None
    return POINTS / number if isinstance(number, int) else None


def report_words(
    study: Study, found: Mapping[str, Mapping[int, CellFile]], document: Mapping[str, object]
) -> list[str]:
    """Lay a report out for a terminal: findings, and how the arms stand; costs are in the page.

    Args:
        study: What was compared.
        found: Cells that are there, by arm and seed.
        document: Of `write_report`.
    """
    lines = report_lines(study, found)
    costs = (*COST_COLUMNS, *WRONG_COLUMNS)
    columns = [column for column in table_columns(lines) if column not in costs]
    equal = _equal(study, gather_arms(study, found))
    return [
        *_texts(document, "findings"), "",
        *Table(columns, [table_row(line, columns) for line in lines]).text(), "",
        *([*_equal_table(study, equal).text(), "", LOSS_POINTS] if equal else []),
        _made_words(document),
    ]  # fmt: skip


def _made_words(document: Mapping[str, object]) -> str:
    return (
        f"Mean and standard deviation over seeds; differences are paired by seed. "
        f"{document['cells']} of {document['cells_expected']} cells, "
        f"{number(document, 'wall_s') / 60:.0f} minutes of training in all."
    )


def _distinct(cells: Sequence[CellFile], name: str) -> list[str]:
    return sorted({str(cell[name]) for cell in cells if cell.get(name)})


def _dates(cells: Sequence[CellFile]) -> list[str]:
    """The first cell's and the last's."""
    dates = _distinct(cells, "date")
    return [dates[0], dates[-1]] if dates else []


def markdown(document: Mapping[str, object]) -> str:
    """Lay out a report's document: findings, table, verdicts, and below how it was made."""
    commits = document["commits"]
    assert isinstance(commits, list)
    found = [" ".join(_texts(document, "findings"))]
    verdicts = [f"- {sentence}" for sentence in _texts(document, "verdicts")]
    return "\n".join(
        [
            *(line for text in found if text for line in (text, "")),
            str(document["table"]),
            "",
            *([str(document["equal_loss_table"]), ""] if document["equal_loss_table"] else []),
            *([*verdicts, ""] if verdicts else []),
            *([LOSS_POINTS, ""] if document["measure"] == LOSS.noun else []),
            _made_words(document),
            "",
            f"Command: `{document['command']}`; commit {', '.join(commits) or 'none yet'}.",
            "",
        ]
    )


def _texts(document: Mapping[str, object], name: str) -> list[str]:
    texts = document[name]
    assert isinstance(texts, list)
    return texts


def _table(lines: Sequence[Line]) -> str:
    columns = table_columns(lines)
    # A name may hold what ends a cell.
    rows = [[text.replace("|", "\\|") for text in table_row(line, columns)] for line in lines]
    return "\n".join(Table(columns, rows).markdown())


def _csv(lines: Sequence[Line]) -> str:
    rows = [_flat(line) for line in lines]
    return to_csv(list(rows[0]), rows)


def _flat(line: Line) -> dict[str, object]:
    accuracy, costs = line.accuracy, line.costs
    target = costs and costs.target
    against = {one.control: one.difference for one in line.controls}
    return {
        "arm": line.arm,
        "compared_with": line.baseline,
        "seeds": accuracy.num_seeds if accuracy else 0,
        "accuracy_mean_points": accuracy and accuracy.mean,
        "accuracy_deviation_points": accuracy and accuracy.deviation,
        "test_loss_mean_nats": line.test_loss and line.test_loss.mean,
        "test_loss_deviation_nats": line.test_loss and line.test_loss.deviation,
        **_bounds("difference", line.difference, "_points"),
        "verdict": line.verdict,
        "wall_s": line.wall_s,
        "control": line.control,
        "train_s": costs and costs.train_s.mean,
        "train_deviation_s": costs and costs.train_s.deviation,
        **_bounds("train_ratio", costs and costs.train_ratio),
        "rows_trained": costs and costs.rows_trained,
        **_bounds("rows_ratio", costs and costs.rows_ratio),
        "cost_rows": costs and costs.cost_rows,
        "hidden_fraction": costs and costs.hidden_fraction,
        "hidden_precision": costs and costs.hidden_precision,
        "hidden_recall": costs and costs.hidden_recall,
        "target_points": target and target.accuracy,
        "target_s": target and target.seconds,
        "target_seeds": target and target.num_reached,
        **{
            key: value
            for control in CONTROLS
            for key, value in _bounds(f"over_{control}", against.get(control), "_points").items()
        },
        "control_verdict": line.control_verdict,
    }


def _bounds(name: str, found: object, unit: str = "") -> dict[str, object]:
    return {f"{name}_{part}{unit}": getattr(found, part, None) for part in ("mean", "low", "high")}
