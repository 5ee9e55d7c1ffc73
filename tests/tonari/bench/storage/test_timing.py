import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonari.bench.storage.results.timing import summarise

durations = st.lists(st.floats(1e-6, 100.0), min_size=1, max_size=300)


@given(durations)
def test_so_many_operations_took_at_most_as_long_as_a_percentile_says(seconds):
    found = summarise("read", [np.array(seconds)])
    for limit_s, share in (
        (found.p50_s, 0.5), (found.p90_s, 0.9), (found.p99_s, 0.99), (found.p999_s, 0.999),
    ):  # fmt: skip
        within = sum(value <= limit_s for value in seconds)
        assert within >= share * len(seconds) - 1e-6
        assert limit_s in seconds, "a duration that was measured"
    assert found.max_s == max(seconds)


@given(durations)
def test_the_histogram_counts_every_operation_between_its_edges(seconds):
    found = summarise("read", [np.array(seconds)])
    assert sum(found.counts) == found.count == len(seconds)
    assert len(found.edges_s) == len(found.counts) + 1
    assert min(found.counts[0], found.counts[-1]) > 0, "no empty ends"
    assert found.edges_s[0] <= min(seconds) * (1 + 1e-9)
    assert found.edges_s[-1] >= max(seconds) * (1 - 1e-9)


def test_one_slow_operation_in_a_thousand_shows_in_the_maximum_alone():
    seconds = np.full(1000, 1e-3)
    seconds[17] = 2.0
    found = summarise("read", [seconds])
    assert (found.p50_s, found.p999_s, found.max_s) == (1e-3, 1e-3, 2.0)
    assert found.mean_s == pytest.approx(0.002999)


def test_durations_beyond_the_bins_are_counted_in_the_last_ones():
    found = summarise("list", [np.array([1e-9, 5000.0])])
    assert (found.counts[0], found.counts[-1]) == (1, 1)


def test_each_repeat_has_its_own_median():
    found = summarise("open", [np.array([1.0, 2.0, 9.0]), np.array([]), np.array([4.0])])
    assert found.p50_of_repeat_s == [2.0, 4.0]
    assert (found.count, found.p50_s) == (4, 2.0)
