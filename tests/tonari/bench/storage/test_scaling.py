import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonari.bench.storage.results.results import Phase, Repeat
from tonari.bench.storage.results.scaling import fit, jain, knee, scale
from tonari.bench.storage.site.counters import Moved
from tonari.bench.storage.site.evidence import CacheVerdict

COLD = CacheVerdict("cold", "so it was")


def phase(clients: int, threads: int, bytes_of_client: list[int], seconds: float = 1.0) -> Phase:
    repeat = Repeat(
        seconds=seconds, bytes_of_client=bytes_of_client, verdict=COLD, verdict_of_node={},
        seconds_of_client=[seconds] * len(bytes_of_client), moved=Moved(),
    )  # fmt: skip
    return Phase(
        pattern="random_record", tier="shared", clients=clients, nodes=1, threads=threads,
        wanted="cold", request_bytes=4096, direct=False, repeats=[repeat], operations=[],
    )  # fmt: skip


@given(st.floats(1e6, 1e10), st.floats(0.01, 50))
def test_a_curve_that_saturates_is_found_again(most, half):
    readers = [1, 2, 4, 8, 16]
    curve = fit(readers, [most * n / (n + half) for n in readers])
    assert curve is not None
    assert curve.most == pytest.approx(most, rel=1e-3)
    assert curve.half == pytest.approx(half, rel=1e-2, abs=1e-3)
    assert curve.error_fraction < 1e-6


def test_growth_without_an_end_has_no_curve():
    assert fit([1, 2, 4, 8], [1e6, 2.1e6, 4.6e6, 11e6]) is None


def test_two_points_have_no_curve_as_any_would_fit():
    assert fit([1, 2], [1e6, 1.5e6]) is None


def test_bandwidth_that_falls_is_called_flat_with_its_error():
    curve = fit([1, 2, 4, 8], [4e6, 3e6, 2e6, 1e6])
    assert curve is not None
    assert curve.half == 0.0
    assert curve.error_fraction > 0.2


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=20))
def test_fairness_lies_between_one_nth_and_one(rates):
    assert 1 / len(rates) - 1e-9 <= jain(rates) <= 1 + 1e-9


def test_fairness_of_equal_rates_is_one_and_of_one_who_has_all_one_nth():
    assert jain([5e6] * 7) == pytest.approx(1)
    assert jain([0, 0, 0, 8e6]) == pytest.approx(0.25)


def test_the_knee_is_the_fewest_readers_near_the_most():
    assert knee([1, 2, 4, 8], [10, 45, 46, 50]) == 2
    assert knee([1, 2, 4, 8], [10, 20, 40, 80]) == 8


def test_of_two_ways_to_as_many_readers_the_faster_stands():
    found = scale([phase(1, 4, [400]), phase(4, 1, [50, 50, 50, 250]), phase(1, 1, [200])])
    assert found is not None
    assert (found.readers, found.bytes_per_s) == ([1, 4], [200, 400])
    assert found.fairness == [1, pytest.approx(1)]
    assert found.fitted_most_bytes_per_s is None


def test_what_moves_no_data_has_no_scaling():
    assert scale([phase(1, 1, [0])]) is None
