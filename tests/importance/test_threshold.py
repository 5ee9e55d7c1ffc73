"""Thresholds over all pools are those of one sort, ties, odd losses and odd sizes included."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataio.plan.history import QUANTUM, Candidates, alone
from importance.threshold import (
    DIGIT_BITS,
    key_bits,
    loss_keys,
    lowest,
    lowest_of_each,
    percentiles,
)
from tests.importance.rows import in_pools, one_pool, reported, scattered

# Few different losses, so that ties are common; and everything a loss can be.
LOSSES = st.sampled_from([-np.inf, -2.5, -0.0, 0.0, 0.5, 0.5, 1e-45, 3e38, 1e9, np.inf, np.nan])
NUM_BITS = st.integers(1, 64)


def ranked(keys: NDArray[np.uint64], count: int) -> list[int]:
    return sorted(np.argsort(keys)[:count].tolist())


def lowest_losses(rows: Candidates, count: int) -> NDArray[np.int64]:
    return lowest(loss_keys(rows), count, rows.total, num_bits=key_bits(rows))


@given(NUM_BITS, st.data())
def test_the_lowest_keys_are_those_of_a_sort(num_bits: int, data: st.DataObject) -> None:
    values = st.integers(0, 2**num_bits - 1)
    drawn = data.draw(st.lists(values, unique=True, max_size=40))
    keys = np.array(drawn, np.uint64)
    count = data.draw(st.integers(0, len(keys) + 2))
    assert lowest(keys, count, alone, num_bits=num_bits).tolist() == ranked(keys, count)


@given(st.integers(1, 63), st.integers(0, 3))
def test_keys_at_both_ends_of_their_range_are_told_apart(num_bits: int, count: int) -> None:
    keys = np.unique(np.array([2**num_bits - 1, 0, 2 ** (num_bits - 1)], np.uint64))
    assert lowest(keys, count, alone, num_bits=num_bits).tolist() == list(range(len(keys)))[:count]


@given(NUM_BITS, st.sampled_from([1, 2, 5, 300, 70_000]), st.data())
def test_the_lowest_keys_of_each_group_are_those_of_a_sort(
    num_bits: int, num_groups: int, data: st.DataObject
) -> None:
    values = st.integers(0, 2**num_bits - 1)
    keys = np.array(data.draw(st.lists(values, unique=True, max_size=40)), np.uint64)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    used = rng.choice(num_groups, min(num_groups, 4), replace=False)
    groups = used[rng.integers(0, len(used), len(keys))]
    counts = rng.integers(0, 2 + len(keys) // 2, num_groups)
    found = lowest_of_each(keys, groups, counts, alone, num_bits=num_bits)
    wanted = []
    for group in used:
        mine = np.flatnonzero(groups == group)
        wanted += mine[np.argsort(keys[mine])][: counts[group]].tolist()
    assert found.tolist() == sorted(wanted)


@given(st.lists(LOSSES, min_size=1, max_size=60), st.integers(1, 5), st.integers(0, 99))
def test_pools_agree_on_the_lowest_rows_of_each_group(
    losses: list[float], num_pools: int, seed: int
) -> None:
    scores, counts = reported(losses), np.array([3, 0, 7])

    def choose(rows: Candidates) -> NDArray[np.int64]:
        groups = rows.sample_id % 3
        return lowest_of_each(loss_keys(rows), groups, counts, rows.total, num_bits=key_bits(rows))

    pools = scattered(len(losses), num_pools, seed=seed)
    parts = in_pools(scores, pools, choose)
    ids = [int(i) for pool, rows in zip(pools, parts, strict=True) for i in pool[rows]]
    assert sorted(ids) == choose(one_pool(scores)).tolist()


@given(st.lists(LOSSES, min_size=1, max_size=60), st.integers(1, 5), st.integers(0, 99), st.data())
def test_pools_agree_on_the_lowest_rows_of_all(
    losses: list[float], num_pools: int, seed: int, data: st.DataObject
) -> None:
    scores, pools = reported(losses), scattered(len(losses), num_pools, seed=seed)
    count = data.draw(st.integers(0, len(losses) + 1))
    chosen = in_pools(scores, pools, lambda rows: lowest_losses(rows, count))
    ids = sorted(int(i) for pool, rows in zip(pools, chosen, strict=True) for i in pool[rows])
    whole = one_pool(scores)
    loss = np.fmin(scores["loss"], np.inf)
    assert ids == sorted(np.lexsort((whole.places, loss))[:count].tolist())


@given(st.lists(LOSSES, min_size=1, max_size=60))
def test_keys_order_rows_by_loss_and_then_by_place(losses: list[float]) -> None:
    rows = one_pool(reported(losses))
    keys = loss_keys(rows)
    assert len(np.unique(keys)) == len(keys)
    assert int(keys.max()) < 2 ** key_bits(rows)
    loss = np.fmin(rows.scores["loss"], np.inf)
    assert np.argsort(keys).tolist() == np.lexsort((rows.places, loss)).tolist()


def test_the_two_zeros_are_one_loss() -> None:
    rows = one_pool(reported([0.0, -0.0] * 50))
    assert np.argsort(loss_keys(rows)).tolist() == np.argsort(rows.places).tolist()


def test_a_lone_row_is_found_and_left_out() -> None:
    rows = one_pool(reported([3.0]))
    found = [lowest_losses(rows, count).tolist() for count in (0, 1, 2)]
    assert found == [[], [0], [0]]


def test_a_pool_without_rows_takes_part() -> None:
    pools = [np.arange(3), np.arange(0)]
    chosen = in_pools(reported([2.0, 0.0, 1.0]), pools, lambda rows: lowest_losses(rows, 2))
    assert [found.tolist() for found in chosen] == [[1, 2], []]


@pytest.mark.parametrize("num_bits", [1, 12, 13, 24, 36, 64])
def test_a_threshold_costs_few_totals_of_32_kib(num_bits: int) -> None:
    sizes: list[int] = []

    def total(values: NDArray[np.int64]) -> NDArray[np.int64]:
        sizes.append(values.nbytes)
        return values

    keys = np.array([0, 1], np.uint64)
    assert lowest(keys, 1, total, num_bits=num_bits).tolist() == [0]
    assert sizes == [32 << 10] * -(-num_bits // DIGIT_BITS)


def test_many_rows_in_several_blocks_give_the_threshold_of_a_sort() -> None:
    losses = np.round(np.random.default_rng(0).lognormal(size=100_000) / QUANTUM) * QUANTUM
    scores, pools = reported(losses), scattered(100_000, 3)
    chosen = in_pools(scores, pools, lambda rows: lowest_losses(rows, 30_001))
    ids = np.sort(np.concatenate([pool[rows] for pool, rows in zip(pools, chosen, strict=True)]))
    first = np.lexsort((one_pool(scores).places, scores["loss"]))[:30_001]
    assert ids.tolist() == np.sort(first).tolist()


LEVELS = st.sampled_from([0.0, QUANTUM, 0.5, 1.0, 15.75])


@given(st.lists(LEVELS, min_size=1, max_size=50), st.integers(1, 4))
def test_a_percentile_is_the_share_below_and_half_of_the_equals(
    losses: list[float], num_pools: int
) -> None:
    scores, pools = reported(losses), scattered(len(losses), num_pools)
    found = in_pools(scores, pools, lambda rows: percentiles(rows, rows.total))
    for pool, shares in zip(pools, found, strict=True):
        below = [sum(x < losses[i] for x in losses) for i in pool]
        equal = [sum(x == losses[i] for x in losses) for i in pool]
        expected = [(b + e / 2) / len(losses) for b, e in zip(below, equal, strict=True)]
        assert shares.tolist() == pytest.approx(expected)


def test_percentiles_of_odd_losses_lie_at_the_ends() -> None:
    losses = [-np.inf, -1.0, 0.5, 100.0, np.inf, np.nan]
    shares = percentiles(one_pool(reported(losses)), alone)
    assert shares.tolist() == pytest.approx([1 / 6, 1 / 6, 2.5 / 6, 4.5 / 6, 4.5 / 6, 4.5 / 6])
