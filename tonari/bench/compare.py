"""`tonari bench compare`: has a filesystem become slower since it was accepted."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tonari.bench.errors import BenchError
from tonari.bench.storage.results.compare import Comparison, compare
from tonari.bench.storage.results.document import read_document
from tonari.report.tables import UNKNOWN, Table
from tonari.report.units import duration, rate

INCOMPARABLE = 2


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare two documents of `tonari bench io`, for acceptance tests.

    A figure is a regression if its median is worse by more than the tolerance and the spread of
    the repeats does not explain it: of two runs that differ in nothing, one comparison in a hundred
    fails. Five repeats find a regression of 10 % at 3 % noise; figures with fewer than three
    (latencies, which are over all repeats) are shown and not judged.

    Exit status: 0; 1 if a figure is a regression; 2 if the documents cannot be compared: damaged,
    other patterns, other numbers of clients, cold in one and warm in the other.
    """

    before: Annotated[Path, tyro.conf.Positional]
    """The document of the run that was accepted."""
    after: Annotated[Path, tyro.conf.Positional]
    """The document of the run to judge."""
    tolerance: str = "5%"
    """Change that does not matter, such as 5% or 0.05."""
    all: bool = False
    """Show every figure, not only those that are judged or changed."""
    json: bool = False
    """Print one JSON document, nothing else on stdout."""

    def __post_init__(self) -> None:
        if self.tolerance_fraction() is None:
            raise ValueError(
                f"--tolerance is {self.tolerance}, must be a share in [0, 1) such as 5% or 0.05"
            )

    def tolerance_fraction(self) -> float | None:
        """Read the tolerance; None if it is none."""
        text = self.tolerance.strip()
        try:
            value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            return None
        return value if 0 <= value < 1 else None


def bench_compare(options: Compare) -> int:
    """Run the command."""
    try:
        before, after = read_document(options.before), read_document(options.after)
    except BenchError as error:
        sys.stderr.write(f"tonari bench compare: {error}\n")
        return INCOMPARABLE
    found = compare(before, after, tolerance_fraction=options.tolerance_fraction() or 0.0)
    if options.json:
        print(json.dumps({"status": found.status, **asdict(found)}))
    else:
        print(table(found, everything=options.all))
    if found.differences:
        sys.stderr.write(f"tonari bench compare: {_incomparable(options, found.differences)}\n")
    return found.status


def table(found: Comparison, *, everything: bool = False) -> str:
    """Lay out the figures, what changed for the worse first."""
    order = ("regression", "improvement", "noise", "same", "too few repeats")
    shown = sorted(
        (change for change in found.changes if everything or change.by_chance is not None),
        key=lambda change: order.index(change.outcome),
    )
    lines = [
        [
            change.name,
            amount(change.before, change.unit),
            amount(change.after, change.unit),
            f"{change.change_fraction:+.1%}",
            UNKNOWN if change.by_chance is None else f"{max(change.by_chance, 1e-6):.1g}",
            "x".join(map(str, sorted(set(change.repeats)))),
            change.outcome.upper() if change.outcome == "regression" else change.outcome,
        ]
        for change in shown
    ]
    head = ["figure", "first", "second", "change", "by chance", "repeats", "outcome"]
    hidden = len(found.changes) - len(shown)
    few = f"; {hidden} with too few repeats to judge (--all)" if hidden else ""
    notes = [f"note: {note}" for note in found.notes]
    summary = f"{len(found.regressions)} regressions in {len(shown)} figures{few}"
    return "\n".join([*Table(head, lines).text(), "", *notes, summary])


def amount(value: float, unit: str) -> str:
    """Write a figure with three digits and its unit."""
    if unit == "bytes/s":
        return rate(value)
    if unit == "s":
        return duration(value)
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _incomparable(options: Compare, differences: Sequence[str]) -> str:
    more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
    return (
        f"{options.before} and {options.after} cannot be compared: {'; '.join(differences[:5])}"
        f"{more}; expected runs of the same phases: repeat one with the other's options"
    )
