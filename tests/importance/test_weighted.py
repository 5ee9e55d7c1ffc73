"""Weighted lets rows come floor or ceil of what is expected, their total is exact, on any pools."""

import functools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch.utils.data import WeightedRandomSampler

from dataio.plan.policies import Selection
from importance import Weighted
from importance.weighted import systematic
from tests.importance.rows import one_pool, reported, scattered, select_in_pools

WEIGHTS = st.lists(st.sampled_from([0.0, 1e-9, 0.1, 1.0, 1.0, 3.0, 1e6]), min_size=1, max_size=90)
NUM_EPOCHS = 400


def select(policy: Weighted, num_samples: int, *, epoch: int = 0, seed: int = 0) -> Selection:
    rows = one_pool(reported(np.zeros(num_samples)), seed=seed, epoch=epoch)
    return policy.select(rows, epoch=epoch, num_epochs=None)


def counts_of(policy: Weighted, num_samples: int, *, seed: int = 0) -> NDArray[np.int64]:
    counts = select(policy, num_samples, seed=seed).counts
    assert counts is not None
    return counts


@given(WEIGHTS.filter(any), st.integers(1, 400), st.floats(0, 1, exclude_max=True))
def test_counts_are_floor_or_ceil_and_their_sum_is_exact(
    weights: list[float], count: int, start: float
) -> None:
    line = np.array(weights)
    counts = systematic(line, count, start)
    expected = count * line / line.sum()
    assert counts.sum() == count
    assert (np.abs(counts - expected) < 1 + 1e-6).all()
    assert not counts[line == 0].any()


@given(WEIGHTS.filter(any), st.integers(1, 200), st.integers(1, 4), st.integers(0, 99))
def test_any_pools_draw_what_one_pool_draws(
    weights: list[float], count: int, num_pools: int, seed: int
) -> None:
    policy, scores = Weighted(weights, num_samples=count), reported(np.zeros(len(weights)))
    whole = counts_of(policy, len(weights), seed=seed)
    pools = scattered(len(weights), num_pools, seed=seed)
    chosen = select_in_pools(policy, scores, pools, epoch=0, num_epochs=None, seed=seed)
    for pool, selection in zip(pools, chosen, strict=True):
        assert selection.counts is not None
        assert selection.counts.tolist() == whole[pool].tolist()
        assert selection.hidden.tolist() == np.flatnonzero(selection.counts == 0).tolist()
        assert selection.weights is None


def test_each_row_comes_as_often_as_expected_on_average() -> None:
    weights = np.random.default_rng(1).lognormal(sigma=1.5, size=37)
    counts = np.stack([counts_of(Weighted(weights), 37, seed=seed) for seed in range(NUM_EPOCHS)])
    expected = 37 * weights / weights.sum()
    share = expected % 1
    # Floor or ceil: a Bernoulli draw of the fraction
    errors = np.sqrt(share * (1 - share) / NUM_EPOCHS)
    assert (np.abs(counts.mean(axis=0) - expected) < 5 * errors).all()
    assert (counts.sum(axis=1) == 37).all()


def test_the_first_mark_stands_anywhere() -> None:
    """Or of two rows the one of higher weight would always come."""
    drawn = [counts_of(Weighted([0.3, 0.7], num_samples=1), 2, seed=seed) for seed in range(2000)]
    assert abs(np.mean(drawn, axis=0)[0] - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 2000)


def test_rows_are_drawn_as_if_alone() -> None:
    """No pair always comes together: in random order, unlike in a fixed one."""
    drawn = [counts_of(Weighted(num_samples=10), 20, seed=seed) for seed in range(2000)]
    together = np.mean([counts[3] * counts[4] for counts in drawn])
    apart = np.mean([counts[3] * counts[17] for counts in drawn])
    # Of 10 of 20 without replacement: 10 / 20 * 9 / 19
    error = np.sqrt(0.237 * 0.763 / 2000)
    assert abs(together - 9 / 38) < 5 * error
    assert abs(apart - 9 / 38) < 5 * error


def test_its_draws_have_the_distribution_of_torchs_sampler() -> None:
    weights = np.array([0.5, 1, 1, 2, 4, 0.1, 3, 0.4])
    torch.manual_seed(0)
    sampler = WeightedRandomSampler(weights.tolist(), 8 * NUM_EPOCHS)
    theirs = np.bincount(list(sampler), minlength=8)
    ours = sum(counts_of(Weighted(weights), 8, seed=seed) for seed in range(NUM_EPOCHS))
    expected = 8 * NUM_EPOCHS * weights / weights.sum()
    assert stats.chisquare(theirs, expected).pvalue > 0.001
    assert stats.chisquare(ours, expected).pvalue > 0.001
    assert stats.chi2_contingency(np.stack([ours, theirs])).pvalue > 0.001
    # The same means, and less noise
    assert np.square(ours - expected).sum() < np.square(theirs - expected).sum()


def test_weights_of_at_most_one_draw_without_replacement() -> None:
    counts = counts_of(Weighted([1.0, 2.0] * 30, num_samples=45), 60)
    assert counts.max() == 1
    assert counts[1::2].all(), "those of weight 2 are expected exactly once"


@pytest.mark.parametrize("weighted", [False, True])
def test_balanced_classes_come_equally_often(weighted: bool) -> None:
    labels = np.array([7] * 90 + [-2] * 9 + [3])
    weights = np.arange(1, 101) if weighted else None
    for seed in range(30):
        counts = counts_of(Weighted(weights, balance=labels, num_samples=200), 100, seed=seed)
        per_class = np.array([counts[labels == label].sum() for label in (7, -2, 3)])
        assert counts.sum() == 200
        assert (np.abs(per_class - 200 / 3) < 1).all()
        if not weighted:
            assert counts[:90].max() <= 1
            assert set(counts[90:99].tolist()) <= {7, 8}


def test_a_class_without_weight_has_no_share() -> None:
    counts = counts_of(Weighted([0, 0, 1, 1], balance=[0, 0, 1, 2], num_samples=10), 4)
    assert counts.tolist() == [0, 0, 5, 5]


def test_weights_follow_a_schedule_by_epoch() -> None:
    def sharper(epoch: int) -> NDArray[np.float64]:
        return np.array([1.0, 1.0, 1.0, 1.0 + 5 * epoch])

    first, later = (select(Weighted(sharper, num_samples=9), 4, epoch=epoch) for epoch in (0, 1))
    assert first.counts is not None
    assert later.counts is not None
    assert first.counts.max() <= 3
    assert later.counts.tolist()[3] == 6


def test_each_pool_draws_its_part_and_weights_make_up_for_it() -> None:
    """The weighted sum over pools of unequal weight is that of all samples, in expectation."""
    rng = np.random.default_rng(2)
    weights, values = rng.lognormal(sigma=1.5, size=40), rng.normal(size=40)
    pools = [np.arange(10), np.arange(10, 40)]
    policy, sums = Weighted(weights, num_samples=80, over="pool"), []
    for seed in range(NUM_EPOCHS):
        chosen = select_in_pools(
            policy, reported(np.zeros(40)), pools, epoch=0, num_epochs=None, seed=seed
        )
        total = 0.0
        for pool, drawn, selection in zip(pools, (20, 60), chosen, strict=True):
            assert selection.counts is not None
            assert selection.weights is not None
            assert selection.counts.sum() == drawn
            total += float((values[pool] * selection.counts * selection.weights).sum())
        sums.append(total)
    expected = 80 * float((values * weights).sum() / weights.sum())
    assert abs(np.mean(sums) - expected) < 5 * np.std(sums) / np.sqrt(NUM_EPOCHS)


def test_a_pool_without_weight_draws_nothing() -> None:
    policy, pools = Weighted([0, 0, 1, 2], over="pool"), [np.arange(2), np.arange(2, 4)]
    chosen = select_in_pools(policy, reported(np.zeros(4)), pools, epoch=0, num_epochs=None)
    counts = [selection.counts.tolist() for selection in chosen if selection.counts is not None]
    assert counts[0] == [0, 0]
    assert sum(counts[1]) == 2


def test_another_epoch_or_seed_draws_other_rows_the_same_one_the_same() -> None:
    policy = Weighted(num_samples=50)
    first, again, other = (counts_of(policy, 100, seed=seed).tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_equal_policies_have_equal_names() -> None:
    weights = torch.arange(1, 9).double()
    policy = Weighted(weights)
    assert policy == Weighted(list(range(1, 9)))
    assert hash(policy) == hash(Weighted(np.arange(1, 9)))
    assert policy != Weighted(weights.flip(0))
    assert policy != Weighted(balance=range(1, 9))
    assert Weighted() == Weighted() != Weighted(over="pool")
    assert "0x" not in repr(Weighted(functools.partial(np.ones, 3)))
    weights[0] = 100
    assert policy == Weighted(list(range(1, 9))), "the caller's own array may change"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": [1, -1]}, "weights are -1.0 for sample 1, expected one finite number"),
        ({"weights": [1, np.nan]}, "weights are nan for sample 1, expected"),
        ({"weights": [0, 0]}, "weights are 0.0 in all, expected"),
        ({"weights": np.ones((2, 2))}, r"weights are of shape \(2, 2\), expected"),
        (
            {"balance": [0.5, 1]},
            r"balance is float64\[2\], expected a whole number.*return_inverse",
        ),
        ({"num_samples": 0}, "num_samples is 0, expected a whole number >= 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"Weighted: {message}"):
        Weighted(**settings)  # type: ignore[arg-type]


def test_what_does_not_fit_the_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="weights: 3 numbers for a dataset of 4 samples"):
        select(Weighted([1, 2, 3]), 4)
    with pytest.raises(ValueError, match="balance: 3 numbers for a dataset of 4 samples"):
        select(Weighted(balance=[1, 2, 3]), 4)
    with pytest.raises(ValueError, match=r"weights of epoch 2 are 0\.0 in all"):
        select(Weighted(lambda epoch: [0.0] * 4), 4, epoch=2)
    with pytest.raises(ValueError, match="goes by the field 'kind', which only a loader"):
        select(Weighted("kind"), 4)


def test_weights_that_differ_between_ranks_are_noticed() -> None:
    def mine(epoch: int) -> NDArray[np.float64]:
        # Each rank is a thread of its own
        return np.random.default_rng(threading.get_ident()).random(40)

    pools = scattered(40, 4)
    with pytest.raises(ValueError, match="weights of epoch 0 are not the same on every rank"):
        select_in_pools(Weighted(mine), reported(np.zeros(40)), pools, epoch=0, num_epochs=None)


def test_no_hidden_row_needs_a_new_score() -> None:
    assert Weighted().columns == ()
    assert len(Weighted().due(np.arange(3), epoch=1)) == 0
