"""The moments at which a job can be ended: what its processes ask of the system and of each other.

A moment is "the n-th time this rank does that". Names are made of what is done and of the file that
it is done to, such as ``replace delta`` or ``world write the placement``, so no list of them is
kept here: an undisturbed run tells which there are and how often each comes.
"""

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dataio.world import World

How = Literal["one", "all", "error", "term", "slow"]

SLOW_S = 0.4
"""What a slow call takes: longer than a job of the schedules takes for some batches and a save."""

TO_NAME = ("replace", "rename")
ON_FILE = (
    "unlink",
    "rmdir",
    "mkdir",
    "truncate",
    "fsync",
    "fdatasync",
    "posix_fallocate",
    "pwrite",
)
"""Calls of `os` that change what a kill leaves, named after the file: the second argument or the
first."""

TOGETHER = ("barrier", "allgather", "allgather_array", "allreduce")
"""Methods of `World` in which all ranks meet."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """How a rank ends its job.

    Attributes:
        rank: Which one does.
        name: What it does then.
        number: For which time in this process, from 1 on.
        after: Whether that is done first.
        how: ``"one"``: this rank alone is killed; ``"all"``: all at once; ``"error"``: the call
            fails as by a broken disk; ``"term"``: this rank gets a SIGTERM; ``"slow"``: the call
            takes long, and the job goes on.
        part: Of the run, for the count of what was tested.
    """

    rank: int
    name: str
    number: int
    after: bool
    how: How
    part: str

    def __str__(self) -> str:
        when = "after" if self.after else "before"
        return f"{self.part}: {self.how}, rank {self.rank} {when} {self.name} #{self.number}"


class Log:
    """Lines of JSON, each there as soon as it is written, whatever happens to the process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, kind: str, **told: object) -> None:
        os.write(self._descriptor, (json.dumps({"kind": kind, **told}) + "\n").encode())


class Points:
    """Passes every moment of one rank's process, and ends the job at one of them.

    Args:
        log: Told just before.
        rank: Of this process.
        pids: Files named ``<rank>.pid``, of all ranks.
        kill: When; None: never.
        slow: A call that takes long before that; None: none does.

    Attributes:
        part: Of the run: what the moments to come belong to.
        trace: Name and part of every moment so far.
    """

    def __init__(
        self, log: Log, *, rank: int, pids: Path, kill: Kill | None, slow: Kill | None = None
    ) -> None:
        self._log, self._rank, self._pids = log, rank, pids
        self._events = [event for event in (slow, kill) if event is not None and event.rank == rank]
        self._counts: Counter[str] = Counter()
        # Threads of the loader pass too.
        self._lock = threading.Lock()
        self.part = "open"
        self.trace: list[tuple[str, str]] = []

    def install(self) -> None:
        """Pass at every call that leaves a trace on disk, and wherever all ranks meet."""
        for name in TO_NAME:
            self._wrap(os, name, lambda *args: _word(args[1]))
        for name in ON_FILE:
            self._wrap(os, name, lambda *args: _word(args[0]))
        for name in TOGETHER:
            self._wrap(World, name, None)

    def passed(self, name: str) -> None:
        """Pass a moment of the training loop's own."""
        self._end_if(self._count(name), name, after=False)

    def _wrap(self, owner: Any, name: str, word: Callable[..., str] | None) -> None:
        original = getattr(owner, name, None)
        if original is None:
            raise LookupError(
                f"points: {owner!r} has no {name!r}, expected the calls at which jobs are ended; "
                "name the one that does this now in tests/faults/kill/points.py"
            )

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            called = f"world {kwargs['doing']}" if word is None else f"{name} {word(*args)}"
            number = self._count(called)
            self._end_if(number, called, after=False)
            result = original(*args, **kwargs)
            self._end_if(number, called, after=True)
            return result

        setattr(owner, name, wrapped)

    def _count(self, name: str) -> int:
        with self._lock:
            self._counts[name] += 1
            self.trace.append((name, self.part))
            return self._counts[name]

    def _end_if(self, number: int, name: str, *, after: bool) -> None:
        for event in self._events:
            if (event.name, event.number, event.after) == (name, number, after):
                self._happen(event)

    def _happen(self, kill: Kill) -> None:
        self._log.write("slow" if kill.how == "slow" else "kill", **asdict(kill))
        if kill.how == "slow":
            time.sleep(SLOW_S)
            return
        if kill.how == "error":
            raise OSError(5, "drawn by the schedule")
        if kill.how == "term":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if kill.how == "all":
            for path in self._pids.glob("*.pid"):
                pid = int(path.read_text())
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _word(target: object) -> str:
    """Name a file by the letters that it begins with."""
    if isinstance(target, int):
        target = Path(f"/proc/self/fd/{target}").readlink()
    found = re.match(r"[A-Za-z_.]*[a-z]", Path(os.fsdecode(target)).name)  # type: ignore[arg-type]
    return found[0] if found else "file"
