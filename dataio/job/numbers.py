"""The numbers of a job's ranks: each start and each node that joins later takes new ones.

A number is never given twice, so a rank that was lost and wakes up is no other. The file
``numbers-FIRST`` in the job's directory holds how many were taken together. One rank makes it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dataio.base.atomic import write_file
from dataio.base.errors import StateError

JOIN = "TONARI_LIVE_JOIN"
"""The variable that has ranks join a job that runs."""


def begin_job(root: Path, num_ranks: int) -> Path:
    """Make the directory of a job in ``root``, of this start alone, and take its first numbers.

    Raises:
        StateError: If it cannot be made.
    """
    # What an earlier start left says nothing about this one.
    directory = root / f"live-{os.urandom(4).hex()}"
    with making(directory):
        take_numbers(directory, num_ranks)
    return directory


@contextlib.contextmanager
def making(directory: Path) -> Iterator[None]:
    """Make a directory, and say what to do if it, or what is written within, cannot be made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StateError(
            f"live: {directory} cannot be made ({error}); give a directory on a filesystem that "
            "every node sees, and that can be written"
        ) from error


def find_job(root: Path) -> Path:
    """Find the directory of the job in ``root`` that began last.

    Raises:
        StateError: If there is none.
    """
    try:
        started = [(path.stat().st_mtime_ns, path.parent) for path in root.glob("live-*/numbers-0")]
        return max(started)[1]
    except (OSError, ValueError) as error:
        raise StateError(
            f"live: no job runs in {root}, expected one to join ({error}); start it without {JOIN}"
        ) from error


def take_numbers(directory: Path, num_ranks: int) -> int:
    """Take the next numbers in a job's directory; return the first of them."""
    claim, first = directory / f"claim-{os.urandom(4).hex()}", 0
    write_file(claim, b"%d" % num_ranks)
    while True:
        try:
            os.link(claim, directory / f"numbers-{first}")
            return first
        except FileExistsError:
            first += count_numbers(directory, first)


def count_numbers(directory: Path, first: int) -> int:
    """Read how many numbers were taken together, by the first of them."""
    return int((directory / f"numbers-{first}").read_bytes())
