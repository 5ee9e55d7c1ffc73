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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from dataio.base.errors import StallError, WorldError
from dataio.world import World
from trainer.errors import CheckpointError
from trainer.mesh.mesh import AXES

INTERVAL_S = 1.0
LOOK_S = 3.0
"""Between two looks at a rank: longer than a beat takes, however busy the machine."""

GRACE_S = 5.0
"""For the rank that speaks, beside its look, until the others end themselves."""

TORCH = str(Path(torch.__file__).parent)
OPERATORS = (f"{TORCH}/_ops.py", f"{TORCH}/_library/")
"""Through these a collective is called, on the way back of tp too."""

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
        self._hosts: tuple[str, ...] = ()
        self._step = 0
        self._since: float | None = None
        self._count = 0
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._watched = 0
        self._other = (world.rank + 1) % world.world_size
        self._processes: dict[int, int] = {}
        self._lost: int | None = None
        self._calls = 0
        self._calling = threading.Lock()
        self._holder: Beat | None = None
        self._blames = False

    def start(self) -> None:
        """Begin to watch the thread that calls this. Collective."""
        if self._store is None:
            return
        self._watched = threading.get_ident()
        self._store.set_timeout(timedelta(seconds=self._silent_s))
        self._tell(self._beat())
        self._world.barrier(doing="starting the watchdog")
        beats = self._read(range(self._world.world_size))
        self._hosts = tuple(beat.host.split()[0] for beat in beats)
        opened = {rank: _open_process(beat) for rank, beat in enumerate(beats)}
        self._processes = {
            process: rank
            for rank, process in opened.items()
            if process is not None and rank != self._world.rank
        }
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        self._holder = beats[0]
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
            f"{name(rank, self._sizes)}: process {beat.pid} on {beat.host.split()[0]}"
            for rank, beat in enumerate(beats)
        ]

    def progress(self, step: int) -> None:
        """Note that so many steps are done; the next is due within the time limit."""
        self._step = step
        self._since = time.monotonic()

    def rest(self) -> None:
        """Expect no step until the next ``progress``: what comes now has time limits of its own."""
        self._since = None

    def fail(self, error: BaseException) -> str:
        """Leave this rank's last words: what the others report, who only see it gone.

        Returns:
            The same, for its own log.
        """
        words = f"{type(error).__name__}: {error}"
        if self._store is not None and not self._stopped.is_set():
            self._stopped.set()
            with contextlib.suppress(RuntimeError):  # The store's: this rank's own words remain.
                self._tell(self._beat(words=words[:500]))
        return f"{self._name(self._world.rank)} failed: {words}"

    def end(self, error: BaseException) -> NoReturn:
        """End the job by an error that another rank caused, and say which. Blocks some seconds."""
        self._blames = True
        if threading.current_thread() is threading.main_thread():
            # A launcher that ends this rank politely would have it die unheard, and be blamed.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._speak(f"{error}".splitlines()[0])

    def close(self) -> None:
        """Stop watching, once all ranks have come here. Collective."""
        if self._thread is None or self._store is None:
            return
        self._stopped.set()
        self._thread.join()
        for process in self._processes:
            os.close(process)
        self._tell(self._beat(left=True))
        # Rank 0 holds the store, which the others still beat to.
        self._world.barrier(doing="ending the watchdog")

    def _watch(self) -> None:
        seen, missed = -1, 0
        while not self._pause():
            try:
                self._tell(self._beat())
                beat = self._read([self._other])[0]
                with self._call():
                    ends = self._is_set("speaker")
            except RuntimeError as error:
                self._speak(f"the store of rank 0 does not answer ({error})")
            if ends and not self._stopped.is_set():
                # Now, not when the rank that it watches has gone: one after the other takes long.
                self._speak("another rank ends the job")
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
                self._abort("the store of rank 0 does not answer", [self._is_gone(0)])

    def _pause(self) -> bool:
        """Wait until the next beat is due; say whether it was told to stop watching."""
        if not self._processes:
            return self._stopped.wait(INTERVAL_S)
        ended = _first_ended(self._processes)
        if ended is not None and not self._stopped.is_set():
            self._lost = self._processes[ended]
            lost = f"the process of {self._name(self._lost)} has ended"
            if self._lost == self._other:
                # At once: a launcher may be about to kill this rank too, without saying for whom.
                print(f"[rank {self._world.rank}] watchdog: {lost}", file=sys.stderr, flush=True)
            self._speak(lost)
        return self._stopped.is_set()

    def _beat(self, *, words: str = "", left: bool = False) -> Beat:
        self._count += 1
        place, waits = find_place(self._watched)
        # A thread that looks for a culprit waited until a moment ago.
        waits = waits or self._blames
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
            speaker = self._world.rank
            try:
                with self._call():
                    speaker = self._speaker()
                if speaker != self._world.rank:
                    self._hear_out()
                    os._exit(1)
                found, silent = self._judge()
                lines = [f"{self._name(rank)}: {words}" for rank, words in found.items()]
            except RuntimeError:
                if speaker != self._world.rank:
                    os._exit(1)  # It has said what it knew, and ended: it was rank 0.
                # Or a launcher ended rank 0 because another one, which was seen to end, had gone.
                lines, silent = [self._is_gone(self._lost or 0)], []
            for beat in silent:
                _end_silent(beat)
            self._abort(reason, lines)

    def _judge(self) -> tuple[dict[int, str], list[Beat]]:
        """Look twice at all ranks, and tell the others which ones to end."""
        everyone = range(self._world.world_size)
        first = self._read(everyone)
        self._go_on_beating(LOOK_S)
        second = self._read(everyone)
        found, silent = judge(first, second, own=self._world.rank, lost=self._lost)
        with self._call():
            assert self._store is not None, "a job of one rank judges nobody"
            self._store.set("spoken", json.dumps([asdict(beat) for beat in silent]))
        return found, silent

    def _hear_out(self) -> None:
        """Stay until another rank has said what it knows: a launcher would end it with this one."""
        assert self._store is not None, "a job of one rank hears nobody"
        for _ in range(round((LOOK_S + GRACE_S) / INTERVAL_S)):
            self._go_on_beating(INTERVAL_S)
            with self._call():
                silent = json.loads(self._store.get("spoken")) if self._is_set("spoken") else None
            if silent is not None:
                # The speaker may be on another host than they are.
                for beat in silent:
                    _end_silent(Beat(**beat))
                return

    def _is_set(self, name: str) -> bool:
        assert self._store is not None, "a job of one rank asks nobody"
        return bool(self._store.check([name]))

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

    def _is_gone(self, rank: int) -> str:
        return f"{self._name(rank)}: is silent after {self._step} steps: {GONE}"

    def _speaker(self) -> int:
        assert self._store is not None, "a job of one rank has nobody to agree with"
        return int(self._store.compare_set("speaker", "", str(self._world.rank)))

    def _name(self, rank: int) -> str:
        return name(rank, self._sizes, self._hosts)


GONE = (
    "its process was killed or stopped, or its node is gone: look at its last log lines, "
    "and in the kernel's for one that was killed for its memory"
)


def judge(
    first: Sequence[Beat], second: Sequence[Beat], *, own: int, lost: int | None = None
) -> tuple[dict[int, str], list[Beat]]:
    """Find who is to blame by two looks at all ranks: the dead, else the failed, else the hung.

    Args:
        first: Of every rank.
        second: The same, some beats later.
        own: Who judges, and therefore lives.
        lost: Whose process was the first to end, if one was seen to.

    Returns:
        What to say of each rank that is to blame, by rank; and the silent ones.
    """
    failed = {rank: f"failed: {beat.words}" for rank, beat in enumerate(second) if beat.words}
    silent = [
        rank
        for rank, (before, after) in enumerate(zip(first, second, strict=True))
        if before.count == after.count and not (after.left or after.words or rank == own)
    ]
    # Beside one that told why it failed, or went first, a launcher may have ended them for it.
    first_gone = [] if failed else [lost] if lost in silent else silent
    gone = {
        rank: f"is silent after {second[rank].step} steps: {GONE}"
        if rank in first_gone
        else f"has ended too, after {second[rank].step} steps"
        for rank in silent
    }
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


def name(rank: int, sizes: tuple[int, ...], hosts: Sequence[str] = ()) -> str:
    """Name a rank, its host where there are several, and its place in the mesh, once known."""
    host = f" on {hosts[rank]}" if len(set(hosts)) > 1 else ""
    place = f" ({role(rank, sizes)})" if sizes else ""
    return f"rank {rank}{host}{place}"


def role(rank: int, sizes: tuple[int, ...]) -> str:
    """Say where a rank stands along the axes that have several ranks: ``pp 1, tp 0``."""
    coordinates = np.unravel_index(rank, sizes)
    named = zip(AXES, coordinates, sizes, strict=True)
    return ", ".join(f"{name} {at}" for name, at, size in named if size > 1)


def find_cause(error: BaseException) -> BaseException:
    """Find what went wrong in a stage: torch's pipelines raise errors of their own from it."""
    while type(error) is RuntimeError and error.__cause__ is not None:
        error = error.__cause__
    return error


def is_of_a_peer(error: BaseException) -> bool:
    """Say whether an error means that another rank went away or hangs, by what torch says of it."""
    if isinstance(error, CheckpointError) and error.__cause__ is not None:
        # What was not written because a peer went away while it was.
        return is_of_a_peer(error.__cause__)
    if isinstance(error, StallError):
        return True
    # Torch's own is a RuntimeError, our world's tells it on: a file of such a name is no sign.
    words = str(error).lower() if isinstance(error, (RuntimeError, WorldError)) else ""
    return any(of_a_peer in words for of_a_peer in PEER_WORDS)


def find_place(thread: int) -> tuple[str, bool]:
    """Say in which line of the program a thread is, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(thread)
    while frame and frame.f_code.co_filename.startswith(OPERATORS):
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


def _first_ended(processes: Iterable[int]) -> int | None:
    """Wait one interval for the end of an opened process, and return the first; None if all live.

    Where several have ended, a launcher has ended one for the other: who looks all the time, as
    this does, sees the first alone.
    """
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    ended = poll.poll(INTERVAL_S * 1000)
    return ended[0][0] if ended else None


def _end_silent(beat: Beat) -> None:
    # A stopped process takes no polite signal: its launcher would wait for it for half a minute.
    state = Path(f"/proc/{beat.pid}/stat")
    with contextlib.suppress(OSError):
        if beat.host == _host() and state.read_text().rpartition(")")[2].split()[0] == "T":
            os.kill(beat.pid, signal.SIGKILL)
