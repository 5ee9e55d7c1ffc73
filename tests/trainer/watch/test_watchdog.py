"""Who is to blame, by what each rank says of itself; and the job of one rank, which needs none."""

import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dataio.base.errors import StallError, WorldError
from dataio.world import World, run_threads, thread_worlds
from trainer.errors import CheckpointError, ConfigError
from trainer.watch.launch import join
from trainer.watch.watchdog import (
    TORCH,
    Beat,
    find_cause,
    find_place,
    is_of_a_peer,
    judge,
    name,
    role,
)

BEAT = Beat(5, "here", 1, step=7, waits=True, place="all_reduce")


def looks(*second: Beat, silent: tuple[int, ...] = ()) -> tuple[list[Beat], list[Beat]]:
    first = [
        beat if rank in silent else replace(beat, count=beat.count - 3)
        for rank, beat in enumerate(second)
    ]
    return first, [*second]


def test_the_dead_are_to_blame_before_those_that_wait_or_hang() -> None:
    hung = replace(BEAT, waits=False)
    found, silent = judge(*looks(hung, BEAT, BEAT, silent=(2,)), own=1)
    assert list(found) == [2]
    assert found[2].startswith("is silent after 7 steps: its process was killed")
    assert silent == [BEAT]


def test_the_failed_are_to_blame_before_the_dead_whom_a_launcher_may_have_ended() -> None:
    failed = replace(BEAT, words="ValueError: no")
    found, silent = judge(*looks(BEAT, BEAT, failed, BEAT, silent=(2, 3)), own=1)
    assert found == {2: "failed: ValueError: no", 3: "has ended too, after 7 steps"}
    assert silent == [BEAT]


def test_what_went_wrong_in_a_stage_is_found_behind_the_errors_of_the_pipeline() -> None:
    lost = RuntimeError("Connection closed by peer")
    wrapped, ours = RuntimeError("Failed to run stage backward"), ConfigError("no")
    wrapped.__cause__, ours.__cause__ = lost, OSError()
    assert find_cause(wrapped) is lost
    assert find_cause(ours) is ours, "what is known here was added to it"


def test_of_those_that_are_behind_the_one_that_does_not_wait_hangs() -> None:
    ahead = replace(BEAT, step=8, waits=False)
    hung = replace(BEAT, waits=False, place="loop.py:3 (spin)")
    found, silent = judge(*looks(ahead, BEAT, hung), own=0)
    assert list(found) == [2]
    assert "hangs after 7 steps in loop.py:3 (spin)" in found[2]
    assert not silent


def test_if_all_that_are_behind_wait_they_are_all_named() -> None:
    assert list(judge(*looks(BEAT, replace(BEAT, step=8), BEAT), own=1)[0]) == [0, 2]


def test_of_the_silent_the_one_that_was_seen_to_end_first_is_to_blame() -> None:
    found, silent = judge(*looks(BEAT, BEAT, BEAT, silent=(0, 2)), own=1, lost=2)
    assert found[0] == "has ended too, after 7 steps"
    assert found[2].startswith("is silent after 7 steps")
    assert len(silent) == 2


def test_who_judges_and_who_has_left_is_not_to_blame() -> None:
    left = replace(BEAT, left=True, step=1, waits=False)
    assert list(judge(*looks(BEAT, left, BEAT, silent=(0, 1)), own=0)[0]) == [0, 2]


def test_a_rank_is_named_by_the_axes_that_have_several() -> None:
    assert role(5, (2, 1, 2, 1, 2)) == "pp 1, dp_shard 0, tp 1"


def test_a_rank_is_named_with_its_host_where_there_are_several() -> None:
    assert name(1, (), ("here", "there")) == "rank 1 on there"
    assert name(1, (1, 2, 1, 1, 1), ("here", "there")) == "rank 1 on there (dp_replicate 1)"
    assert name(1, (), ("here", "here")) == "rank 1"
    assert name(1, ()) == "rank 1"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), True),
        (StallError("rank 3 did not come"), True),
        (WorldError("receive from rank 0 failed: Connection closed by peer"), True),
        (RuntimeError("mat1 and mat2 shapes"), False),
        (FileNotFoundError("/home/gloo/data"), False),
    ],
)
def test_an_error_that_a_peer_caused_is_known(error: Exception, expected: bool) -> None:
    assert is_of_a_peer(error) == expected


def stack(*calls: str) -> SimpleNamespace | None:
    """A thread's frames: the innermost call first."""
    if not calls:
        return None
    code = SimpleNamespace(co_filename=calls[0], co_qualname="step")
    return SimpleNamespace(f_code=code, f_lineno=12, f_back=stack(*calls[1:]))


@pytest.mark.parametrize(
    ("cause", "expected"),
    [(RuntimeError("[gloo] Connection closed by peer"), True), (OSError("no space"), False)],
)
def test_a_checkpoint_that_was_not_written_is_of_a_peer_if_its_cause_is(
    cause: Exception, expected: bool
) -> None:
    error = CheckpointError("step-00000012.partial: was not written")
    error.__cause__ = cause
    assert is_of_a_peer(error) == expected


@pytest.mark.parametrize(
    ("calls", "place", "waits"),
    [
        (("distributed/c10d.py", "loop.py"), "loop.py:12 (step)", True),
        (("_ops.py", "_library/x.py", "distributed/x.py", "loop.py"), "loop.py:12 (step)", True),
        (("nn/modules/linear.py", "loop.py", "distributed/run.py"), "loop.py:12 (step)", False),
        (("_ops.py", "nn/functional.py", "model.py"), "model.py:12 (step)", False),
        (("model.py", "distributed/x.py", "loop.py"), "model.py:12 (step)", False),
        ((), "no line of Python", False),
    ],
)
def test_the_line_of_the_program_is_found_and_whether_it_waits_there(
    monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...], place: str, waits: bool
) -> None:
    own = ("loop.py", "model.py")
    paths = [call if call in own else f"{TORCH}/{call}" for call in calls]
    monkeypatch.setattr(sys, "_current_frames", lambda: {7: stack(*paths)})
    assert find_place(7) == (place, waits)


def test_a_rank_that_waits_for_another_is_seen_to_wait() -> None:
    threads: dict[int, int] = {}

    def rank(world: World) -> tuple[str, bool]:
        threads[world.rank] = threading.get_ident()
        world.barrier(doing="starting")
        found, limit = ("", False), time.monotonic() + 60
        # Until the other has come to where it waits for this rank.
        while world.rank == 0 and not found[1] and time.monotonic() < limit:
            found = find_place(threads[1])
        world.barrier(doing="looking")
        return found

    place, waits = run_threads(thread_worlds((2,), timeout_s=120), rank)[0]
    assert waits
    assert "dataio/world/" in place


def test_a_job_of_one_rank_is_not_watched_and_costs_nothing() -> None:
    threads = threading.active_count()
    with join(device="cpu", timeout_s=0.01) as job:
        job.watchdog.progress(1)
        assert threading.active_count() == threads
        assert job.watchdog.processes() == []
