"""What a rank writes comes out in whole lines, and is read before the launcher ends it."""

import array
import contextlib
import fcntl
import io
import os
import stat
import sys
import termios
import time
from typing import IO

READ_S = 1.0
"""How long whoever reads a rank's output may take: a launcher does it within milliseconds."""


def keep_lines_whole(stream: IO[str] | None = None) -> None:
    """Let standard error leave this process a line at a time, so that those of ranks do not mix.

    torchrun starts Python with ``-u``, and many containers set PYTHONUNBUFFERED: then every piece
    of a line leaves by itself, and a message of several ranks at once cannot be read.

    Args:
        stream: Defaults to standard error.
    """
    stream = sys.stderr if stream is None else stream
    if isinstance(stream, io.TextIOWrapper) and stream.write_through:
        stream.reconfigure(line_buffering=True, write_through=False)


def print_last(message: str) -> None:
    """Print this rank's message before it ends the job, and wait until it is read."""
    print(message, file=sys.stderr)
    flush_to_reader(sys.stderr)
    flush_to_reader(sys.stdout)


def flush_to_reader(stream: IO[str], *, limit_s: float = READ_S) -> None:
    """Flush, and wait until all of it has been read, where the stream is a pipe. Blocks.

    MPICH's launcher drops what still lies in the pipes when a rank aborts the job: without this one
    message in four was lost on a busy machine.

    Args:
        stream: Standard output or error.
        limit_s: How long to wait at most.
    """
    # A closed stream, or one that a notebook made, has no reader to wait for.
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
        descriptor, unread = stream.fileno(), array.array("i", [0])
        until = time.monotonic() + limit_s
        while stat.S_ISFIFO(os.fstat(descriptor).st_mode) and time.monotonic() < until:
            fcntl.ioctl(descriptor, termios.FIONREAD, unread)
            if not unread[0]:
                return
            time.sleep(0.001)
