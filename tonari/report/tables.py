"""Tables, as lines of text for a terminal, as Markdown, and as CSV; pages have the same ones."""

import csv
import io
import math
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

UNKNOWN = "-"
"""In place of a figure that is not known."""


@dataclass(frozen=True)
class Table:
    """Words and figures in columns.

    Attributes:
        columns: What stands above each.
        rows: As many cells in each as there are columns.
        title: Above them all; may be empty.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    @property
    def are_figures(self) -> list[bool]:
        """Find, by column, whether all that is known in it are figures: these are set right."""
        return [
            all(re.match(r"[-+]?\.?\d", cell) for cell in column if cell not in ("", UNKNOWN))
            for column in zip(*self.rows, strict=True)
        ] or [False] * len(self.columns)

    def text(self) -> list[str]:
        """Lay it out in lines, indented below a title.

        On a terminal that is too narrow, the columns follow in several parts, each with the first.
        """
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        indent = "  " if self.title else ""
        lines = [self.title] if self.title else []
        for number, part in enumerate(_parts(widths, room=_room() - len(indent))):
            lines += [""] * (number > 0)
            for row in (self.columns, *self.rows):
                cells = [
                    row[n].rjust(widths[n]) if self.are_figures[n] else row[n].ljust(widths[n])
                    for n in part
                ]
                lines.append((indent + "  ".join(cells)).rstrip())
        return lines

    def markdown(self) -> list[str]:
        """Write it in lines of Markdown."""
        marks = ["---:" if is_figure else "---" for is_figure in self.are_figures]
        return [markdown_row(self.columns), markdown_row(marks), *map(markdown_row, self.rows)]


def _room() -> float:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def _parts(widths: Sequence[int], *, room: float) -> list[list[int]]:
    """Part columns by their widths; each part begins with the first column."""
    parts: list[list[int]] = [[]]
    used = 0
    for number, width in enumerate(widths):
        if used + width > room and len(parts[-1]) > 1:
            parts.append([0])
            used = widths[0] + 2
        parts[-1].append(number)
        used += width + 2
    return parts


def markdown_row(cells: Sequence[str]) -> str:
    """Write a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def figure(value: object, form: str, *, of: float = 1.0) -> str:
    """Write a number by a format, in units ``of`` so many; what is none is `UNKNOWN`."""
    return f"{value / of:{form}}" if isinstance(value, int | float) else UNKNOWN


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Write these columns of rows; what a row has not is left empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
