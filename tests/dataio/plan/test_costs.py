"""What rows cost: by what all ranks spent together, and the same for all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.costs import CostRates, SpentCosts, find_rates, price_rows

SPENT = SpentCosts(
    source_s=4.0, source_bytes=40_000_000, batch_s=1.0, batch_bytes=100_000_000, step_s=0.032,
    window_wait_s=3.0, total_s=4.0,
)  # fmt: skip
RATES = CostRates(0.1, 0.01, 0.001, 0.25)


def rates_of(*spent: SpentCosts, before: dict[str, float] | None = None) -> CostRates:
    total = np.sum([each.to_array() for each in spent], axis=0)
    return find_rates(total, batch_size=32, before=before or {})


def test_rates_are_what_was_spent_by_what_it_was_spent_on() -> None:
    found = rates_of(SPENT)
    # Rounded to a quarter of a doubling
    assert found.source_s_per_mb == pytest.approx(0.1, rel=0.1)
    assert found.batch_s_per_mb == pytest.approx(0.01, rel=0.1)
    assert found.step_s_per_row == pytest.approx(0.001, rel=0.1)
    assert found.exposed_fraction == pytest.approx(0.25, rel=0.1)


@given(st.integers(1, 8))
def test_ranks_that_spend_alike_have_the_rates_of_one(num_ranks: int) -> None:
    assert rates_of(*[SPENT] * num_ranks) == rates_of(SPENT)


def test_a_difference_of_a_percent_changes_no_rate() -> None:
    slower = SpentCosts(4.04, 40_000_000, 1.01, 100_000_000, 0.03232, 3.0, 4.0)
    assert rates_of(slower) == rates_of(SPENT)


def test_what_was_not_measured_is_as_before() -> None:
    idle = SpentCosts(0.0, 0, 0.0, 0, 0.0, 0.0, 0.0)
    assert rates_of(idle) == CostRates()
    assert rates_of(idle, before=RATES.to_figures()) == RATES
    assert rates_of(SPENT, before=RATES.to_figures()) == rates_of(SPENT)


def test_a_missing_row_costs_its_bytes_from_the_source_above_one_that_stays() -> None:
    num_bytes, is_missing = np.array([10**6] * 2 + [2 * 10**6]), np.array([False, True, True])
    cached, missing, large = price_rows(num_bytes, is_missing, rates=RATES, mean_bytes=1).tolist()
    assert cached == pytest.approx(0.25 * (0.001 + 0.01))
    assert missing - cached == pytest.approx(0.1)
    assert large == pytest.approx(0.2 + 0.25 * (0.001 + 0.02))


def test_a_row_of_unknown_size_costs_as_one_of_mean_size() -> None:
    unknown, known = price_rows(
        np.array([0, 5000]), np.array([True, True]), rates=RATES, mean_bytes=5000
    )
    assert unknown == known


def test_before_anything_was_measured_all_rows_cost_alike() -> None:
    cost_s = price_rows(
        np.array([0, 9, 10**9]), np.array([True, False, True]), rates=CostRates(), mean_bytes=9
    )
    assert cost_s.tolist() == [1.0] * 3
    assert cost_s.dtype == np.float32
