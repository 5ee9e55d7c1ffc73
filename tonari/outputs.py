"""Files that a command writes when its work is done, looked at before it begins."""

import os
from pathlib import Path

from tonari.errors import CommandError

PLOTS = (".png", ".svg", ".pdf")
"""Files that plots are drawn into."""


def check_output(flag: str, path: Path | None) -> None:
    """Refuse a file that could not be written; None is none asked for.

    Raises:
        CommandError: If its directory is not there or not writable, or it is one itself.
    """
    if path is None:
        return
    parent = path.absolute().parent
    if not parent.is_dir():
        raise CommandError(
            f"{flag} {path}: found no directory {parent}, expected one to write into; make it first"
        )
    if path.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        raise CommandError(
            f"{flag} {path}: cannot be written, expected a file in a directory that you may write "
            "into; name another"
        )


def check_page(flag: str, path: Path | None) -> None:
    """Refuse a page that could not be laid out, or written.

    Raises:
        CommandError: As `check_output`.
        ModuleNotFoundError: If what pages are made with is missing, with its name.
    """
    check_output(flag, path)
    if path is not None:
        import jinja2  # noqa: F401


def check_report(flag: str, path: Path | None) -> None:
    """Refuse a page with plots that cannot be written."""
    check_page(flag, path)
    if path is not None:
        import matplotlib  # noqa: F401


def check_plot(flag: str, path: Path | None) -> None:
    """Refuse a plot that could not be drawn, or written.

    Raises:
        CommandError: As `check_output`, or if its name ends in nothing of `PLOTS`.
        ModuleNotFoundError: If matplotlib is missing, with its name.
    """
    check_output(flag, path)
    if path is not None:
        if path.suffix not in PLOTS:
            raise CommandError(
                f"{flag} {path}: expected a name that ends in {', '.join(PLOTS)}; name it so"
            )
        import matplotlib  # noqa: F401


def make_directory(flag: str, path: Path) -> None:
    """Make a directory for results, unless it is there.

    Raises:
        CommandError: If it cannot be made or written into.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("no permission to write into it")
    except OSError as error:
        raise CommandError(
            f"{flag} {path}: cannot be written into ({error}), expected a directory for the "
            "results; name another"
        ) from error
