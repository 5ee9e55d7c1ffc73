"""How the watching thread comes to end a job, by heartbeats in a store."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, NoReturn

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from dataio.job import watchdog
from dataio.job.judge import Heartbeat
from dataio.job.launch import join
from dataio.job.process import end_stopped, host_name, open_process
from dataio.job.watchdog import Watchdog
from dataio.world import World, run_threads, thread_worlds
from dataio.world.threads import ThreadTransport
from tests.stand_ins import SetClock

OTHER = Heartbeat(0, "another host", 1, step=3, waits=True, place="all_reduce")


class ProcessEnded(Exception):
    """The job ended, with these words."""


class Scripted(Watchdog):
    """Rank 0 of two; in every pause between its heartbeats, the other rank sends one or is silent.

    Args:
        world: Of both ranks.
        script: What the other sends in each pause; None: nothing new.
    """

    def __init__(self, world: World, script: Iterator[Heartbeat | None]) -> None:
        self.store = HashStore()
        self.store.set_timeout(timedelta(seconds=1))
        super().__init__(world, self.store, timeout_s=10.0, silent_s=5.0)
        self.script, self.count = script, 0
        self.send(OTHER)

    def send(self, heartbeat: Heartbeat) -> None:
        """Put the other rank's heartbeat into the store."""
        self.count += 1
        numbered = replace(heartbeat, count=self.count)
        self.store.set("heartbeat/1", json.dumps(asdict(numbered)))

    def watch(self) -> str:
        """Watch until the script is over, or the job ends: with which words."""
        try:
            self._watch()
        except ProcessEnded as ended:
            return str(ended)
        return ""

    def _pause(self) -> bool:
        heartbeat = next(self.script, self)
        if isinstance(heartbeat, Heartbeat):
            self.send(heartbeat)
        return heartbeat is self

    def _send_heartbeats(self, seconds: float) -> None:
        heartbeat = next(self.script, None)
        if heartbeat is not None:
            self.send(heartbeat)
        self._send(self._heartbeat())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    made = SetClock()
    monkeypatch.setattr(watchdog, "time", made)
    return made


def scripted(*script: Heartbeat | None) -> Scripted:
    def abort(message: str) -> NoReturn:
        raise ProcessEnded(message)

    world = thread_worlds((2,))[0]
    world.abort = abort  # type: ignore[method-assign]
    return Scripted(world, iter(script))


def test_a_rank_that_sends_nothing_new_for_long_is_silent(clock: SetClock) -> None:
    # Five intervals of a second; the first of them may have seen a new heartbeat.
    assert scripted(*5 * [None]).watch() == ""
    report = scripted(*9 * [None]).watch()
    assert report.startswith(
        "watchdog: no sign of life of rank 1 for 5 s; rank 1: is silent after 3"
    )


def test_a_rank_that_sends_a_heartbeat_now_and_then_is_not_silent(clock: SetClock) -> None:
    assert scripted(*10 * [None, None, None, OTHER]).watch() == ""


def test_a_rank_that_has_left_is_not_silent(clock: SetClock) -> None:
    assert scripted(replace(OTHER, left=True), *20 * [None]).watch() == ""


def test_steps_are_expected_from_the_first_one_on_until_it_rests(clock: SetClock) -> None:
    watched = scripted(*3 * [OTHER])
    clock.now = 1000.0
    assert watched.watch() == "", "staging has no limit"
    watched.script = iter(3 * [OTHER])
    watched.progress(1)
    watched.rest()
    clock.now = 2000.0
    assert watched.watch() == ""
    watched.script = iter(9 * [OTHER])
    watched.progress(3)
    clock.now = 2010.0
    assert watched.watch() == ""
    watched.script = iter(9 * [OTHER])
    clock.now = 2010.5
    assert watched.watch().startswith("watchdog: no step was done for 10 s; rank 0: hangs after 3")


def test_the_error_that_a_rank_failed_by_is_reported(clock: SetClock) -> None:
    failed = scripted()
    words = failed.fail(ValueError("no such label"))
    assert words == "rank 0 failed: ValueError: no such label"
    (heartbeat,) = failed._read([0])
    assert heartbeat.failure == "ValueError: no such label"
    other = scripted(replace(OTHER, failure=heartbeat.failure), *9 * [None])
    assert "; rank 1: failed: ValueError: no such label. Every rank ends" in other.watch()


def test_a_rank_that_sees_another_report_leaves_the_report_to_it(
    clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(status: int) -> NoReturn:
        raise ProcessEnded(f"status {status}")

    monkeypatch.setattr(os, "_exit", leave)
    waits = scripted(*3 * [OTHER])
    waits.store.set("reporter", "1")
    waits.store.set("silent", "[]")
    assert waits.watch() == "status 1"


def test_only_a_stopped_process_of_this_host_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # It waits for its input to end.
    program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    ended: list[tuple[int, int]] = []
    with subprocess.Popen(program, stdin=subprocess.PIPE) as child:
        heartbeat = Heartbeat(1, host_name(), child.pid)
        other = replace(heartbeat, host="another host")
        opened = open_process(heartbeat)
        assert opened is not None
        os.close(opened)
        assert open_process(other) is None
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda *args: ended.append(args))
            end_stopped(heartbeat)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda *args: ended.append(args))
            end_stopped(other)
            end_stopped(heartbeat)
        child.kill()
    # Once: neither while it ran, nor for the other host.
    assert ended == [(child.pid, signal.SIGKILL)]


def test_a_rank_is_named_with_its_host_where_there_are_several_and_what_it_does() -> None:
    watchdog = Watchdog(thread_worlds((2,))[0], None, timeout_s=1.0)
    assert watchdog._name(1) == "rank 1"
    watchdog._hosts = ("here", "here")
    assert watchdog._name(1) == "rank 1"
    watchdog._hosts = ("here", "there")
    watchdog.set_roles(["tp 0", "tp 1"])
    assert watchdog._name(1) == "rank 1 on there (tp 1)"


def test_a_job_of_one_rank_is_not_watched_and_costs_nothing() -> None:
    threads = {*threading.enumerate()}  # Those that other tests left may end meanwhile.
    with join(device="cpu", timeout_s=0.01) as job:
        job.watchdog.progress(1)
        assert threads >= {*threading.enumerate()}
        assert job.watchdog.processes() == []


class CountingStore(Store):
    """Counts what all ranks ask of the store that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.counts, self._lock = HashStore(), Counter[str](), threading.Lock()

    def _call(self, name: str, *given: Any) -> Any:
        with self._lock:
            self.counts[name] += len(given[0]) if name in ("multi_get", "check") else 1
        return getattr(self.store, name)(*given)

    def set(self, *given: Any) -> None:
        self._call("set", *given)

    def get(self, *given: Any) -> Any:
        return self._call("get", *given)

    def multi_get(self, *given: Any) -> Any:
        return self._call("multi_get", *given)

    def check(self, *given: Any) -> Any:
        return self._call("check", *given)

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)


class Starting(Watchdog):
    """Starts, and watches nothing."""

    def _watch(self) -> None:
        pass

    def _guard(self) -> None:
        pass


def test_a_start_takes_as_many_messages_as_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Counter[int]()
    send = ThreadTransport.isend

    def count(self: ThreadTransport, data: Any, *, dest: int, tag: int) -> Any:
        sent[self.world_size] += 1
        return send(self, data, dest=dest, tag=tag)

    monkeypatch.setattr(ThreadTransport, "isend", count)
    for num_ranks in (2, 4, 8, 16):
        store = CountingStore()

        def start(world: World, store: Store = store) -> tuple[str, ...]:
            watchdog = Starting(world, store, timeout_s=10.0)
            watchdog.start()
            return watchdog._hosts

        hosts = run_threads(thread_worlds([num_ranks]), start)
        assert hosts == num_ranks * [num_ranks * (host_name().split()[0],)]
        assert store.counts == {"set": num_ranks}
        assert sent[num_ranks] <= 4 * num_ranks, "two up to rank 0 and two down, of each rank"
