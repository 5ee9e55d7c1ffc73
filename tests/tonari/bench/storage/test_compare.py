"""A planted regression is found, noise is not one, and what cannot be compared is not."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.tonari.bench.storage.fabricated import make_results
from tonari.bench.storage.results.compare import compare, figures_of
from tonari.bench.storage.results.noise import significant, worse_by_chance
from tonari.bench.storage.site.evidence import CacheVerdict
from tonari.report.student import tail_of_t

SEEDS = range(200)


def judged(before, after, tolerance_fraction=0.05):
    return compare(before, after, tolerance_fraction=tolerance_fraction)


@functools.cache
def small(seed, *, noise=0.03, repeats=5, slower=0.0):
    """A run of which random records may be slower than usual."""
    speed = {"random_record": 1 - slower}
    return make_results(seed, noise=noise, repeats=repeats, speed=speed, clients=(1, 4))


def test_noise_alone_fails_fewer_than_one_comparison_in_a_hundred():
    # Each compares some thirty figures.
    failed = sum(judged(small(2 * seed), small(2 * seed + 1)).status for seed in SEEDS)
    assert failed < 0.01 * len(SEEDS)


def test_noise_is_no_regression_with_few_repeats_either():
    pairs = [(small(2 * seed, repeats=3), small(2 * seed + 1, repeats=3)) for seed in SEEDS]
    assert sum(judged(*pair).status for pair in pairs) <= 0.01 * len(SEEDS)


def test_a_pattern_that_is_ten_percent_slower_is_found_nine_times_in_ten():
    missed = 0
    for seed in SEEDS:
        slow = small(2 * seed + 1, slower=0.1)
        missed += not [
            one for one in judged(small(2 * seed), slow).regressions if "random_record" in one.name
        ]
    assert missed < 0.1 * len(SEEDS)


def test_one_slow_figure_among_others_is_found_nine_times_in_ten():
    found = 0
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        before, after = np.exp(0.03 * rng.standard_normal((2, 8, 5)))
        after[3] *= 0.9
        found += significant(worse_by_chance(before.tolist(), after.tolist()))[3]
    assert found > 0.9 * len(SEEDS)


def test_a_metadata_server_that_became_slower_is_found():
    found = 0
    for seed in range(50):
        run = small(2 * seed + 1)
        storm = run.phases[-1]
        stat, *others = storm.operations
        slow = replace(stat, p50_of_repeat_s=[1.2 * one for one in stat.p50_of_repeat_s])
        later = replace(
            run, phases=[*run.phases[:-1], replace(storm, operations=[slow, *others])]
        )  # fmt: skip
        names = [one.name for one in judged(small(2 * seed), later).regressions]
        found += any(name.startswith("metadata_storm") and "stat p50" in name for name in names)
        assert len(names) <= 2
    assert found >= 45


def test_what_the_client_answers_by_itself_is_not_compared():
    run = small(1)
    figures = {
        one.name: len(one.repeats) for one in figures_of(run) if "file_per_sample" in one.name
    }
    assert {name.rpartition(", ")[2]: count for name, count in figures.items()} == {
        "bandwidth": 5, "open rate": 1, "open p50": 5, "open p99": 1, "stat rate": 1,
        "stat p50": 5, "stat p99": 1, "read rate": 1, "read p50": 1, "read p99": 1,
        "close rate": 1, "close p50": 1, "close p99": 1,
    }  # fmt: skip


def test_medians_of_few_operations_are_not_compared():
    run = small(1)
    few = [replace(one, count=149) for one in run.phases[-1].operations]  # of five repeats
    run = replace(run, phases=[*run.phases[:-1], replace(run.phases[-1], operations=few)])
    counts = {len(one.repeats) for one in figures_of(run) if "metadata_storm" in one.name}
    assert counts == {1}


def test_what_became_faster_is_an_improvement_and_no_regression():
    found = judged(small(1), small(2, slower=-0.3))
    assert found.status == 0
    rose = [change for change in found.changes if change.outcome == "improvement"]
    assert rose
    assert all("random_record" in change.name for change in rose)


def test_a_time_that_grows_is_a_regression_and_one_that_falls_is_none():
    run = small(1)
    slower = replace(run.end_to_end, ways=[
        replace(way, epoch_s=[1.2 * one for one in way.epoch_s]) for way in run.end_to_end.ways
    ])  # fmt: skip
    later = replace(run, end_to_end=slower)
    assert {one.name for one in judged(run, later).regressions} == {
        f"{name}, later epochs" for name in ("null", "dataloader", "staged", "exchange", "hiding")
    }
    assert judged(later, run).status == 0


def test_a_change_within_the_tolerance_is_the_same_however_sure_it_is():
    before = small(1, noise=1e-4)
    after = small(2, noise=1e-4, slower=0.04)
    assert judged(before, after).status == 0
    assert judged(before, after, 0.03).status == 1


def test_a_run_equals_itself():
    found = judged(small(3), small(3))
    assert found.status == 0
    assert {change.outcome for change in found.changes} == {"same", "too few repeats"}


def test_latencies_over_all_repeats_are_shown_and_not_judged():
    changes = judged(small(1), small(2)).changes
    latencies = [change for change in changes if change.name.endswith("p99")]
    assert latencies
    assert all(change.outcome == "too few repeats" for change in latencies)


def warmed(run, phase=0):
    """A run in which a phase that was cold was warm."""
    warm = [
        replace(one, verdict=CacheVerdict("warm", "it was")) for one in run.phases[phase].repeats
    ]
    phases = [*run.phases]
    phases[phase] = replace(phases[phase], repeats=warm)
    return replace(run, phases=phases)


def resized(run):
    return replace(run, end_to_end=replace(run.end_to_end, batch_size=128))


INCOMPARABLE = {
    "another number of clients": (
        lambda run: make_results(2, clients=(1, 8)),
        "only the first run has sequential_shard shared cold by 1048576, 4 clients on 4",
    ),
    "fewer patterns": (
        lambda run: replace(run, phases=run.phases[:-1]),
        "only the first run has metadata_storm",
    ),
    "more patterns": (
        lambda run: replace(
            run, phases=[*run.phases, replace(run.phases[0], pattern="strided")]
        ),
        "only the second run has strided",
    ),
    "warm for cold": (warmed, "1 client on 1 x 2 threads was cold in the first run and warm in"),
    "another batch": (resized, "batch_size of the end-to-end runs is 64 and 128"),
}  # fmt: skip


@pytest.mark.parametrize("name", INCOMPARABLE)
def test_runs_of_something_else_are_not_compared(name):
    change, message = INCOMPARABLE[name]
    found = judged(small(1), change(small(2)))
    assert found.status == 2
    assert any(message in difference for difference in found.differences)


def test_runs_without_repeats_cannot_be_judged():
    bare = replace(small(1, repeats=2), end_to_end=None, links=())
    found = judged(bare, bare)
    assert (found.status, *found.differences) == (2, "no figure has 3 repeats in both runs")


def test_links_are_matched_by_place_because_other_nodes_may_run():
    run = small(1)
    renamed = [replace(link, nodes=tuple(f"x-{node}" for node in link.nodes)) for link in run.links]
    assert judged(run, replace(run, links=renamed)).status == 0


def test_another_filesystem_and_a_run_cut_short_are_noted():
    after = replace(small(2), site=small(2).local)
    notes = " ".join(judged(small(1), after).notes)
    assert "DIR lies on lustre in the first run and on xfs in the second" in notes
    assert "the second run is not complete: metadata storm" in notes


def test_figures_have_names_of_their_own():
    names = [figure.name for figure in figures_of(make_results())]
    assert len(names) == len(set(names))


def test_tails_of_students_t_are_those_of_the_tables():
    for degrees, t in ((1, 12.7062), (2, 4.3027), (5, 2.5706), (8, 2.3060), (30, 2.0423)):
        assert tail_of_t(t, degrees) == pytest.approx(0.025, rel=1e-4)
    assert tail_of_t(3.3554, 8) == pytest.approx(0.005, rel=1e-3)


@given(st.floats(-50, 50), st.integers(1, 80))
def test_tails_on_both_sides_are_one(t, degrees):
    assert math.isclose(tail_of_t(t, degrees) + tail_of_t(-t, degrees), 1, abs_tol=1e-12)


def test_repeats_that_are_all_equal_are_told_apart():
    assert worse_by_chance([[2.0] * 3], [[1.0] * 3]) == [0.0]
    assert worse_by_chance([[2.0] * 3], [[2.0] * 3]) == [1.0]
