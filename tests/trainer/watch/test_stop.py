"""Signals are noted, agreed on in time, and told; a second one ends the process."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from dataio.base.errors import WorldError
from dataio.world import World, run_threads, single_world, thread_worlds
from tests.stand_ins import SetClock
from tonari.trainer.watch import stop
from tonari.trainer.watch.stop import StopRequest, noting_between


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_is_agreed_on_and_named(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with StopRequest() as request:
        assert not request.agreed(single_world())
        assert request.words == ""
        os.kill(os.getpid(), number)
        # A launcher may pass on the same signal twice.
        os.kill(os.getpid(), number)
        assert request.agreed(single_world())
        assert request.words == name
    assert signal.getsignal(number) == before
    assert capfd.readouterr().err.count(f"the next start finds; {name} again ends it") == 1


@pytest.mark.parametrize(
    ("noted", "ends"),
    [
        # Some ranks only: those leave, and the others go on.
        ([[signal.SIGTERM], [], [signal.SIGTERM]], ["left", "", "left"]),
        ([[signal.SIGTERM]] * 3, ["SIGTERM"] * 3),
        # What stops all stops these too, with a checkpoint.
        ([[signal.SIGTERM], [signal.SIGUSR1], []], ["SIGTERM"] * 3),
        ([[], [], []], [""] * 3),
    ],
)
def test_sigterm_of_some_ranks_has_them_leave_a_job_that_goes_on(monkeypatch, noted, ends) -> None:
    monkeypatch.setattr(stop, "AGAIN_S", 0.0)

    def run(world: World) -> str:
        def leave(asked: list[bool]) -> bool:
            if asked[world.rank]:
                sys.exit()
            return True

        request = StopRequest(leave=leave, noted=dict.fromkeys(noted[world.rank], 0.0))
        try:
            assert request.after_step(world) == bool(ends[world.rank])
        except SystemExit:
            return "left"
        return request.words

    assert run_threads(thread_worlds((3,)), run) == ends


@pytest.mark.parametrize("reaches_all", [True, False])
def test_sigterm_stops_all_ranks_if_it_reaches_all_or_those_left_cannot_go_on(
    monkeypatch, reaches_all
) -> None:
    noted: list[dict[int, float]] = [{signal.SIGTERM: 0.0}, {}]

    class Clock(SetClock):
        def sleep(self, seconds: float) -> None:
            if reaches_all:
                noted[1].setdefault(signal.SIGTERM, 0.0)

    monkeypatch.setattr(stop, "time", Clock())

    def run(world: World) -> str:
        def leave(asked: list[bool]) -> bool:
            assert asked == [True, reaches_all]
            return False

        request = StopRequest(leave=leave, noted=noted[world.rank])
        assert request.agreed(world)
        return request.words

    assert run_threads(thread_worlds((2,)), run) == ["SIGTERM"] * 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("is_between", [False, True])
def test_a_signal_before_a_rank_was_lost_stops_those_that_go_on(is_between, name) -> None:
    noted: dict[int, float] = {}
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with noting_between(noted):
        with contextlib.suppress(WorldError), StopRequest(noted=noted):
            if not is_between:
                os.kill(os.getpid(), number)
            raise WorldError("a peer is gone")
        if is_between:
            os.kill(os.getpid(), number)
        with StopRequest(noted=noted) as request:
            assert request.agreed(single_world())
            assert request.words == name
    assert signal.getsignal(number) == before


def test_a_signal_that_came_while_the_program_was_imported_is_noted() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    # To this thread: the pools of others, here from earlier on, do not block it.
    signal.raise_signal(signal.SIGUSR1)
    with StopRequest() as request:
        assert request.agreed(single_world())
        assert request.words == "SIGUSR1"
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_same_signal_again_ends_the_process_at_once() -> None:
    program = (
        "import os, signal; from tonari.trainer.watch import stop; stop.AGAIN_S = 0\n"
        "with stop.StopRequest():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('saves', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('not here')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, b"saves\n")


@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_is_noted_once_there_is_something_to_save(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as request:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        request.train()
        with contextlib.suppress(KeyboardInterrupt):  # else it would end all tests
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert request.agreed(single_world())
        assert request.words == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.count("stops after this step, with a checkpoint") == 1


def test_ctrl_c_stays_ignored_in_the_background_of_a_shell() -> None:
    program = (
        "import signal; from tonari.trainer.watch.stop import StopRequest\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with StopRequest() as request:\n"
        "    request.train()\n"
        "    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)


def test_repeats_of_a_signal_count_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ended = SetClock(), list[int]()
    monkeypatch.setattr(stop, "time", clock)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "kill", lambda _, number: ended.append(number))
    request = StopRequest()
    for now in (0.0, 1.5, 1.9):
        clock.now = now
        request._note(signal.SIGTERM, None)
    assert not ended
    clock.now = 2.5
    request._note(signal.SIGTERM, None)
    assert ended == [signal.SIGTERM]


def test_outside_of_the_main_thread_no_signal_is_handled() -> None:
    def run(world: World) -> str:
        with StopRequest() as request:
            assert not request.agreed(world)
        return request.words

    before = signal.getsignal(signal.SIGTERM)
    assert run_threads(thread_worlds((2,)), run) == ["", ""]
    assert signal.getsignal(signal.SIGTERM) is before


def test_all_ranks_stop_after_the_same_step_within_a_second_and_few_steps_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SetClock()
    monkeypatch.setattr(stop, "time", clock)
    asked = 0
    allreduce = World.allreduce

    def counted(world: World, values: object, **kwargs: object) -> object:
        nonlocal asked
        asked += world.rank == 0
        return allreduce(world, values, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(World, "allreduce", counted)
    signalled = 700

    def run(world: World) -> int:
        request = StopRequest()
        for step in range(2000):
            if world.rank == 0:
                clock.now += 0.001
            if step == signalled and world.rank == 1:
                request._note(signal.SIGUSR1, None)
            if request.after_step(world):
                assert request.words == "SIGUSR1"
                return step
        return -1

    stops = run_threads(thread_worlds((3,)), run)
    assert len(set(stops)) == 1
    assert signalled <= stops[0] < signalled + stop.MOST_STEPS
    assert asked < 20
