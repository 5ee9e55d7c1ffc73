"""Tables, as lines of text for a terminal, as Markdown, and as CSV; pages have the same ones."""

import csv
import importlib.util
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tonari.terminal import room

UNKNOWN = "-"
"""In place of a figure that is not known."""

MOST_UNBROKEN = 24
"""Characters of a column of words that fit a terminal unbroken, where there is room for few."""


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

        On a terminal that is too narrow, the columns follow in several parts, each with the first,
        and rich, where it is installed, breaks long words of a cell into lines.
        """
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        breaks = sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
        indent = "  " if self.title else ""
        width = room() - len(indent)
        least = [
            min(of, MOST_UNBROKEN) if breaks and not is_figure else of
            for of, is_figure in zip(widths, self.are_figures, strict=True)
        ]
        lines = [self.title] if self.title else []
        for number, part in enumerate(_parts(least, room=width)):
            lines += [""] * (number > 0)
            laid = self._broken(part, widths, int(width)) if breaks else self._whole(part, widths)
            lines += [(indent + line).rstrip() for line in laid]
        return lines

    def _whole(self, part: Sequence[int], widths: Sequence[int]) -> list[str]:
        return [
            "  ".join(
                row[n].rjust(widths[n]) if self.are_figures[n] else row[n].ljust(widths[n])
                for n in part
            )
            for row in (self.columns, *self.rows)
        ]

    def _broken(self, part: Sequence[int], widths: Sequence[int], width: int) -> list[str]:
        from rich.console import Console
        from rich.table import Table as Laid
        from rich.text import Text

        laid = Laid(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for n in part:
            is_figure = self.are_figures[n]
            laid.add_column(
                Text(self.columns[n]), justify="right" if is_figure else "left", overflow="fold",
                min_width=widths[n] if is_figure else None,
            )  # fmt: skip
        for row in self.rows:
            laid.add_row(*(Text(row[n]) for n in part))
        console = Console(width=width, color_system=None)
        with console.capture() as captured:
            console.print(laid)
        return captured.get().splitlines()

    def markdown(self) -> list[str]:
        """Write it in lines of Markdown."""
        marks = ["---:" if is_figure else "---" for is_figure in self.are_figures]
        return [markdown_row(self.columns), markdown_row(marks), *map(markdown_row, self.rows)]


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
