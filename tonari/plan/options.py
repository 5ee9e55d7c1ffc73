"""Options that `tonari plan` and `tonari search` have in common."""

import argparse
from pathlib import Path


def fraction(text: str) -> float:
    """Read a share of the rows, in [0, 1)."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text}, expected a share in [0, 1)")
    return share


def whole(text: str) -> int:
    """Read a number of nodes or cores, >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}, expected a whole number from 1 on")
    return int(text)


def settings(text: str) -> tuple[str, ...]:
    """Split settings that are given as one word."""
    return tuple(text.split())


def add_outputs(parser: argparse.ArgumentParser, *, picture: str, json: str = "") -> None:
    """Add the ways to show a result.

    Args:
        parser: Of the command.
        picture: What each of the picture's bars is.
        json: What else the help says of the JSON document.
    """
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.svg",
        help=f"draw where the time goes as stacked bars: {picture}",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=Path, metavar="FILE.html",
        help="write all of it as one page that needs nothing else (needs tonari[report])",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help=f"one JSON document instead of tables{json}"
    )
