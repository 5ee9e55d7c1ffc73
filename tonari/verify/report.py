"""What `tonari verify` prints: a table of meshes and figures, and what differs first."""

from collections.abc import Sequence
from dataclasses import asdict

from tonari.report.tables import UNKNOWN, Table
from tonari.trainer.run.verify.checking import Verdict
from tonari.trainer.run.verify.compare import FIGURES

SHOWN = 3
"""Differences that are listed of a mesh."""


def table(verdicts: Sequence[Verdict]) -> str:
    """Lay out what came out on each mesh."""
    rows: list[tuple[str, ...]] = []
    for verdict in verdicts:
        cells = [verdict.figures.get(figure, UNKNOWN) for figure in FIGURES]
        if verdict.failed:
            cells = [verdict.failed, *[UNKNOWN] * (len(FIGURES) - 1)]
        rows.append((verdict.mesh, *cells, f"{verdict.seconds:.0f}"))
    found = Table(("mesh", *FIGURES, "s"), rows).text()
    for verdict in verdicts:
        found += _more(verdict)
    return "\n".join(found)


def document(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """Make one document of all meshes."""
    return {
        "equal": all(verdict.equal for verdict in verdicts),
        "meshes": [
            {"equal": verdict.equal, "line": verdict.line, **asdict(verdict)}
            for verdict in verdicts
        ],
    }


def _more(verdict: Verdict) -> list[str]:
    lines = ["", verdict.line]
    lines += [f"  {difference.words}" for difference in verdict.differences[:SHOWN]]
    more = len(verdict.differences) - SHOWN
    if more > 0:
        lines.append(f"  ... and {more} more; --json lists all")
    lines += [f"  {figure} not compared: {why}" for figure, why in verdict.left_out.items()]
    lines += [f"  {note}" for note in verdict.notes]
    return lines
