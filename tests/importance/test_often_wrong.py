"""OftenWrong hides what was wrong in most epochs, the most often wrong of each class first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.history import Scores, record
from importance import OftenWrong
from tests.importance.rows import SCORE_DTYPE, one_pool, reported

NUM_CLASSES = 10  # of the rows that `one_pool` makes
EPOCH = 6


def pool(counts: list[int]) -> Scores:
    scores = np.zeros(len(counts), SCORE_DTYPE)
    scores["wrong"], scores["epoch"] = counts, EPOCH - 1
    return scores


POOLS = st.lists(st.integers(0, EPOCH), min_size=1, max_size=80).map(pool)
POLICIES = st.builds(
    OftenWrong, st.floats(0, 1, exclude_max=True), label=st.sampled_from(["label", None])
)


def hidden(policy: OftenWrong, scores: Scores, epoch: int = EPOCH) -> list[int]:
    chosen: list[int] = policy.select(
        one_pool(scores), epoch=epoch, num_epochs=None
    ).hidden.tolist()
    return chosen


def classes_of(policy: OftenWrong, scores: Scores) -> np.ndarray:
    return np.arange(len(scores)) % NUM_CLASSES if policy.label else np.zeros(len(scores), int)


@given(POLICIES, POOLS)
def test_what_is_hidden_was_wrong_in_most_epochs_and_is_no_more_than_the_share_of_its_class(
    policy: OftenWrong, scores: Scores
) -> None:
    chosen = hidden(policy, scores)
    assert len(set(chosen)) == len(chosen)
    assert (scores["wrong"][chosen] > EPOCH / 2).all()
    classes = classes_of(policy, scores)
    sizes = np.bincount(classes, minlength=NUM_CLASSES)
    often = np.bincount(classes[scores["wrong"] > EPOCH / 2], minlength=NUM_CLASSES)
    taken = np.bincount(classes[chosen], minlength=NUM_CLASSES)
    assert taken.tolist() == np.minimum(np.floor(policy.fraction * sizes), often).tolist()


@given(POLICIES, POOLS)
def test_of_each_class_the_most_often_wrong_go_first(policy: OftenWrong, scores: Scores) -> None:
    chosen = hidden(policy, scores)
    classes = classes_of(policy, scores)
    for slot in set(range(len(scores))) - set(chosen):
        mates = [other for other in chosen if classes[other] == classes[slot]]
        if mates:
            assert scores["wrong"][slot] <= scores["wrong"][mates].min()


def test_a_row_comes_back_once_the_model_has_agreed_with_it_for_half_of_the_epochs() -> None:
    policy = OftenWrong(0.9, label=None)
    scores = reported(np.zeros(2))
    seen = []
    for epoch in range(10):
        seen.append(hidden(policy, scores, epoch))
        right = np.array([epoch >= 3, True])
        record(
            scores, np.arange(2), loss=np.zeros(2, np.float32), correct=right, confidence=None,
            epoch=epoch,
        )  # fmt: skip
    # Wrong in the three first: 3 of 5 are more than half, 3 of 6 are not
    assert seen == [[], [], [0], [0], [0], [0], [], [], [], []]


def test_no_learning_rate_and_no_weight_changes_and_no_step_is_topped_up() -> None:
    scores = reported(np.zeros(20))
    scores["wrong"] = 4
    chosen = OftenWrong(begins=3).select(one_pool(scores), epoch=4, num_epochs=9)
    assert chosen.weights is None
    assert chosen.lr_factor == 1.0
    assert not chosen.top_up
    assert chosen.figures == {"often_wrong": 20.0}
    assert hidden(OftenWrong(begins=3), scores, 2) == []


def test_all_hidden_rows_are_scored_again_at_the_end_of_every_epoch() -> None:
    slots = np.array([4, 2])
    assert [OftenWrong().due(slots, epoch=epoch).tolist() for epoch in (0, 1)] == [[4, 2]] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.0}, "OftenWrong: fraction is 1.0, expected 0 <= value < 1"),
        ({"begins": 0}, "OftenWrong: begins is 0, expected >= 1; epoch 0 has no predictions"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        OftenWrong(**settings)
