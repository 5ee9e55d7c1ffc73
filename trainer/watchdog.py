"""Ends a job when one of its ranks dies, stops or hangs, and says which one, and where.

A thread of each rank tells a store, once a second, how far its rank has come, and looks at the next
rank. The training thread writes its progress, the watching thread reads it; both only replace whole
values. The store lies in rank 0: if it does not answer, that is what is said of rank 0.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from dataio.world import World
from trainer.mesh import AXES

INTERVAL_S = 1.0
LOOK_S = 3.0
"""Between two looks at a rank: longer than a beat takes, however busy the machine."""

GRACE_S = 5.0
"""For the rank that speaks, until the others end themselves."""

TORCH = str(Path(torch.__file__).parent)
OPERATORS = f"{TORCH}/_ops.py"
WAITING = (f"{TORCH}/distributed/", str(Path(sys.modules[World.__module__].__file__ or "").parent))
PEER_WORDS = ("gloo", "connection closed by peer", "connection reset by peer", "nccl")


@dataclass(frozen=True)
class Beat:
    """What a rank last said of itself.

    Attributes:
        count: Beats so far.
        host: Where its process is known by number.
        pid: That number.
        step: Steps done.
        waits: Whether its training thread waits for other ranks.
        place: Where in the program that thread is.
        words: Its last: it has failed so. Empty while all is well.
        left: Whether it has ended well.
    """

    count: int
    host: str
    pid: int
    step: int = 0
    waits: bool = False
    place: str = "joining"
    words: str = ""
    left: bool = False


class Watchdog:
    """Watches over the ranks of a job; does nothing in a job of one rank.

    Args:
        world: All ranks.
        store: Held by rank 0, for this watchdog alone. None in a job of one rank.
        timeout_s: Longest time between two calls of ``progress``.
        silent_s: Longest time without a sign of life of a process, >= 2.
    """

    def __init__(
        self, world: World, store: Store | None, *, timeout_s: float, silent_s: float = 20.0
    ) -> None:
        self._world = world
        self._store = store
        self._timeout_s = timeout_s
        self._silent_s = silent_s
        self._sizes: tuple[int, ...] = ()
        self._step = 0
        self._since: float | None = None
        self._count = 0
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._watched = 0
        self._other = (world.rank + 1) % world.world_size
        self._process: int | None = None
        self._calls = 0
        self._calling = threading.Lock()
        self._holder: Beat | None = None

    def start(self) -> None:
        """Begin to watch the thread that calls this. Collective."""
        if self._store is None:
            return
        self._watched = threading.get_ident()
        self._store.set_timeout(timedelta(seconds=self._silent_s))
        self._tell(self._beat())
        self._world.barrier(doing="starting the watchdog")
        self._process = _open_process(self._read([self._other])[0])
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        self._holder = self._read([0])[0]
        threading.Thread(target=self._guard, name="watchdog of rank 0", daemon=True).start()

    def know(self, sizes: tuple[int, ...]) -> None:
        """Learn the sizes of the mesh along ``AXES``, to name ranks by their place in it."""
        self._sizes = sizes

    def processes(self) -> list[str]:
        """Say which process each rank is: a launcher that ends all of them names a process."""
        if self._store is None:
            return []
        beats = self._read(range(self._world.world_size))
        return [
            f"{self._name(rank)}: process {beat.pid} on {beat.host.split()[0]}"
            for rank, beat in enumerate(beats)
        ]

    def progress(self, step: int) -> None:
        """Note that so many steps are done; the next is due within the time limit."""
        self._step = step
        self._since = time.monotonic()

    def rest(self) -> None:
        """Expect no step until the next ``progress``: what comes now has time limits of its own."""
        self._since = None

    def fail(self, error: BaseException) -> None:
        """Leave this rank's last words: what the others report, who only see it gone."""
        if self._store is not None and not self._stopped.is_set():
            self._stopped.set()
            with contextlib.suppress(RuntimeError):  # The store's: this rank's own words remain.
                self._tell(self._beat(words=f"{type(error).__name__}: {error}"[:500]))

    def end(self, error: BaseException) -> NoReturn:
        """End the job by an error that another rank caused, and say which. Blocks some seconds."""
        self._speak(f"{error}".splitlines()[0])

    def close(self) -> None:
        """Stop watching, once all ranks have come here. Collective."""
        if self._thread is None or self._store is None:
            return
        self._stopped.set()
        self._thread.join()
        if self._process is not None:
            os.close(self._process)
        self._tell(self._beat(left=True))
        # Rank 0 holds the store, which the others still beat to.
        self._world.barrier(doing="ending the watchdog")

    def _watch(self) -> None:
        seen, missed = -1, 0
        while not self._pause():
            try:
                self._tell(self._beat())
                beat = self._read([self._other])[0]
            except RuntimeError as error:
                self._speak(f"the store of rank 0 does not answer ({error})")
            # Counted in own beats: a process that slept itself must not take others for silent.
            missed = missed + 1 if beat.count == seen and not beat.left else 0
            seen = beat.count
            stalled = self._since is not None and time.monotonic() - self._since > self._timeout_s
            if missed * INTERVAL_S >= self._silent_s and not self._stopped.is_set():
                self._speak(f"no sign of life of rank {self._other} for {self._silent_s:g} s")
            if stalled and not self._stopped.is_set():
                self._speak(f"no step was done for {self._timeout_s:g} s")

    def _guard(self) -> None:
        """End the job where the store lets a call wait without end: rank 0 is stopped."""
        seen, missed = -1, 0
        while not self._stopped.wait(INTERVAL_S):
            calls = self._calls
            # An odd number: a call is under way.
            missed = missed + 1 if calls % 2 and calls == seen else 0
            seen = calls
            if missed * INTERVAL_S >= self._silent_s:
                if self._holder is not None:
                    _end_silent(self._holder)
                self._abort("the store of rank 0 does not answer", [self._rank_0_is_gone()])

    def _pause(self) -> bool:
        """Wait until the next beat is due; say whether it was told to stop watching."""
        if self._process is None:
            return self._stopped.wait(INTERVAL_S)
        ended, _, _ = select.select([self._process], [], [], INTERVAL_S)
        if ended and not self._stopped.is_set():
            # At once: a launcher may be about to kill this rank too, without saying for whom.
            lost = f"the process of {self._name(self._other)} has ended"
            print(f"[rank {self._world.rank}] watchdog: {lost}", file=sys.stderr, flush=True)
            self._speak(lost)
        return self._stopped.is_set()

    def _beat(self, *, words: str = "", left: bool = False) -> Beat:
        self._count += 1
        place, waits = find_place(self._watched)
        return Beat(self._count, _host(), os.getpid(), self._step, waits, place, words, left)

    def _tell(self, beat: Beat) -> None:
        assert self._store is not None, "a job of one rank tells nobody"
        with self._call():
            self._store.set(f"beat/{self._world.rank}", json.dumps(asdict(beat)))

    def _read(self, ranks: Sequence[int]) -> list[Beat]:
        assert self._store is not None, "a job of one rank asks nobody"
        with self._call():
            return [Beat(**json.loads(self._store.get(f"beat/{rank}"))) for rank in ranks]

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        with self._calling:
            self._calls += 1
            try:
                yield
            finally:
                self._calls += 1

    def _speak(self, reason: str) -> NoReturn:
        """End the job with what is known of the culprit; only one rank says it."""
        with self._ending:
            # The training thread and the watching one may both come here: the process ends below.
            first: list[Beat] = []
            try:
                first = self._read(range(self._world.world_size))
                self._go_on_beating(LOOK_S)
                second = self._read(range(self._world.world_size))
                found, silent = judge(first, second, own=self._world.rank)
                lines = [f"{self._name(rank)}: {words}" for rank, words in found.items()]
                with self._call():
                    speaker = self._speaker()
            except RuntimeError:
                # If it was there a moment ago, rank 0 has said what it knew, and ended.
                lines, silent = [self._rank_0_is_gone()], []
                speaker = 0 if first else self._world.rank
            for beat in silent:
                _end_silent(beat)
            if speaker != self._world.rank:
                with contextlib.suppress(RuntimeError):  # The store's: rank 0 has ended.
                    self._go_on_beating(GRACE_S)
                os._exit(1)
            self._abort(reason, lines)

    def _go_on_beating(self, seconds: float) -> None:
        """Wait, and let the others see meanwhile that this rank lives: they look at it too."""
        for _ in range(round(seconds / INTERVAL_S)):
            time.sleep(INTERVAL_S)
            self._tell(self._beat())

    def _abort(self, reason: str, lines: list[str]) -> NoReturn:
        self._world.abort(
            f"watchdog: {reason}; " + "; ".join(lines) + ". Every rank ends; the same command "
            "goes on from the newest checkpoint"
        )

    def _rank_0_is_gone(self) -> str:
        return f"{self._name(0)}: is silent after {self._step} steps: {GONE}"

    def _speaker(self) -> int:
        assert self._store is not None, "a job of one rank has nobody to agree with"
        return int(self._store.compare_set("speaker", "", str(self._world.rank)))

    def _name(self, rank: int) -> str:
        if not self._sizes:
            return f"rank {rank}"
        return f"rank {rank} ({role(rank, self._sizes)})"


GONE = (
    "its process was killed or stopped, or its node is gone: look at its last log lines, "
    "and in the kernel's for one that was killed for its memory"
)


def judge(
    first: Sequence[Beat], second: Sequence[Beat], *, own: int
) -> tuple[dict[int, str], list[Beat]]:
    """Find who is to blame by two looks at all ranks: the dead, else the failed, else the hung.

    Args:
        first: Of every rank.
        second: The same, some beats later.
        own: Who judges, and therefore lives.

    Returns:
        What to say of each rank that is to blame, by rank; and the silent ones.
    """
    failed = {rank: f"failed: {beat.words}" for rank, beat in enumerate(second) if beat.words}
    silent = [
        rank
        for rank, (before, after) in enumerate(zip(first, second, strict=True))
        if before.count == after.count and not (after.left or after.words or rank == own)
    ]
    gone = {rank: f"is silent after {second[rank].step} steps: {GONE}" for rank in silent}
    if failed or gone:
        return failed | gone, [second[rank] for rank in silent]
    here = {rank: beat for rank, beat in enumerate(second) if not beat.left}
    least = min((beat.step for beat in here.values()), default=0)
    behind = {rank: beat for rank, beat in here.items() if beat.step == least}
    # Of those that are behind, who waits is waited for by nobody.
    busy = {rank: beat for rank, beat in behind.items() if not beat.waits}
    return {
        rank: f"hangs after {beat.step} steps in {beat.place}: look there, or raise run.timeout_s "
        "if a step may take so long"
        for rank, beat in (busy or behind).items()
    }, []


def role(rank: int, sizes: tuple[int, ...]) -> str:
    """Say where a rank stands along the axes that have several ranks: ``pp 1, tp 0``."""
    coordinates = np.unravel_index(rank, sizes)
    named = zip(AXES, coordinates, sizes, strict=True)
    return ", ".join(f"{name} {at}" for name, at, size in named if size > 1)


def is_of_a_peer(error: BaseException) -> bool:
    """Say whether an error means that another rank went away, by what torch says of it."""
    return any(words in str(error).lower() for words in PEER_WORDS)


def find_place(thread: int) -> tuple[str, bool]:
    """Say in which line of the program a thread is, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(thread)
    while frame and frame.f_code.co_filename == OPERATORS:
        frame = frame.f_back
    waits = frame is not None and frame.f_code.co_filename.startswith(WAITING)
    while frame and frame.f_code.co_filename.startswith(TORCH) and frame.f_back:
        frame = frame.f_back
    if frame is None:
        return "no line of Python", waits
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} ({code.co_qualname})", waits


def _host() -> str:
    # A process number means something among those who count processes together.
    return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"


def _open_process(beat: Beat) -> int | None:
    """Open a process of this host, readable once it has ended; None where that cannot be."""
    try:
        return os.pidfd_open(beat.pid) if beat.host == _host() else None
    except OSError:
        return None


def _end_silent(beat: Beat) -> None:
    # A stopped process takes no polite signal: its launcher would wait for it for half a minute.
    state = Path(f"/proc/{beat.pid}/stat")
    with contextlib.suppress(OSError):
        if beat.host == _host() and state.read_text().rpartition(")")[2].split()[0] == "T":
            os.kill(beat.pid, signal.SIGKILL)
