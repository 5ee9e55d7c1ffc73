"""End the whole job when one rank fails: otherwise the others would wait for it until their limits.

Covers an uncaught error in any thread and ``sys.exit`` with anything but 0. A bare ``raise
SystemExit(1)`` and ``exit(1)`` cannot be seen, nor the ``sys.exit(main())`` that looks the name up
before ``main`` joins a world: there the other ranks' time limits end the job, so write
``sys.exit(1)`` where it fails.

What a rank writes comes out in whole lines, and is read before the launcher ends it.
"""

import array
import atexit
import contextlib
import fcntl
import io
import os
import stat
import sys
import termios
import threading
import time
import traceback
from types import TracebackType
from typing import IO, NoReturn

from dataio.base.errors import DataioError
from dataio.world.world import World

ExitCode = int | str | None

PATIENCE_S = 10.0


class _WatchedExit(SystemExit):
    """A SystemExit that knows when the interpreter itself, not a handler, asks for its code."""

    ending: ExitCode = None

    @property
    def code(self) -> ExitCode:  # type: ignore[override]
        code: ExitCode = self.args[0] if self.args else None
        # Only the interpreter, on its way out, asks with no Python frame above.
        if sys._getframe().f_back is None:
            _WatchedExit.ending = code
        return code


def install_abort_hooks(world: World) -> None:
    """End the job with this rank's message if this process fails. Nothing in a world of one."""
    if world.world_size == 1:
        return

    def end(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wait_for_rank_0(world, error)
        lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
        text = "\n".join(f"[rank {world.rank}] {line}" for line in lines)
        print(text, file=sys.stderr, flush=True)
        world.abort(f"uncaught {kind.__name__}: {error}; ending all {world.world_size} ranks")

    def end_thread(hook: threading.ExceptHookArgs) -> None:
        if not issubclass(hook.exc_type, SystemExit):
            end(hook.exc_type, hook.exc_value, hook.exc_traceback)

    sys.excepthook = end
    threading.excepthook = end_thread
    sys.exit = _watched_exit
    atexit.register(_end_after_exit, world)


def wait_for_rank_0(world: World, error: BaseException | None) -> None:
    """Wait where all ranks raise the same error: rank 0 prints it, and then ends this rank too.

    The same message from thousands of ranks would bury all others. If rank 0 does not end the job
    in time, this rank prints it.
    """
    if world.rank and isinstance(error, DataioError) and error.on_all_ranks:
        time.sleep(PATIENCE_S)


def leave_together() -> None:
    """Let this rank leave with an error that all ranks have agreed on: none waits for another.

    Collective, as the last thing that the ranks do together.
    """
    atexit.unregister(_end_after_exit)


def _watched_exit(status: ExitCode = None, /) -> NoReturn:
    raise _WatchedExit(status)


def _end_after_exit(world: World) -> None:
    # MPI's own end of the process waits for all ranks: a rank that leaves early would hang there.
    if _WatchedExit.ending not in (None, 0):
        world.abort(
            f"left by sys.exit({_WatchedExit.ending!r}); ending all {world.world_size} ranks"
        )


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
