"""Kakurenbo hides the lowest losses that are right, sure and known: never more than its cap."""

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataio.plan.history import Scores
from dataio.plan.policies import Selection
from importance import Kakurenbo, outcome
from tests.importance.rows import (
    LAST_DTYPE,
    SCORE_DTYPE,
    one_pool,
    reported,
    scattered,
    select_in_pools,
)

NUM_EPOCHS = 100

# Few different losses, so that ties and losses that are no numbers are common.
LOSSES = st.sampled_from([0.0, 0.5, 1.0, 2.0, float("inf"), float("nan")])
ROWS = st.tuples(LOSSES, st.sampled_from([0.0, 0.7, 0.9]), st.booleans(), st.integers(-1, 3)).map(
    lambda row: (row[0], row[0], row[1], row[2], 0, row[3])
)
POOLS = st.lists(ROWS, min_size=1, max_size=60).map(lambda rows: np.array(rows, LAST_DTYPE))
POLICIES = st.builds(
    Kakurenbo, st.floats(0, 1, exclude_max=True), tau=st.sampled_from([0.0, 0.7, 1.0])
)
EPOCHS = st.integers(1, NUM_EPOCHS - 1)


def select(policy: Kakurenbo, scores: Scores, epoch: int) -> Selection:
    return policy.select(one_pool(scores), epoch=epoch, num_epochs=NUM_EPOCHS)


def test_in_one_epoch_it_is_noted_why_nothing_is_hidden() -> None:
    pool = easy_pool(10)
    assert not select(Kakurenbo(0.3), pool, 3).note
    pool["confidence"] = 0.5
    notes = [select(Kakurenbo(0.3), pool, epoch).note for epoch in range(1, 6)]
    assert ["none of this node's 3 rows" in note for note in notes] == [0, 0, 1, 0, 0]


def easy_pool(num_slots: int) -> Scores:
    """Rows that may all be hidden, the last slot with the lowest loss."""
    return reported(np.arange(num_slots, 0, -1.0))


@given(POLICIES, POOLS, EPOCHS)
def test_hidden_slots_are_distinct_and_owned(policy: Kakurenbo, scores: Scores, epoch: int) -> None:
    hidden = select(policy, scores, epoch).hidden
    assert hidden.dtype == np.int64
    visible = np.setdiff1d(np.arange(len(scores)), hidden)
    assert sorted([*hidden, *visible]) == list(range(len(scores)))


@given(POLICIES, POOLS, EPOCHS)
def test_no_row_is_hidden_that_is_wrong_unsure_or_unseen(
    policy: Kakurenbo, scores: Scores, epoch: int
) -> None:
    hidden = scores[select(policy, scores, epoch).hidden]
    assert hidden["correct"].all()
    assert (hidden["confidence"] >= policy.tau).all()
    assert (hidden["epoch"] >= 0).all()


@given(POLICIES, POOLS, EPOCHS)
def test_hidden_rows_come_least_worth_first_and_ties_by_place(
    policy: Kakurenbo, scores: Scores, epoch: int
) -> None:
    hidden = select(policy, scores, epoch).hidden
    loss = np.fmin(scores["loss"][hidden], np.inf)
    places = one_pool(scores).places[hidden]
    ranked = list(zip(loss.tolist(), places.tolist(), strict=True))
    assert ranked == sorted(ranked)


@given(POLICIES, POOLS, EPOCHS)
def test_no_more_than_the_cap_is_hidden(policy: Kakurenbo, scores: Scores, epoch: int) -> None:
    assert len(select(policy, scores, epoch).hidden) <= policy.fraction * len(scores)


@given(POLICIES, POOLS, EPOCHS)
def test_a_visible_row_no_worse_than_a_hidden_one_is_wrong_unsure_or_unseen(
    policy: Kakurenbo, scores: Scores, epoch: int
) -> None:
    hidden = select(policy, scores, epoch).hidden
    if not len(hidden):
        return
    visible = np.setdiff1d(np.arange(len(scores)), hidden)
    lower = visible[scores["loss"][visible] < scores["loss"][hidden[-1]]]
    rows = scores[lower]
    sure = rows["confidence"] >= policy.tau
    assert not (rows["correct"] & sure & (rows["epoch"] >= 0)).any()


@given(st.lists(LOSSES, min_size=1, max_size=60), st.integers(0, 15))
def test_the_cap_is_used_up_when_all_rows_are_easy(losses: list[float], sixteenths: int) -> None:
    scores = easy_pool(len(losses))
    scores["loss"] = losses
    policy = Kakurenbo(sixteenths / 16, drops=(), alphas=(1.0,))
    assert len(select(policy, scores, 1).hidden) == sixteenths * len(losses) // 16


@given(POLICIES, POOLS, EPOCHS)
def test_same_scores_and_epoch_give_the_same_selection(
    policy: Kakurenbo, scores: Scores, epoch: int
) -> None:
    before = scores.tobytes()
    first, second = (select(policy, scores, epoch) for _ in range(2))
    assert first.hidden.tobytes() == second.hidden.tobytes()
    assert scores.tobytes() == before


@given(POLICIES, POOLS)
def test_epoch_0_hides_nothing(policy: Kakurenbo, scores: Scores) -> None:
    selection = select(policy, scores, 0)
    assert len(selection.hidden) == 0
    assert selection.lr_factor == 1.0


def test_the_lowest_losses_are_hidden_in_a_pool_worked_by_hand() -> None:
    scores = easy_pool(10)
    scores["loss"] = [5, 1, 4, 1.5, 0, 9, 2, 6, 5, 3]
    assert select(Kakurenbo(0.5), scores, 1).hidden.tolist() == [4, 1, 3, 6, 9]
    scores["correct"][3] = False
    scores["confidence"][[1, 4]] = 0.7, 0.69
    scores["epoch"][6] = -1
    # Moved back, not replaced: slot 2 stays visible.
    assert select(Kakurenbo(0.5), scores, 1).hidden.tolist() == [1, 9]


def test_the_cap_falls_at_the_drops() -> None:
    scores = easy_pool(1000)
    epochs = (1, 29, 30, 59, 60, 79, 80, 99)
    counts = [len(select(Kakurenbo(0.5), scores, epoch).hidden) for epoch in epochs]
    assert counts == [500, 500, 400, 400, 300, 300, 200, 200]


def test_a_drop_falls_in_the_epoch_that_its_fraction_names() -> None:
    # 0.55 * 100 is more than 55 in floating point.
    policy = Kakurenbo(0.5, drops=(0.55,), alphas=(1.0, 0.0))
    assert len(select(policy, easy_pool(10), 54).hidden) == 5
    assert len(select(policy, easy_pool(10), 55).hidden) == 0


def test_the_learning_rate_grows_by_the_cap_after_warm_up() -> None:
    unseen = np.zeros(10, SCORE_DTYPE)
    factors = [select(Kakurenbo(0.5, warmup_epochs=3), unseen, e).lr_factor for e in (1, 2, 3, 30)]
    assert factors == pytest.approx([1, 1, 2, 1 / 0.6])
    assert len(select(Kakurenbo(0.5, warmup_epochs=3), easy_pool(10), 1).hidden) == 5


def test_hidden_rows_top_up_short_steps() -> None:
    assert select(Kakurenbo(), easy_pool(10), 0).top_up
    assert select(Kakurenbo(), easy_pool(10), 1).top_up


def pools_worked_by_hand() -> tuple[Scores, list[NDArray[np.int64]]]:
    """A pool of low losses, one of high ones, and one half as long between them."""
    scores = reported([*np.arange(8) / 8, *np.arange(8) + 4.0, *np.arange(4) / 4 + 2])
    return scores, [np.arange(8), np.arange(8, 16), np.arange(16, 20)]


@pytest.mark.parametrize(("threshold", "expected"), [("global", [8, 0, 2]), ("pool", [4, 4, 2])])
def test_a_threshold_is_of_all_pools_or_of_each(
    threshold: Literal["global", "pool"], expected: list[int]
) -> None:
    scores, pools = pools_worked_by_hand()
    policy = Kakurenbo(0.5, threshold=threshold)
    chosen = select_in_pools(policy, scores, pools, epoch=1, num_epochs=NUM_EPOCHS)
    assert [len(selection.hidden) for selection in chosen] == expected


@given(st.integers(1, 200), st.integers(1, 4), st.integers(0, 15), st.integers(0, 99))
def test_the_cap_is_an_exact_number_over_all_pools(
    num_samples: int, num_pools: int, sixteenths: int, seed: int
) -> None:
    policy = Kakurenbo(sixteenths / 16, drops=(), alphas=(1.0,))
    pools = scattered(num_samples, num_pools, seed=seed)
    # One loss for all: ties must not let a pool hide more, or fewer.
    scores = reported(np.zeros(num_samples))
    chosen = select_in_pools(policy, scores, pools, epoch=1, num_epochs=None)
    assert sum(len(selection.hidden) for selection in chosen) == sixteenths * num_samples // 16


@pytest.mark.parametrize(
    ("rate", "factor"), [("cap", 1 / (1 - 0.5)), ("realised", 1 / (1 - 6 / 20)), ("none", 1.0)]
)
def test_the_learning_rate_grows_by_the_rule_and_alike_in_all_pools(
    rate: Literal["cap", "realised", "none"], factor: float
) -> None:
    scores, pools = pools_worked_by_hand()
    scores["correct"][[0, 1, 2, 17]] = False
    policy = Kakurenbo(0.5, rate=rate, warmup_epochs=2)
    warming, warm = (
        select_in_pools(policy, scores, pools, epoch=epoch, num_epochs=NUM_EPOCHS)
        for epoch in (1, 2)
    )
    assert sum(len(selection.hidden) for selection in warm) == 6
    assert [selection.lr_factor for selection in warm] == pytest.approx([factor] * 3)
    assert [selection.lr_factor for selection in warming] == [1.0] * 3


def test_figures_tell_the_cap_and_how_many_were_moved_back() -> None:
    scores = easy_pool(10)
    scores["confidence"][[7, 9]] = 0.1
    selection = select(Kakurenbo(0.5), scores, 1)
    assert selection.figures == {"hidden_cap": 0.5, "moved_back": 2.0}


def test_drops_may_be_epochs_of_a_run_of_unknown_length() -> None:
    policy = Kakurenbo(0.5, drops=(3, 6), alphas=(1.0, 0.4))
    counts = [
        len(policy.select(one_pool(easy_pool(10)), epoch=epoch, num_epochs=None).hidden)
        for epoch in (1, 2, 3, 5, 6, 100)
    ]
    # The last alpha stays where there are more drops.
    assert counts == [5, 5, 2, 2, 2, 2]


def test_hidden_rows_are_moved_back_by_the_confidence_of_their_classes() -> None:
    """Rows that dominate their batch are unsure over classes, and the other way round."""
    # Two sure rows of one class share its mass over the batch; a lone flat row holds all of it.
    sure = outcome(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 0]))
    flat = outcome(torch.tensor([[0.1, 0.0]]), torch.tensor([0]))
    scores = reported(np.zeros(6))
    for slots, (correct, confidence) in (([0, 1], sure), ([2], flat)):
        scores["correct"][slots], scores["confidence"][slots] = correct, confidence
    scores["loss"][3:] = 5
    assert sorted(select(Kakurenbo(0.5), scores, 1).hidden.tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("refresh_every", "expected"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (None, [])]
)
def test_hidden_rows_are_due_every_so_many_epochs_or_never(
    refresh_every: int | None, expected: list[int]
) -> None:
    hidden: NDArray[np.int64] = np.array([3, 1])
    policy = Kakurenbo(refresh_every=refresh_every)
    due = {epoch: policy.due(hidden, epoch=epoch).tolist() for epoch in range(1, 5)}
    assert due == {epoch: [3, 1] if epoch in expected else [] for epoch in range(1, 5)}


def test_a_run_of_unknown_length_needs_a_policy_without_drops() -> None:
    rows = one_pool(easy_pool(10))
    with pytest.raises(ValueError, match=r"loader\.epochs\(n\)`, or use Kakurenbo\(drops=\(\)"):
        Kakurenbo().select(rows, epoch=0, num_epochs=None)
    steady = Kakurenbo(drops=(), alphas=(1.0,))
    assert len(steady.select(rows, epoch=1, num_epochs=None).hidden) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.0}, r"fraction is 1.0, expected a number in \[0, 1\); 0.3 stands"),
        ({"fraction": float("nan")}, "fraction is nan, expected"),
        ({"tau": 1.5}, r"tau is 1.5, expected a number in \[0, 1\]; 0.3 stands"),
        (
            {"alphas": (1.0, 2.0, 0.6, 0.4)},
            r"alphas is \(1.0, 2.0, 0.6, 0.4\), expected a tuple of a number in \[0, 1\]",
        ),
        ({"drops": (0.6, 0.3, 0.8)}, "drops are .*increase strictly.*; give"),
        ({"drops": (60, 0.7)}, "drops are .*increase strictly.* or epochs from 1 on"),
        (
            {"drops": (0.5,)},
            "4 alphas for 1 drops, expected at most one alpha more.*; give the alpha",
        ),
        ({"warmup_epochs": -1}, "warmup_epochs is -1, expected a whole number >= 0"),
        ({"refresh_every": 0}, "refresh_every is 0, expected a whole number >= 1"),
        ({"threshold": "node"}, 'threshold is \'node\', expected "global" or "pool"'),
        ({"rate": "best"}, 'rate is \'best\', expected "cap", "realised" or "none"'),
        ({"drops": (0, 5)}, "drops are .*increase strictly.* or epochs from 1 on"),
        ({"alphas": ()}, "0 alphas for 3 drops"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"Kakurenbo: .*{message}"):
        Kakurenbo(**settings)  # type: ignore[arg-type]
