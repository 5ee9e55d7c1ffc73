"""End a rank whose start hangs, with one message: who waits where, for whom, and what to try.

MPI_Init and the meeting of torch's ranks wait for a launcher or for other nodes before any
watchdog of a training run lives. mpi4py calls MPI_Init while it is imported and keeps Python from
running meanwhile, so no thread could watch it: a child process does, made by fork before MPI is
there. torch lets threads run, and may start after MPI, when a fork is no longer safe.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from dataio.world.abort import flush_to_reader
from dataio.world.launchers import (
    describe_pmi,
    find_launcher,
    local_rank,
    mpi_claim,
    number,
    shown_variables,
    torchrun_claim,
)
from dataio.world.limits import MOST_OPEN_FILES

VARIABLE = "TONARI_START_TIMEOUT_S"
START_TIMEOUT_S = 300.0
"""How long a start may take, unless the variable or a longest wait for other ranks gives more."""
WARN_S = 60.0
LATER_S = 10.0
"""How much longer the other ranks of a node wait: its first one has printed the message."""
WRITE_S = 5.0


@contextlib.contextmanager
def watch_start(doing: str, *, timeout_s: float = 0.0) -> Iterator[None]:
    """Watch over what may wait for other ranks for ever, and lets other threads run.

    Args:
        doing: What is done, for the message: ``"init_process_group"``.
        timeout_s: Longest wait that the caller allows; the limit is not less.
    """
    watch, ended = _watch(doing, timeout_s), threading.Event()
    thread = threading.Thread(
        target=watch.run, args=(ended.wait, lambda: os._exit(1)), daemon=True, name="tonari-start"
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    watch.report_return()


@contextlib.contextmanager
def watch_mpi_start(*, timeout_s: float = 0.0) -> Iterator[None]:
    """Watch over MPI_Init from a process of its own, which is gone afterwards.

    Args:
        timeout_s: Longest wait that the caller allows; the limit is not less.
    """
    watch, parent = _watch("MPI_Init", timeout_s), os.getpid()
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():
            # Of locks that other threads hold: the child takes none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
    except OSError:
        # No room for one more process: a start that hangs is then the launcher's to end.
        os.close(reading)
        os.close(writing)
        yield
        return
    if not child:
        _watch_parent(parent, reading, watch)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        # Not left to the child itself: nothing that it does may keep this rank.
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    watch.report_return()


def _watch_parent(parent: int, reading: int, watch: "_Watch") -> NoReturn:
    """Be the child: hold none of the parent's files but standard error, and never return."""
    try:
        reading = os.dup2(reading, 0)
        os.close(1)
        os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), MOST_OPEN_FILES))

        def ended(wait_s: float) -> bool:
            # The pipe is closed by the parent's end: there is nothing left to watch.
            return bool(select.select([reading], [], [], wait_s)[0])

        def end() -> None:
            if os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)

        watch.run(ended, end)
    finally:
        os._exit(0)


@dataclass(frozen=True)
class _Watch:
    """Prints the message once, if this is the node's first rank, and ends the rank at its limit."""

    doing: str
    limit_s: float
    is_first: bool
    started: float

    @property
    def warn_s(self) -> float:
        return min(WARN_S, self.limit_s / 5)

    def run(self, ended: Callable[[float], bool], end: Callable[[], object]) -> None:
        """Block until it has ended, or call ``end``.

        Args:
            ended: Waits so many seconds for the end of what is done; whether it has come.
            end: Ends this rank.
        """
        warn_s = self.warn_s
        if ended(warn_s):
            return
        if self.is_first:
            _print(_message(self.doing, os.environ, after_s=warn_s, limit_s=self.limit_s))
            if ended(self.limit_s - warn_s):
                return
            _print(
                f"{_where(os.environ)} {self.doing} did not return within {self.limit_s:.0f} s; "
                "ending this rank"
            )
        else:
            limit_s = self.limit_s + LATER_S
            if ended(limit_s - warn_s):
                return
            _print(_message(self.doing, os.environ, after_s=limit_s, limit_s=limit_s))
        end()

    def report_return(self) -> None:
        """Print that it has returned, if it was reported to hang."""
        spent_s = time.monotonic() - self.started
        if self.is_first and spent_s > self.warn_s:
            _print(f"{_where(os.environ)} {self.doing} returned after {spent_s:.0f} s; going on")


def _watch(doing: str, timeout_s: float) -> _Watch:
    limit_s, is_first = _limit_s(os.environ, timeout_s), local_rank(os.environ) in (None, 0)
    return _Watch(doing, limit_s, is_first, time.monotonic())


def _message(doing: str, environ: Mapping[str, str], *, after_s: float, limit_s: float) -> str:
    launcher = find_launcher(environ)
    return (
        f"{_where(environ)} {doing} has not returned for {after_s:.0f} s, expected seconds: it "
        f"waits for its launcher or for other ranks. Started by {launcher.name}, "
        f"{describe_pmi(environ)} ({shown_variables(environ)}). Try {launcher.cure}. See that "
        f"all nodes have started. This rank ends after {limit_s:.0f} s; if its start is only slow, "
        f"set {VARIABLE} (seconds)"
    )


def _where(environ: Mapping[str, str]) -> str:
    claim = mpi_claim(environ)
    if claim is None or "TORCHELASTIC_RUN_ID" in environ:
        claim = torchrun_claim(environ) or claim
    rank = "unknown rank"
    if claim:
        rank = f"rank {claim.rank}" + (f" of {claim.world_size}" if claim.world_size else "")
    return f"[{rank} on {socket.gethostname()}]"


def _print(message: str) -> None:
    # A launcher that no longer reads must not keep the rank from ending.
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], WRITE_S)[1]:
            with open(2, "w", closefd=False) as stderr:
                stderr.write(f"{message}\n")
                flush_to_reader(stderr)


def _limit_s(environ: Mapping[str, str], timeout_s: float) -> float:
    named = number(environ, VARIABLE, least=1)
    return float(named) if named else max(START_TIMEOUT_S, timeout_s)
