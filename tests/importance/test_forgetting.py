"""Forgetting hides what is right, the least often forgotten first, and no more than its share."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.history import Scores
from importance import Forgetting
from tests.importance.rows import SCORE_DTYPE, one_pool, reported

FIELDS = ("correct", "forgotten", "epoch")


def pool(rows: list[tuple[bool, int]]) -> Scores:
    scores = np.zeros(len(rows), SCORE_DTYPE)
    for name, values in zip(FIELDS, zip(*((*row, 3) for row in rows), strict=True), strict=True):
        scores[name] = values
    return scores


POOLS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([0, 0, 1, 2, 65535])), min_size=1, max_size=80
).map(pool)
POLICIES = st.builds(Forgetting, st.floats(0, 1, exclude_max=True))


def hidden(policy: Forgetting, scores: Scores, epoch: int = 5) -> list[int]:
    chosen = policy.select(one_pool(scores, epoch=epoch), epoch=epoch, num_epochs=None)
    slots: list[int] = chosen.hidden.tolist()
    return slots


@given(POLICIES, POOLS)
def test_what_is_hidden_is_right_and_as_much_as_was_asked_for(
    policy: Forgetting, scores: Scores
) -> None:
    chosen = hidden(policy, scores)
    assert scores["correct"][chosen].all()
    wanted = int(policy.fraction * len(scores))
    assert len(set(chosen)) == len(chosen) == min(wanted, int(scores["correct"].sum()))


@given(POLICIES, POOLS)
def test_no_row_that_stays_and_is_right_was_forgotten_less_often(
    policy: Forgetting, scores: Scores
) -> None:
    chosen = hidden(policy, scores)
    stays = np.setdiff1d(np.flatnonzero(scores["correct"]), chosen)
    if len(chosen) and len(stays):
        assert scores["forgotten"][chosen].max() <= scores["forgotten"][stays].min()


def test_of_rows_that_were_forgotten_equally_often_others_go_each_epoch() -> None:
    scores = reported(np.zeros(100))
    first, second = (hidden(Forgetting(), scores, epoch) for epoch in (4, 5))
    assert len(first) == len(second) == 30
    assert set(first) != set(second)


def test_nothing_is_hidden_before_it_begins_and_none_is_weighted() -> None:
    scores = reported(np.zeros(20))
    policy = Forgetting(0.5, begins=3)
    assert [len(hidden(policy, scores, epoch)) for epoch in range(5)] == [0, 0, 0, 10, 10]
    chosen = policy.select(one_pool(scores), epoch=4, num_epochs=9)
    assert (chosen.weights, chosen.lr_factor, chosen.top_up) == (None, 1.0, False)


def test_hidden_rows_are_scored_again_every_so_many_epochs() -> None:
    slots = np.array([4, 2])
    every, never = Forgetting(refresh_every=2), Forgetting(refresh_every=None)
    assert [len(every.due(slots, epoch=epoch)) for epoch in range(4)] == [2, 0, 2, 0]
    assert len(never.due(slots, epoch=2)) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fraction": 1.0},
            r"Forgetting: fraction is 1.0, expected a number in \[0, 1\); 0.3 stands",
        ),
        (
            {"begins": 0},
            "Forgetting: begins is 0, expected a whole number >= 1; epoch 0 has no predictions",
        ),
        ({"refresh_every": 0}, "Forgetting: refresh_every is 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        Forgetting(**settings)
