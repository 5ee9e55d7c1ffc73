"""How a benchmark reports what it is doing, line by line."""

import sys
import time
from collections.abc import Callable

Notify = Callable[[str], None]
"""Receives one line of progress."""


def notify_on_stderr(line: str) -> None:
    """Show a line of progress with the time of day."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()
