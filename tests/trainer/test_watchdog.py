"""Who is to blame, by what each rank says of itself; and the job of one rank, which needs none."""

import threading
from dataclasses import replace

import pytest

from trainer.launch import join
from trainer.watchdog import Beat, find_place, is_of_a_peer, judge, role

BEAT = Beat(5, "here", 1, step=7, waits=True, place="all_reduce")


def looks(*second: Beat, silent: tuple[int, ...] = ()) -> tuple[list[Beat], list[Beat]]:
    first = [
        beat if rank in silent else replace(beat, count=beat.count - 3)
        for rank, beat in enumerate(second)
    ]
    return first, [*second]


def test_the_dead_and_the_failed_are_to_blame_before_those_that_wait_or_hang() -> None:
    failed = replace(BEAT, words="ValueError: no")
    hung = replace(BEAT, waits=False)
    found, silent = judge(*looks(hung, BEAT, failed, BEAT, silent=(2, 3)), own=1)
    assert list(found) == [2, 3]
    assert found[2] == "failed: ValueError: no"
    assert found[3].startswith("is silent after 7 steps")
    assert silent == [BEAT]


def test_of_those_that_are_behind_the_one_that_does_not_wait_hangs() -> None:
    ahead = replace(BEAT, step=8, waits=False)
    hung = replace(BEAT, waits=False, place="loop.py:3 (spin)")
    found, silent = judge(*looks(ahead, BEAT, hung), own=0)
    assert list(found) == [2]
    assert "hangs after 7 steps in loop.py:3 (spin)" in found[2]
    assert not silent


def test_if_all_that_are_behind_wait_they_are_all_named() -> None:
    assert list(judge(*looks(BEAT, replace(BEAT, step=8), BEAT), own=1)[0]) == [0, 2]


def test_who_judges_and_who_has_left_is_not_to_blame() -> None:
    left = replace(BEAT, left=True, step=1, waits=False)
    assert list(judge(*looks(BEAT, left, BEAT, silent=(0, 1)), own=0)[0]) == [0, 2]


def test_a_rank_is_named_by_the_axes_that_have_several() -> None:
    assert role(5, (2, 1, 2, 1, 2)) == "pp 1, dp_shard 0, tp 1"


@pytest.mark.parametrize(
    ("words", "expected"),
    [("[gloo] Connection closed by peer [127.0.0.1]:1", True), ("mat1 and mat2 shapes", False)],
)
def test_an_error_that_a_peer_caused_is_known(words: str, expected: bool) -> None:
    assert is_of_a_peer(RuntimeError(words)) == expected


def test_the_line_of_the_program_is_found() -> None:
    place, waits = find_place(threading.get_ident())
    assert place.startswith(__file__) or "watchdog.py" in place
    assert not waits


def test_a_job_of_one_rank_is_not_watched_and_costs_nothing() -> None:
    threads = threading.active_count()
    with join(device="cpu", timeout_s=0.01) as job:
        job.watchdog.progress(1)
        assert threading.active_count() == threads
        assert job.watchdog.processes() == []
