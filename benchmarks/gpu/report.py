"""Turn what rows have kept into tables, each figure beside its goal, and put them into a page."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.row import read_cases
from tonari.bench.errors import BenchError
from tonari.report.tables import Table

BEGINS, ENDS = "<!-- benchmarks.gpu: begins -->", "<!-- benchmarks.gpu: ends -->"
"""Between these lines a page is written anew; the rest of it stays."""
NOTHING = "Nothing was measured by it yet."

FORMS = {
    "_fraction": "{:.1%}", "_ratio": "{:.3f}", "_ms": "{:.1f}", "images_per_s": "{:,.0f}",
    "train_s": "{:.0f}", "_difference": "{:.1e}", "_points": "{:.2f}", "_loss": "{:.4f}",
    "_bytes": "{:,.0f}",
}  # fmt: skip
"""How a figure is written, by how its name ends; else with three digits."""


def write_page(page: Path, kept: Mapping[str, Path]) -> None:
    """Write the tables of all rows between the two lines of a page.

    Raises:
        BenchError: If it has no such lines.
    """
    text = page.read_text()
    before, begins, rest = text.partition(BEGINS)
    _, ends, after = rest.partition(ENDS)
    if not (begins and ends):
        raise BenchError(f"{page}: has no lines {BEGINS} and {ENDS}; write them where tables go")
    lines = [line for name, path in kept.items() for line in row_lines(name, read_cases(path))]
    words = "\n".join(lines or [NOTHING, ""])
    page.write_text(f"{before}{BEGINS}\n{words}{ENDS}{after}")


def row_lines(row: str, cases: Mapping[str, dict[str, Any]]) -> list[str]:
    """Lay out a row: its question, where it was measured, its figures, and what is missing."""
    if not cases:
        return []
    wheres = dict.fromkeys(map(where, cases.values()))
    names = {name: "" for case in cases.values() for way in case["ways"].values() for name in way}
    rows, missing = [], []
    for case in cases.values():
        title = case["case"] if len(wheres) == 1 else f"{case['case']} ({case['card']})"
        rows += [
            [title, way, *(form(name, figures.get(name)) for name in names), goals_of(case, way)]
            for way, figures in case["ways"].items()
        ]
        if case["problem"]:
            missing.append(f"- {title}: {case['problem']}")
        else:
            missing += [
                f"- {title}: {way} has no figures: {goals_of(case, way)}"
                for way in dict.fromkeys(goal["way"] for goal in case["goals"])
                if way not in case["ways"]
            ]
    columns = ["case", "way", *(name.replace("_", " ") for name in names), "goal"]
    return [
        f"### {import_module(f'benchmarks.gpu.{row}').QUESTION}", "",
        f"`python -m benchmarks.gpu {row}`: {'; '.join(wheres)}.", "",
        *(Table(columns, rows).markdown() if rows else []), "", *missing, "",
    ]  # fmt: skip


def where(case: Mapping[str, Any]) -> str:
    """Say where a case was measured, and of which code."""
    return (
        f"{case['card']}, driver {case['driver']}, torch {case['torch']}, {case['cores']} cores, "
        f"commit {case['commit']}, {str(case['date'])[:10]}"
    )


def goals_of(case: Mapping[str, Any], way: str) -> str:
    """Say which goals a way's figures have, and whether they were reached."""
    said = {True: "reached", False: "**not reached**", None: "not measured"}
    return "; ".join(
        f"{words(goal)}: {said[goal['reached']]}" for goal in case["goals"] if goal["way"] == way
    )


def words(goal: Mapping[str, Any]) -> str:
    """Say what a figure should be."""
    name = goal["figure"]
    bounds = {"at most": goal["most"], "at least": goal["least"]}
    found = [f"{bound} {form(name, its)}" for bound, its in bounds.items() if its is not None]
    return f"{name.replace('_', ' ')} {' and '.join(found)}"


def form(name: str, value: float | None) -> str:
    """Write a figure."""
    if value is None:
        return ""
    return next((it for end, it in FORMS.items() if name.endswith(end)), "{:.3g}").format(value)
