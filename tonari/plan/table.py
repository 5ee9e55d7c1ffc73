"""Tables of `tonari plan`, in plain text."""

from collections.abc import Sequence


def lay_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Set cells right in columns, one line for each row."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
