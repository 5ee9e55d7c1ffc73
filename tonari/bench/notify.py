"""How a benchmark reports what it is doing, line by line."""

import shutil
import sys
import time
from collections.abc import Callable

Notify = Callable[[str], None]
"""Receives one line of progress."""


def notify_on_stderr(line: str) -> None:
    """Show a line of progress with the time of day."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


def notify_in_place(line: str) -> None:
    """Show a line of progress: on a terminal instead of the one before; an empty one clears it."""
    if not sys.stderr.isatty():
        if line:
            notify_on_stderr(line)
        return
    sys.stderr.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
    sys.stderr.flush()
