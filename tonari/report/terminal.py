"""What commands print: lines as wide as the terminal, and the files that they wrote."""

import math
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path


def room() -> float:
    """Return the columns of the terminal; infinite where standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def fill(line: str, width: int) -> str:
    """Break a long line at words, each further line indented as the first."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def show(lines: Iterable[str]) -> None:
    """Print lines; on a terminal those that are too long for it are broken at words."""
    width = room()
    for line in lines:
        # Nothing is added to a line that fits: spaces within it are those of a table.
        print(line if len(line) <= width else fill(line, int(width)))


def wrote(*paths: Path | None) -> list[str]:
    """Name the files that a command wrote, a line each; None is one that was not asked for."""
    return [f"wrote {path}" for path in paths if path is not None]
