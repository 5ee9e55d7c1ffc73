"""Tables, as lines of text for a terminal, as Markdown, and as CSV; pages have the same ones."""

import csv
import io
import re
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
        """Lay it out in lines for a terminal, indented below a title."""
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        indent = "  " if self.title else ""
        lines = [self.title] if self.title else []
        for row in (self.columns, *self.rows):
            cells = [
                cell.rjust(width) if is_figure else cell.ljust(width)
                for cell, width, is_figure in zip(row, widths, self.are_figures, strict=True)
            ]
            lines.append((indent + "  ".join(cells)).rstrip())
        return lines

    def markdown(self) -> list[str]:
        """Write it in lines of Markdown."""
        marks = ["---:" if is_figure else "---" for is_figure in self.are_figures]
        return [markdown_row(self.columns), markdown_row(marks), *map(markdown_row, self.rows)]


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
