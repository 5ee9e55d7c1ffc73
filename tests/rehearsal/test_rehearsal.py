"""Whole jobs under one scheduler: ended anywhere, started again, and right to the last row."""

import pytest

from tests.rehearsal.__main__ import attempt
from tests.rehearsal.planted import PLANTED, planted
from tests.rehearsal.rehearsal import draw_schedule

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

SEEDS = [
    *range(6),
    *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(6, 100)),
]
TRIED = 60
"""Seeds within which a planted bug is to be found."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_is_ended_anywhere_goes_on_with_the_same_rows(seed):
    schedule = draw_schedule(seed)
    found = attempt(schedule)
    assert not found.startswith("!"), f"{schedule}\n{found}"


@pytest.mark.parametrize("seed", [3])
def test_the_same_seed_is_the_same_course_of_events(seed):
    schedule = draw_schedule(seed)
    first = attempt(schedule)
    assert not first.startswith("!"), first
    assert attempt(schedule) == first


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name):
    with planted(name):
        found = next(
            (seed for seed in range(TRIED) if attempt(draw_schedule(seed)).startswith("!")), None
        )
    print(f"{name}: found by seed {found}")
    assert found is not None
