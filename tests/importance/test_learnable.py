"""Learnable hides what does not fall, whatever its loss, and takes back what falls."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataio.plan.history import Candidates, Scores, record, unscored
from importance import Learnable
from tests.importance.rows import SCORE_DTYPE, one_pool, reported, scattered, select_in_pools

Losses = list[float] | NDArray[np.float64]

LOSSES = st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.25, 5.5, float("inf"), float("nan")])
ROWS = st.tuples(LOSSES, LOSSES, st.integers(-1, 3))
POLICIES = st.builds(
    Learnable, st.floats(0, 1, exclude_max=True), least_fall=st.sampled_from([0.0, 0.3, 0.5, 0.9])
)


def fallen(second: Losses, last: Losses) -> Scores:
    """Rows of some second and last losses."""
    scores = reported(np.array(last))
    scores["loss_second"] = second
    return scores


def hidden(policy: Learnable, rows: Candidates, epoch: int = 5) -> list[int]:
    chosen: list[int] = policy.select(rows, epoch=epoch, num_epochs=None).hidden.tolist()
    return sorted(chosen)


def planted(num_epochs: int) -> Scores:
    """A hundred rows of each kind after some epochs: losses as a small GPT on bytes has them.

    Easy text falls fast and ends low; hard text begins above shuffled text, and falls as long as it
    is trained; shuffled text and random bytes stay. The first epoch says where in it a row came.
    """
    scores = unscored(400, SCORE_DTYPE)
    rng = np.random.default_rng(0)
    rows = np.arange(400)
    for epoch in range(num_epochs):
        kinds = [3.0 * 0.85**epoch, 4.5 * 0.95**epoch, 3.4, 5.55]
        loss = np.repeat(kinds, 100) * rng.normal(1, 0.01, 400)
        if epoch == 0:
            loss = rng.uniform(loss, 6.0)
        record(
            scores, rows, loss=loss.astype(np.float32), correct=None, confidence=None, epoch=epoch
        )
    return scores


def test_junk_is_hidden_and_text_stays_whether_easy_or_hard():
    for num_epochs in (4, 6, 9, 12):
        rows = one_pool(planted(num_epochs))
        chosen = np.array(hidden(Learnable(0.6), rows, num_epochs))
        by_kind = np.bincount(chosen // 100, minlength=4)
        assert by_kind[:2].tolist() == [0, 0], num_epochs
        assert by_kind[2:].min() >= 95, num_epochs


def test_the_highest_losses_are_not_what_is_hidden():
    scores = planted(4)
    chosen = hidden(Learnable(0.6), one_pool(scores), 4)
    is_hard = np.arange(400) // 100 == 1
    assert scores["loss"][is_hard].min() > scores["loss"][200:300].max(), "hard text is above junk"
    assert not is_hard[chosen].any()


def test_a_hidden_row_comes_back_once_its_loss_has_fallen():
    scores = planted(4)
    before = hidden(Learnable(0.6), one_pool(scores), 4)
    back = before[::2]
    scores["loss"][back] *= 0.8
    again = hidden(Learnable(0.6), one_pool(scores), 5)
    assert not set(back) & set(again)
    assert set(before[1::2]) <= set(again)


def test_what_was_learned_before_stays_though_its_loss_falls_no_more():
    # Learned, junk, and falling
    scores = fallen([0.5] * 5 + [3.0] * 5 + [3.0] * 10, [0.5] * 5 + [3.0] * 5 + [2.0] * 10)
    assert hidden(Learnable(), one_pool(scores)) == [5, 6, 7, 8, 9]


def test_where_nothing_falls_or_all_fall_alike_nothing_is_hidden():
    for last in (3.0, 3.5, 2.0):
        scores = fallen([3.0] * 20, [last] * 20)
        assert hidden(Learnable(), one_pool(scores)) == []


def test_of_more_than_the_share_the_smallest_falls_go_first():
    last = [3.0, 2.98, 2.96, 2.94] + [1.5] * 6
    scores = fallen([3.0] * 10, last)
    assert hidden(Learnable(0.25), one_pool(scores)) == [0, 1]
    assert hidden(Learnable(0.5), one_pool(scores)) == [0, 1, 2, 3]


@given(POLICIES, st.lists(ROWS, min_size=1, max_size=80))
def test_what_is_hidden_fell_less_than_what_learns_and_is_no_more_than_the_share(
    policy: Learnable, drawn: list[tuple[float, float, int]]
) -> None:
    scores = fallen([row[0] for row in drawn], [row[1] for row in drawn])
    chosen = hidden(policy, one_pool(scores))
    assert len(chosen) <= policy.fraction * len(drawn)
    assert np.isfinite(scores["loss_second"][chosen]).all()
    second, last = scores["loss_second"].astype(float), np.nan_to_num(scores["loss"], nan=np.inf)
    known = np.isfinite(second)
    second[~known], last = 1.0, np.minimum(last, 1e6)
    fall = np.clip((second - last) / np.maximum(second, 1e-3), 0, 1)
    if len(chosen):
        # Falls are counted in 4,096 parts
        assert fall[chosen].max() <= fall[known].max() * policy.least_fall + 1 / 4096


@given(st.sampled_from([0.1, 0.9]), st.integers(2, 5), st.integers(0, 999))
def test_pools_hide_what_one_pool_hides(fraction: float, num_pools: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Half of the rows of few different losses, so that ties decide where not all may be hidden
    last = np.concatenate([rng.choice([1.0, 2.0, 2.25, 2.5], 30), rng.uniform(1, 2.6, 30)])
    scores = fallen(rng.choice([2.0, 2.5, np.inf], 60), last)
    policy = Learnable(fraction, least_fall=0.5)
    pools = scattered(60, num_pools, seed=seed)
    parts = select_in_pools(policy, scores, pools, epoch=4, num_epochs=None, seed=seed)
    ids = [i for pool, s in zip(pools, parts, strict=True) for i in pool[s.hidden].tolist()]
    whole = hidden(policy, one_pool(scores, seed=seed, epoch=4), 4)
    assert sorted(ids) == whole
    assert 0 < len(whole) <= fraction * 60


def test_nothing_is_hidden_before_it_begins():
    rows = one_pool(planted(4))
    began = [len(hidden(Learnable(begins=3), rows, epoch)) > 0 for epoch in range(6)]
    assert began == [False] * 3 + [True] * 3


def test_no_learning_rate_and_no_weight_changes_and_no_step_is_topped_up():
    chosen = Learnable().select(one_pool(planted(4)), epoch=4, num_epochs=9)
    assert chosen.weights is None
    assert chosen.lr_factor == 1.0
    assert not chosen.top_up
    assert 190 <= chosen.figures["not_falling"] <= 200


def test_hidden_rows_are_scored_again_every_so_many_epochs():
    slots = np.array([4, 2])
    every, never = Learnable(refresh_every=2), Learnable(refresh_every=None)
    assert [len(every.due(slots, epoch=epoch)) for epoch in range(4)] == [2, 0, 2, 0]
    assert len(never.due(slots, epoch=2)) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fraction": 1.0},
            r"Learnable: fraction is 1.0, expected a number in \[0, 1\); 0.3 stands",
        ),
        (
            {"least_fall": -0.1},
            r"Learnable: least_fall is -0.1, expected a number in \[0, 1\); 0.3 stands",
        ),
        (
            {"begins": 2},
            "Learnable: begins is 2, expected a whole number >= 3; a fall is seen only between",
        ),
        ({"refresh_every": 0}, "Learnable: refresh_every is 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Learnable(**settings)
