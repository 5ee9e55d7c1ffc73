"""What commands print: lines as wide as the terminal, and the files that they wrote."""

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
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


def join_lines(text: str) -> str:
    """Make a line of each paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))


def list_commands(
    prog: str, about: str, commands: Mapping[str, str], *, more: str = ""
) -> list[str]:
    """Lay out the help of a command that has others, a line or two for each."""
    width, indent = shutil.get_terminal_size().columns, max(map(len, commands)) + 4
    lines = [
        textwrap.fill(f"  {name:<{indent - 2}}{words}", width, subsequent_indent=" " * indent)
        for name, words in commands.items()
    ]
    last = f"{prog} COMMAND --help says more about a command{more}."
    return [f"usage: {prog} COMMAND ...", "", fill(about, width), "", *lines, "", fill(last, width)]


def show(lines: Iterable[str]) -> None:
    """Print lines; on a terminal those that are too long for it are broken at words."""
    width = room()
    for line in lines:
        # Nothing is added to a line that fits: spaces within it are those of a table.
        print(line if len(line) <= width else fill(line, int(width)), flush=True)


def wrote(*paths: Path | None) -> list[str]:
    """Name the files that a command wrote, a line each; None is one that was not asked for."""
    return [f"wrote {path}" for path in paths if path is not None]
