"""Who is silent, late or to blame, by made-up heartbeats and times."""

from dataclasses import replace

from dataio.job.judge import Heartbeat, Unchanged, find_culprits, is_late

HEARTBEAT = Heartbeat(5, "here", 1, step=7, waits=True, place="all_reduce")


def looks(
    *second: Heartbeat, silent: tuple[int, ...] = ()
) -> tuple[list[Heartbeat], list[Heartbeat]]:
    first = [
        heartbeat if rank in silent else replace(heartbeat, count=heartbeat.count - 3)
        for rank, heartbeat in enumerate(second)
    ]
    return first, [*second]


def test_the_dead_are_to_blame_before_those_that_wait_or_hang() -> None:
    hung = replace(HEARTBEAT, waits=False)
    found, silent = find_culprits(*looks(hung, HEARTBEAT, HEARTBEAT, silent=(2,)), own=1)
    assert list(found) == [2]
    assert found[2].startswith("is silent after 7 steps: its process was killed")
    assert silent == [HEARTBEAT]


def test_the_failed_are_to_blame_before_the_dead_whom_a_launcher_may_have_ended() -> None:
    failed = replace(HEARTBEAT, failure="ValueError: no")
    found, silent = find_culprits(
        *looks(HEARTBEAT, HEARTBEAT, failed, HEARTBEAT, silent=(2, 3)), own=1
    )
    assert found == {2: "failed: ValueError: no", 3: "has ended too, after 7 steps"}
    assert silent == [HEARTBEAT]


def test_of_those_that_are_behind_the_one_that_does_not_wait_hangs() -> None:
    ahead = replace(HEARTBEAT, step=8, waits=False)
    hung = replace(HEARTBEAT, waits=False, place="loop.py:3 (spin)")
    found, silent = find_culprits(*looks(ahead, HEARTBEAT, hung), own=0)
    assert list(found) == [2]
    assert "hangs after 7 steps in loop.py:3 (spin)" in found[2]
    assert not silent


def test_if_all_that_are_behind_wait_they_are_all_named() -> None:
    assert list(
        find_culprits(*looks(HEARTBEAT, replace(HEARTBEAT, step=8), HEARTBEAT), own=1)[0]
    ) == [0, 2]


def test_of_the_silent_the_one_that_was_seen_to_end_first_is_to_blame() -> None:
    found, silent = find_culprits(
        *looks(HEARTBEAT, HEARTBEAT, HEARTBEAT, silent=(0, 2)), own=1, first_lost=2
    )
    assert found[0] == "has ended too, after 7 steps"
    assert found[2].startswith("is silent after 7 steps")
    assert len(silent) == 2


def test_who_judges_and_who_has_left_is_not_to_blame() -> None:
    left = replace(HEARTBEAT, left=True, step=1, waits=False)
    assert list(find_culprits(*looks(HEARTBEAT, left, HEARTBEAT, silent=(0, 1)), own=0)[0]) == [
        0,
        2,
    ]


def test_a_number_that_stays_the_same_for_the_limit_is_too_long_the_same() -> None:
    unchanged = Unchanged(interval_s=2.0, limit_s=6.0)
    # The first interval shows the number for the first time.
    assert [unchanged.is_too_long(7, may_rest=False) for _ in range(4)] == [False] * 3 + [True]


def test_a_number_that_changes_or_may_rest_begins_a_new_count() -> None:
    unchanged = Unchanged(interval_s=1.0, limit_s=2.0)
    numbers = [(1, False), (1, False), (2, False), (2, False), (2, True), (2, False), (2, False)]
    found = [unchanged.is_too_long(number, may_rest=rest) for number, rest in numbers]
    assert found == [False] * 6 + [True]


def test_a_step_is_late_only_after_its_limit_and_only_where_one_is_expected() -> None:
    assert not is_late(since=None, now=1e9, timeout_s=1.0)
    assert not is_late(since=5.0, now=15.0, timeout_s=10.0)
    assert is_late(since=5.0, now=15.5, timeout_s=10.0)
