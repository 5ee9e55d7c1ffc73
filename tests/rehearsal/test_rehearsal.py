"""Whole jobs under one scheduler: ended anywhere, started again, and right to the last row."""

import functools

import pytest

from tests.faults.samples import Job
from tests.rehearsal.__main__ import attempt, shortest, warm_up
from tests.rehearsal.planted import PLANTED, planted
from tests.rehearsal.planted_live import LIVE_PLANTED
from tests.rehearsal.schedules import (
    FATAL,
    GROWS,
    HARMLESS,
    LIVE,
    Fault,
    Planned,
    Schedule,
    draw_live,
    draw_schedule,
)

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

IN_CI = (22, 54, 59, 65, 16, 275, 50, 9424)
SEEDS = [
    *IN_CI,
    *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(100) if seed not in IN_CI),
]
LIVE_IN_CI = (0, 9, 11, 3014, 3327, 3438)
LIVE_SEEDS = [
    *LIVE_IN_CI,
    *(pytest.param(seed, marks=pytest.mark.nightly)
      for seed in range(200) if seed not in LIVE_IN_CI),
]  # fmt: skip
TRIED = 400
"""Seeds within which a planted bug is to be found."""


@functools.cache
def rehearsed(seed: int) -> str:
    return attempt(draw_schedule(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_is_ended_anywhere_goes_on_with_the_same_rows(seed):
    found = rehearsed(seed)
    assert not found.startswith("!"), f"{draw_schedule(seed)}\n{found}"


def test_each_kind_of_fault_happens():
    happened = {how for seed in IN_CI for how in rehearsed(seed).partition(";")[0].split()[2:]}
    assert happened == {*FATAL, *HARMLESS, GROWS}


@pytest.mark.parametrize(("seed", "nodes"), [(0, (1, 1)), (11, (1, 1, 1))])
def test_two_jobs_that_begin_together_do_not_wait_for_each_other_s_caches(seed, nodes):
    planned = Planned(nodes, (Fault(2, "second"),))
    found = attempt(Schedule(seed, Job(nodes, "fixed", epochs=1, options={}), (planned,)))
    assert not found.startswith("!"), found


@functools.cache
def rehearsed_live(seed: int) -> str:
    return attempt(draw_live(seed))


@pytest.mark.parametrize("seed", LIVE_SEEDS)
def test_a_job_that_loses_ranks_anywhere_trains_on_with_each_sample_once(seed):
    found = rehearsed_live(seed)
    assert not found.startswith("!"), f"{draw_live(seed)}\n{found}"


@pytest.mark.nightly
def test_each_kind_of_fault_happens_to_jobs_under_live():
    happened = " ".join(rehearsed_live(seed).partition(";")[0] for seed in range(100))
    assert {*LIVE} <= {*happened.split()}


@pytest.mark.parametrize(("draw", "known", "seed"), [
    (draw_schedule, rehearsed, 16), (draw_live, rehearsed_live, 11),
    pytest.param(draw_schedule, rehearsed, 13, marks=pytest.mark.nightly),
])  # fmt: skip
def test_the_same_seed_is_the_same_course_of_events(draw, known, seed):
    first = known(seed)
    assert not first.startswith("!"), first
    assert attempt(draw(seed)) == first


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*PLANTED, *LIVE_PLANTED])
def test_a_planted_bug_is_found(name):
    warm_up()
    draw = draw_live if name in LIVE_PLANTED else draw_schedule
    with planted(name):
        found = next((seed for seed in range(TRIED) if attempt(draw(seed)).startswith("!")), None)
    print(f"{name}: found by seed {found}")
    assert found is not None


@pytest.mark.nightly
def test_what_fails_is_shortened_to_what_it_fails_by():
    schedule = draw_schedule(16)
    with planted("what killed jobs left is not removed"):
        found = attempt(schedule)
        assert found.startswith("!AssertionError")
        short = shortest(schedule, found)
    assert isinstance(short, Schedule)
    assert (len(short.starts), short.job.epochs, short.job.options) == (1, 1, {}), short
