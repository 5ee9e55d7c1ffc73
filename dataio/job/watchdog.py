"""Ends a job when one of its ranks dies, stops or hangs, and reports which one, and where.

A thread of each rank sends a heartbeat to a store once a second, and looks at the next rank's;
`judge` decides what follows. The training thread writes its progress, the watching thread reads it;
both only replace whole values. The store lies in rank 0: if it does not answer, rank 0 is reported
as silent.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import NoReturn

from torch.distributed import Store  # type: ignore[attr-defined]

from dataio.job.judge import GONE, Heartbeat, Unchanged, find_culprits, is_late
from dataio.job.process import end_stopped, first_ended, host_name, open_process
from dataio.job.stack import find_place
from dataio.world import World

INTERVAL_S = 1.0
LOOK_S = 3.0
"""Between two looks at a rank: longer than a heartbeat takes, however busy the machine."""

GRACE_S = 5.0
"""Beside its look: how long the others wait for the rank that reports before they end."""


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
        self._roles: Sequence[str] = ()
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
        self._holder: Heartbeat | None = None
        self._blames = False

    def start(self) -> None:
        """Begin to watch the thread that calls this. Collective."""
        if self._store is None:
            return
        self._watched = threading.get_ident()
        self._store.set_timeout(timedelta(seconds=self._silent_s))
        own = self._heartbeat()
        self._send(own)
        # Not read from the store by each rank: rank 0 would answer each of N ranks N times.
        sent = self._world.allgather(
            json.dumps(asdict(own)).encode(), doing="starting the watchdog"
        )
        heartbeats = [Heartbeat(**json.loads(heartbeat)) for heartbeat in sent]
        self._hosts = tuple(heartbeat.host.split()[0] for heartbeat in heartbeats)
        opened = {rank: open_process(heartbeat) for rank, heartbeat in enumerate(heartbeats)}
        self._processes = {
            process: rank
            for rank, process in opened.items()
            if process is not None and rank != self._world.rank
        }
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        self._holder = heartbeats[0]
        threading.Thread(target=self._guard, name="watchdog of rank 0", daemon=True).start()

    def set_roles(self, roles: Sequence[str]) -> None:
        """Name ranks by what each does, such as ``pp 1, tp 0``, beside their number."""
        self._roles = roles

    def processes(self) -> list[str]:
        """Name each rank and its process: a launcher that ends all of them names a process."""
        if self._store is None:
            return []
        heartbeats = self._read(range(self._world.world_size))
        return [
            f"{self._name(rank, ())}: process {heartbeat.pid} on {heartbeat.host.split()[0]}"
            for rank, heartbeat in enumerate(heartbeats)
        ]

    def progress(self, step: int) -> None:
        """Note that so many steps are done; the next is due within the time limit."""
        self._step = step
        self._since = time.monotonic()

    def rest(self) -> None:
        """Expect no step until the next ``progress``: what comes now has time limits of its own."""
        self._since = None

    def fail(self, error: BaseException) -> str:
        """Send the error that this rank fails by: the others report it, who only see it gone.

        Returns:
            The same, for its own log.
        """
        cause = f"{type(error).__name__}: {error}"
        if self._store is not None and not self._stopped.is_set():
            self._stopped.set()
            with contextlib.suppress(
                RuntimeError
            ):  # The store may be gone: this rank logs the error itself.
                self._send(self._heartbeat(failure=cause[:500]))
        return f"{self._name(self._world.rank)} failed: {cause}"

    def end(self, error: BaseException) -> NoReturn:
        """End the job by an error of another rank, and report which. Blocks for seconds."""
        self._blames = True
        if threading.current_thread() is threading.main_thread():
            # A launcher that ends this rank politely would end it before it reports.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._end_job(f"{error}".splitlines()[0])

    def close(self) -> None:
        """Stop watching, once all ranks have come here. Collective."""
        if self._thread is None or self._store is None:
            return
        self._stopped.set()
        self._thread.join()
        for process in self._processes:
            os.close(process)
        self._send(self._heartbeat(left=True))
        # Rank 0 holds the store, which the others still send heartbeats to.
        self._world.barrier(doing="ending the watchdog")

    def _watch(self) -> None:
        silence = Unchanged(interval_s=INTERVAL_S, limit_s=self._silent_s)
        while not self._pause():
            try:
                self._send(self._heartbeat())
                other = self._read([self._other])[0]
                with self._call():
                    is_ending = self._is_set("reporter")
            except RuntimeError as error:
                self._end_job(f"the store of rank 0 does not answer ({error})")
            if is_ending and not self._stopped.is_set():
                # Now, not when the rank that it watches has gone: one after the other takes long.
                self._end_job("another rank ends the job")
            is_silent = silence.is_too_long(other.count, may_rest=other.left)
            late = is_late(since=self._since, now=time.monotonic(), timeout_s=self._timeout_s)
            if is_silent and not self._stopped.is_set():
                self._end_job(f"no sign of life of rank {self._other} for {self._silent_s:g} s")
            if late and not self._stopped.is_set():
                self._end_job(f"no step was done for {self._timeout_s:g} s")

    def _guard(self) -> None:
        """End the job where the store lets a call wait without end: rank 0 is stopped."""
        waiting = Unchanged(interval_s=INTERVAL_S, limit_s=self._silent_s)
        while not self._stopped.wait(INTERVAL_S):
            calls = self._calls
            # An odd number of calls begun and ended: one is under way.
            if waiting.is_too_long(calls, may_rest=calls % 2 == 0):
                if self._holder is not None:
                    end_stopped(self._holder)
                self._abort("the store of rank 0 does not answer", [self._is_gone(0)])

    def _pause(self) -> bool:
        """Wait until the next heartbeat is due; return whether to stop watching."""
        if not self._processes:
            return self._stopped.wait(INTERVAL_S)
        ended = first_ended(self._processes, wait_s=INTERVAL_S)
        if ended is not None and not self._stopped.is_set():
            self._lost = self._processes[ended]
            lost = f"the process of {self._name(self._lost)} has ended"
            if self._lost == self._other:
                # At once: a launcher may be about to kill this rank too, without naming the other.
                print(f"[rank {self._world.rank}] watchdog: {lost}", file=sys.stderr, flush=True)
            self._end_job(lost)
        return self._stopped.is_set()

    def _heartbeat(self, *, failure: str = "", left: bool = False) -> Heartbeat:
        self._count += 1
        place, waits = find_place(self._watched)
        # A thread that looks for a culprit waited until a moment ago.
        waits = waits or self._blames
        return Heartbeat(
            self._count, host_name(), os.getpid(), self._step, waits, place, failure, left
        )

    def _send(self, heartbeat: Heartbeat) -> None:
        assert self._store is not None, "a job of one rank sends nothing"
        with self._call():
            self._store.set(f"heartbeat/{self._world.rank}", json.dumps(asdict(heartbeat)))

    def _read(self, ranks: Sequence[int]) -> list[Heartbeat]:
        assert self._store is not None, "a job of one rank asks nobody"
        with self._call():
            return [Heartbeat(**json.loads(self._store.get(f"heartbeat/{rank}"))) for rank in ranks]

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        with self._calling:
            self._calls += 1
            try:
                yield
            finally:
                self._calls += 1

    def _end_job(self, reason: str) -> NoReturn:
        """End the job with what is known of the culprit; only one rank reports it."""
        with self._ending:
            # The training thread and the watching one may both come here: the process ends below.
            reporter = self._world.rank
            try:
                with self._call():
                    reporter = self._reporter()
                if reporter != self._world.rank:
                    self._wait_for_report()
                    os._exit(1)
                found, silent = self._judge()
                lines = [f"{self._name(rank)}: {report}" for rank, report in found.items()]
            except RuntimeError:
                if reporter != self._world.rank:
                    os._exit(1)  # It has reported, and ended: it was rank 0.
                # Or a launcher ended rank 0 because another one, which was seen to end, had gone.
                lines, silent = [self._is_gone(self._lost or 0)], []
            for heartbeat in silent:
                end_stopped(heartbeat)
            self._abort(reason, lines)

    def _judge(self) -> tuple[dict[int, str], list[Heartbeat]]:
        """Look twice at all ranks, and send the others the list of silent ones, to end."""
        everyone = range(self._world.world_size)
        first = self._read(everyone)
        self._send_heartbeats(LOOK_S)
        second = self._read(everyone)
        found, silent = find_culprits(first, second, own=self._world.rank, first_lost=self._lost)
        with self._call():
            assert self._store is not None, "a job of one rank judges nobody"
            self._store.set("silent", json.dumps([asdict(heartbeat) for heartbeat in silent]))
        return found, silent

    def _wait_for_report(self) -> None:
        """Stay until another rank has reported: a launcher would end it together with this one."""
        assert self._store is not None, "a job of one rank waits for nobody"
        for _ in range(round((LOOK_S + GRACE_S) / INTERVAL_S)):
            self._send_heartbeats(INTERVAL_S)
            with self._call():
                silent = json.loads(self._store.get("silent")) if self._is_set("silent") else None
            if silent is not None:
                # The rank that reports may be on another host than they are.
                for silent_one in silent:
                    end_stopped(Heartbeat(**silent_one))
                return

    def _is_set(self, name: str) -> bool:
        assert self._store is not None, "a job of one rank asks nobody"
        return bool(self._store.check([name]))

    def _send_heartbeats(self, seconds: float) -> None:
        """Wait, and send heartbeats meanwhile: the others look at this rank too."""
        for _ in range(round(seconds / INTERVAL_S)):
            time.sleep(INTERVAL_S)
            self._send(self._heartbeat())

    def _abort(self, reason: str, lines: list[str]) -> NoReturn:
        self._world.abort(
            f"watchdog: {reason}; " + "; ".join(lines) + ". Every rank ends; the same command "
            "goes on from the newest checkpoint"
        )

    def _is_gone(self, rank: int) -> str:
        return f"{self._name(rank)}: is silent after {self._step} steps: {GONE}"

    def _reporter(self) -> int:
        assert self._store is not None, "a job of one rank has nobody to agree with"
        return int(self._store.compare_set("reporter", "", str(self._world.rank)))

    def _name(self, rank: int, hosts: Sequence[str] | None = None) -> str:
        """Name a rank, its host where there are several, and its role, once known."""
        hosts = self._hosts if hosts is None else hosts
        host = f" on {hosts[rank]}" if len(set(hosts)) > 1 else ""
        return f"rank {rank}{host}" + (f" ({self._roles[rank]})" if self._roles else "")
