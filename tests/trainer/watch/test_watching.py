"""How the watching thread comes to end a job: beats in a store, told and read without a wait."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from typing import NoReturn

import pytest
from torch._C._distributed_c10d import HashStore

from dataio.world import World, thread_worlds
from trainer.watch import watchdog
from trainer.watch.watchdog import Beat, Watchdog, _end_silent, _host, _open_process

OTHER = Beat(0, "another host", 1, step=3, waits=True, place="all_reduce")


class Ended(Exception):
    """The job ended, with these words."""


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Scripted(Watchdog):
    """Rank 0 of two; every pause between its beats, the other rank beats or is silent.

    Args:
        world: Of both ranks.
        script: What the other says in each pause; None: nothing new.
    """

    def __init__(self, world: World, script: Iterator[Beat | None]) -> None:
        self.store = HashStore()
        self.store.set_timeout(timedelta(seconds=1))
        super().__init__(world, self.store, timeout_s=10.0, silent_s=5.0)
        self.script, self.count = script, 0
        self.say(OTHER)

    def say(self, beat: Beat) -> None:
        """Put down what the other rank says."""
        self.count += 1
        told = replace(beat, count=self.count)
        self.store.set("beat/1", json.dumps(asdict(told)))

    def watch(self) -> str:
        """Watch until the script is over, or the job ends: with which words."""
        try:
            self._watch()
        except Ended as ended:
            return str(ended)
        return ""

    def _pause(self) -> bool:
        beat = next(self.script, self)
        if isinstance(beat, Beat):
            self.say(beat)
        return beat is self

    def _go_on_beating(self, seconds: float) -> None:
        beat = next(self.script, None)
        if beat is not None:
            self.say(beat)
        self._tell(self._beat())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watchdog, "time", made)
    return made


def scripted(*script: Beat | None) -> Scripted:
    def abort(message: str) -> NoReturn:
        raise Ended(message)

    world = thread_worlds((2,))[0]
    world.abort = abort  # type: ignore[method-assign]
    return Scripted(world, iter(script))


def test_a_rank_that_says_nothing_new_for_long_is_silent(clock: Clock) -> None:
    # Five intervals of a second; the first of them may have seen a new beat.
    assert scripted(*5 * [None]).watch() == ""
    said = scripted(*9 * [None]).watch()
    assert said.startswith("watchdog: no sign of life of rank 1 for 5 s; rank 1: is silent after 3")


def test_a_rank_that_beats_now_and_then_is_not_silent(clock: Clock) -> None:
    assert scripted(*10 * [None, None, None, OTHER]).watch() == ""


def test_a_rank_that_has_left_is_not_silent(clock: Clock) -> None:
    assert scripted(replace(OTHER, left=True), *20 * [None]).watch() == ""


def test_steps_are_expected_from_the_first_one_on_until_it_rests(clock: Clock) -> None:
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


def test_what_a_failed_rank_said_last_is_what_is_said_of_it(clock: Clock) -> None:
    failed = scripted()
    words = failed.fail(ValueError("no such label"))
    assert words == "rank 0 failed: ValueError: no such label"
    (beat,) = failed._read([0])
    assert beat.words == "ValueError: no such label"
    other = scripted(replace(OTHER, words=beat.words), *9 * [None])
    assert "; rank 1: failed: ValueError: no such label. Every rank ends" in other.watch()


def test_who_hears_that_another_speaks_leaves_it_the_word(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(status: int) -> NoReturn:
        raise Ended(f"status {status}")

    monkeypatch.setattr(os, "_exit", leave)
    hears = scripted(*3 * [OTHER])
    hears.store.set("speaker", "1")
    hears.store.set("spoken", "[]")
    assert hears.watch() == "status 1"


def test_only_a_stopped_process_of_this_host_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # It waits for its input to end.
    program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    ended: list[tuple[int, int]] = []
    with subprocess.Popen(program, stdin=subprocess.PIPE) as child:
        beat = Beat(1, _host(), child.pid)
        other = replace(beat, host="another host")
        opened = _open_process(beat)
        assert opened is not None
        os.close(opened)
        assert _open_process(other) is None
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda *args: ended.append(args))
            _end_silent(beat)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda *args: ended.append(args))
            _end_silent(other)
            _end_silent(beat)
        child.kill()
    # Once: neither while it ran, nor for the other host.
    assert ended == [(child.pid, signal.SIGKILL)]
