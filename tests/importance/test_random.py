"""RandomPrune hides an exact number of random rows, and the weighted sum stays the full sum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.policies import Selection
from importance import RandomPrune
from tests.importance.rows import one_pool, reported, scattered, select_in_pools

NUM_EPOCHS = 80

FRACTIONS = st.floats(0, 1, exclude_max=True)
SIZES = st.integers(1, 200)
SEEDS = st.integers(0, 2**32)


def select(policy: RandomPrune, num_slots: int, *, epoch: int = 0, seed: int = 0) -> Selection:
    rows = one_pool(reported(np.zeros(num_slots)), seed=seed)
    return policy.select(rows, epoch=epoch, num_epochs=NUM_EPOCHS)


@given(FRACTIONS, SIZES, SEEDS)
def test_hidden_slots_are_distinct_and_owned(fraction: float, num_slots: int, seed: int) -> None:
    hidden = select(RandomPrune(fraction), num_slots, seed=seed).hidden
    visible = np.setdiff1d(np.arange(num_slots), hidden)
    assert hidden.dtype == np.int64
    assert sorted([*hidden, *visible]) == list(range(num_slots))


@given(st.integers(0, 15), SIZES, SEEDS)
def test_exactly_the_fraction_is_hidden(sixteenths: int, num_slots: int, seed: int) -> None:
    selection = select(RandomPrune(sixteenths / 16), num_slots, seed=seed)
    assert len(selection.hidden) == sixteenths * num_slots // 16


@given(st.integers(0, 15), SIZES, st.integers(1, 4), st.integers(0, 99))
def test_exactly_the_fraction_of_all_pools_is_hidden(
    sixteenths: int, num_samples: int, num_pools: int, seed: int
) -> None:
    scores, pools = reported(np.zeros(num_samples)), scattered(num_samples, num_pools, seed=seed)
    policy = RandomPrune(sixteenths / 16, delta=1.0)
    chosen = select_in_pools(policy, scores, pools, epoch=0, num_epochs=None, seed=seed)
    assert sum(len(selection.hidden) for selection in chosen) == sixteenths * num_samples // 16


@given(FRACTIONS, SIZES, SEEDS)
def test_visible_weights_sum_to_the_number_of_rows(
    fraction: float, num_slots: int, seed: int
) -> None:
    selection = select(RandomPrune(fraction), num_slots, seed=seed)
    weights = np.ones(num_slots, np.float32) if selection.weights is None else selection.weights
    assert weights.dtype == np.float32
    visible = np.delete(weights.astype(np.float64), selection.hidden)
    assert visible.sum() == pytest.approx(num_slots, rel=1e-6)


def test_weighted_sum_is_the_full_sum_in_expectation() -> None:
    values = np.random.default_rng(1).lognormal(size=37)
    sums = []
    for seed in range(2000):
        selection = select(RandomPrune(0.45), len(values), seed=seed)
        assert selection.weights is not None
        sums.append(np.delete(values * selection.weights, selection.hidden).sum())
    standard_error = np.std(sums, ddof=1) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - values.sum()) < 3 * standard_error


def test_every_row_is_hidden_equally_often() -> None:
    hidden = [select(RandomPrune(0.3), 20, seed=seed).hidden for seed in range(2000)]
    frequency = np.bincount(np.concatenate(hidden), minlength=20) / len(hidden)
    # Five standard errors of a share of 0.3 in 2000 draws.
    assert np.abs(frequency - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / 2000)


@given(FRACTIONS, SIZES, SEEDS)
def test_same_seed_gives_the_same_selection(fraction: float, num_slots: int, seed: int) -> None:
    first, second = (select(RandomPrune(fraction), num_slots, seed=seed) for _ in range(2))
    assert first.hidden.tolist() == second.hidden.tolist()


def test_another_seed_hides_other_rows() -> None:
    first, second = (set(select(RandomPrune(), 1000, seed=seed).hidden) for seed in (0, 1))
    assert first != second


def test_the_end_of_the_run_is_full_data() -> None:
    counts = [len(select(RandomPrune(0.5), 10, epoch=epoch).hidden) for epoch in range(NUM_EPOCHS)]
    assert counts == [5] * 70 + [0] * 10
    assert select(RandomPrune(0.5), 10, epoch=70).weights is None


def test_short_steps_are_padded_and_the_learning_rate_stays() -> None:
    selection = select(RandomPrune(), 10)
    assert not selection.top_up
    assert selection.lr_factor == 1.0


def test_no_hidden_row_needs_a_new_score() -> None:
    hidden = select(RandomPrune(), 10).hidden
    assert RandomPrune().columns == ()
    assert [len(RandomPrune().due(hidden, epoch=epoch)) for epoch in range(4)] == [0] * 4


def test_a_run_of_unknown_length_cannot_be_annealed() -> None:
    rows = one_pool(reported(np.zeros(10)))
    with pytest.raises(ValueError, match=r"loader\.epochs\(n\)`, or use RandomPrune\(delta=1\.0\)"):
        RandomPrune().select(rows, epoch=0, num_epochs=None)
    selection = RandomPrune(delta=1.0).select(rows, epoch=0, num_epochs=None)
    assert len(selection.hidden) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.0}, r"fraction is 1.0, expected a number in \[0, 1\); 0.3 stands"),
        ({"fraction": -0.1}, "fraction is -0.1, expected"),
        ({"delta": 1.1}, r"delta is 1.1, expected a number in \[0, 1\]; 0.3 stands"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"RandomPrune: {message}"):
        RandomPrune(**settings)
