"""CostAware shows rows by worth and cost, within its budget, and biases no sum."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataio.plan.history import Candidates, Scores
from dataio.plan.policies import ByCost, Importance, Selection
from importance import CostAware
from tests.importance.rows import in_pools, one_pool, reported, scattered

LOSSES = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 3e38, np.inf]), min_size=2, max_size=60)
COSTS = (0.001, 0.004, 0.02)


def costs_of(num_rows: int) -> NDArray[np.float32]:
    """Costs that have nothing to do with losses."""
    return np.resize(np.array(COSTS, np.float32), num_rows)


def select(
    policy: Importance, scores: Scores, cost_s: NDArray[np.float32] | None = None, *, seed: int = 0
) -> Selection:
    rows = replace(one_pool(scores, seed=seed), cost_s=cost_s)
    return policy.select(rows, epoch=1, num_epochs=10)


def shares_of(selection: Selection) -> NDArray[np.float64]:
    """The probability with which each row was to be visible."""
    assert selection.weights is not None
    return 1 / selection.weights.astype(np.float64)


@pytest.mark.parametrize("value", ["loss", "rows"])
@given(LOSSES)
def test_the_mean_of_weighted_sums_over_all_draws_is_the_sum(
    value: str, losses: Sequence[float]
) -> None:
    """A row's place is each place equally often, so shares of places are probabilities."""
    num = len(losses)
    policy = CostAware(0.4, floor=0.1, value=value)  # type: ignore[arg-type]
    scores, cost_s = reported(losses), costs_of(num)
    seen = np.zeros(num)
    for turn in range(num):
        rows = replace(one_pool(scores), cost_s=cost_s)
        # The places of one epoch, moved on by one: every row has every place once
        vars(rows)["places"] = (np.arange(num) + turn) % num
        chosen = policy.select(rows, epoch=1, num_epochs=None)
        assert chosen.weights is not None
        shown = np.delete(np.arange(num), chosen.hidden)
        seen[shown] += chosen.weights[shown]
    assert seen / num == pytest.approx(np.ones(num), rel=1e-6)


def test_weighted_sums_of_keyed_draws_scatter_around_the_sum() -> None:
    rng = np.random.default_rng(3)
    scores = reported(rng.exponential(1, 200).astype(np.float32))
    values = rng.normal(1, 1, 200)
    sums = []
    for seed in range(1500):
        chosen = select(CostAware(0.3, value="loss"), scores, costs_of(200), seed=seed)
        assert chosen.weights is not None
        weights = chosen.weights.astype(np.float64)
        weights[chosen.hidden] = 0
        sums.append(float(weights @ values))
    error = np.mean(sums) - values.sum()
    assert abs(error) < 3.5 * np.std(sums) / np.sqrt(len(sums))


def test_a_share_follows_from_loss_over_the_root_of_cost() -> None:
    scores = reported(np.repeat([1.0, 2.0, 1.0], 400))
    cost_s = np.repeat(np.array([0.004, 0.004, 0.016], np.float32), 400)
    low, high, dear = shares_of(select(CostAware(0.2, floor=0.01, value="loss"), scores, cost_s))[
        [0, 400, 800]
    ]
    assert high / low == pytest.approx(2, rel=0.03)
    assert low / dear == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("by_cost", [True, False])
def test_visible_rows_cost_the_budget(budget: float, by_cost: bool) -> None:
    scores = reported(np.random.default_rng(1).exponential(1, 6000).astype(np.float32))
    cost_s = costs_of(6000) if by_cost else np.ones(6000, np.float32)
    chosen = select(CostAware(budget, floor=0.02, value="loss", by_cost=by_cost), scores, cost_s)
    spent = 1 - cost_s[chosen.hidden].sum() / cost_s.sum()
    assert spent == pytest.approx(budget, abs=0.02)
    assert chosen.figures["expected_cost_fraction"] == pytest.approx(budget, abs=0.002)


def test_no_allocation_for_the_same_cost_varies_less_than_by_cost() -> None:
    """Of an estimate of the sum of losses; cost-blind and uniform shares spend as much."""
    rng = np.random.default_rng(2)
    loss = np.round(rng.exponential(1, 3000) * 1024) / 1024 + 1 / 1024
    scores, cost_s = reported(loss), costs_of(3000)

    def variance(share: NDArray[np.float64]) -> float:
        return float((loss**2 * (1 / share - 1)).sum())

    def spent(share: NDArray[np.float64]) -> float:
        return float(share @ cost_s / cost_s.sum())

    aware = shares_of(select(CostAware(0.3, floor=0.01, value="loss"), scores, cost_s))
    budget = spent(aware)
    blind = shares_of(
        select(CostAware(budget, floor=0.01, value="loss", by_cost=False), scores, cost_s)
    )
    uniform = np.full(3000, budget)
    assert spent(blind) == pytest.approx(budget, rel=0.05)
    assert variance(aware) < 0.9 * variance(blind)
    assert variance(blind) < variance(uniform)


def test_no_row_weighs_more_than_the_floor_allows() -> None:
    scores = reported(np.repeat([1 / 1024, 50.0], 500))
    weights = select(CostAware(0.4, floor=0.2, value="loss"), scores, costs_of(1000)).weights
    assert weights is not None
    assert weights.max() == pytest.approx(5, rel=0.01)
    assert weights.min() >= 1


@pytest.mark.parametrize("debias", [0.0, 0.5])
def test_less_than_unbiased_weights_vary_less_and_still_sum_to_all_rows(debias: float) -> None:
    scores, cost_s = reported(np.full(6000, 1.0)), costs_of(6000)
    chosen = [select(CostAware(0.3, value="loss", debias=d), scores, cost_s) for d in (debias, 1.0)]
    assert chosen[0].hidden.tolist() == chosen[1].hidden.tolist()
    less, unbiased = (
        np.delete(np.asarray(each.weights, np.float64), each.hidden) for each in chosen
    )
    assert less.sum() == pytest.approx(6000, rel=0.02)
    assert less.max() / less.min() == pytest.approx(
        (unbiased.max() / unbiased.min()) ** debias, rel=0.01
    )


def test_a_row_never_reported_counts_as_of_mean_loss() -> None:
    scores = reported([1.0, 3.0, np.inf, 2.0] * 100)
    share = shares_of(select(CostAware(0.3, floor=0.01, value="loss"), scores))
    assert share[2] == share[3]
    assert share[0] < share[2] < share[1]


def test_before_the_first_report_and_measurement_a_random_part_is_visible() -> None:
    unseen = reported(np.full(1000, np.inf))
    chosen = select(CostAware(0.25), unseen)
    assert len(chosen.hidden) == pytest.approx(750, abs=2)
    assert np.unique(shares_of(chosen)).tolist() == [pytest.approx(0.25)]


def test_cost_blind_looks_at_no_cost() -> None:
    policy = CostAware(0.3, value="loss", by_cost=False)
    assert isinstance(policy, ByCost)
    assert not policy.by_cost
    scores = reported(np.arange(100.0))
    one, other = (select(policy, scores, cost_s) for cost_s in (costs_of(100), None))
    assert one.hidden.tolist() == other.hidden.tolist()


@given(LOSSES, st.integers(2, 4), st.integers(0, 99))
def test_pools_with_the_same_costs_hide_what_one_pool_hides(
    losses: Sequence[float], num_pools: int, seed: int
) -> None:
    policy, scores, cost_s = CostAware(0.4, value="loss"), reported(losses), costs_of(len(losses))

    def ask(rows: Candidates) -> Selection:
        priced = replace(rows, cost_s=cost_s[rows.sample_id])
        return policy.select(priced, epoch=1, num_epochs=None)

    whole = select(policy, scores, cost_s, seed=seed)
    pools = scattered(len(losses), num_pools, seed=seed)
    # The same key as `select` draws by
    parts = in_pools(scores, pools, ask, seed=seed)
    ids = [i for pool, s in zip(pools, parts, strict=True) for i in pool[s.hidden].tolist()]
    assert sorted(ids) == sorted(whole.hidden.tolist())
    for pool, part in zip(pools, parts, strict=True):
        assert part.weights is not None
        assert whole.weights is not None
        assert part.weights.tolist() == whole.weights[pool].tolist()


def test_a_whole_budget_and_the_end_of_the_run_are_full_data() -> None:
    scores = reported(np.arange(50.0))
    assert len(select(CostAware(1.0), scores).hidden) == 0
    policy = CostAware(0.3, value="loss", delta=0.8)
    chosen = [policy.select(one_pool(scores), epoch=e, num_epochs=10).hidden for e in range(10)]
    assert [len(hidden) > 0 for hidden in chosen] == [True] * 8 + [False] * 2
    assert len(policy.due(chosen[0], epoch=0)) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 1.5}, r"budget is 1.5, expected a number in \[0, 1\]; 0.3 stands"),
        ({"budget": 0.05}, "floor is 0.1 and budget is 0.05, expected 0 < floor <= budget; 0.1 le"),
        ({"floor": 0.0}, "floor is 0.0 and budget is 0.5, expected 0 < floor"),
        ({"debias": -1.0}, r"debias is -1.0, expected a number in \[0, 1\]; 0.3 stands"),
        ({"delta": 2.0}, r"delta is 2.0, expected a number in \[0, 1\]; 0.3 stands"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"CostAware: {message}"):
        CostAware(**settings)  # type: ignore[arg-type]
