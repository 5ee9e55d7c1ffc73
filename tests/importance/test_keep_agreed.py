"""KeepAgreed hides what was called wrong, the highest losses of each class first, and no more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.history import Candidates, Scores
from importance import KeepAgreed
from tests.importance.rows import LAST_DTYPE, one_pool, reported

NUM_CLASSES = 10  # of the rows that `one_pool` makes

LOSSES = st.sampled_from([0.0, 0.5, 1.0, 2.0, float("inf"), float("nan")])
ROWS = st.tuples(LOSSES, st.booleans(), st.integers(-1, 3)).map(
    lambda row: (row[0], row[0], 0.5, row[1], 0, row[2])
)
POOLS = st.lists(ROWS, min_size=1, max_size=80).map(lambda rows: np.array(rows, LAST_DTYPE))
POLICIES = st.builds(
    KeepAgreed, st.floats(0, 1, exclude_max=True), label=st.sampled_from(["label", None])
)


def hidden(policy: KeepAgreed, rows: Candidates, epoch: int = 5) -> list[int]:
    chosen: list[int] = policy.select(rows, epoch=epoch, num_epochs=None).hidden.tolist()
    return chosen


@given(POLICIES, POOLS)
def test_what_is_hidden_was_called_wrong_and_no_more_than_the_share_of_its_class(
    policy: KeepAgreed, scores: Scores
) -> None:
    rows = one_pool(scores)
    chosen = hidden(policy, rows)
    assert len(set(chosen)) == len(chosen)
    assert not scores["correct"][chosen].any()
    assert (scores["epoch"][chosen] >= 0).all()
    classes = np.arange(len(scores)) % NUM_CLASSES if policy.label else np.zeros(len(scores), int)
    sizes = np.bincount(classes, minlength=NUM_CLASSES)
    taken = np.bincount(classes[chosen], minlength=NUM_CLASSES)
    wrong = ~scores["correct"] & (scores["epoch"] >= 0)
    open_to = np.bincount(classes[wrong], minlength=NUM_CLASSES)
    assert taken.tolist() == np.minimum(np.floor(policy.fraction * sizes), open_to).tolist()


@given(POLICIES, POOLS)
def test_of_each_class_the_highest_losses_go_first(policy: KeepAgreed, scores: Scores) -> None:
    rows = one_pool(scores)
    chosen = hidden(policy, rows)
    loss = np.fmin(scores["loss"], np.inf)
    classes = np.arange(len(scores)) % NUM_CLASSES if policy.label else np.zeros(len(scores), int)
    for slot in np.flatnonzero(~scores["correct"] & (scores["epoch"] >= 0)):
        worse = [other for other in chosen if classes[other] == classes[slot]]
        if slot not in chosen and worse:
            assert loss[slot] <= min(loss[worse])


def test_nothing_is_hidden_before_it_begins() -> None:
    scores = reported(np.arange(20.0))
    scores["correct"] = False
    rows = one_pool(scores)
    policy = KeepAgreed(begins=3)
    assert [len(hidden(policy, rows, epoch)) for epoch in range(5)] == [0, 0, 0, 10, 10]


def test_a_class_of_one_row_keeps_it() -> None:
    scores = reported([1.0])
    scores["correct"] = False
    assert hidden(KeepAgreed(0.99), one_pool(scores)) == []


def test_no_learning_rate_and_no_weight_changes_and_no_step_is_topped_up() -> None:
    scores = reported(np.arange(20.0))
    scores["correct"] = False
    chosen = KeepAgreed().select(one_pool(scores), epoch=4, num_epochs=9)
    assert chosen.weights is None
    assert chosen.lr_factor == 1.0
    assert not chosen.top_up
    assert chosen.figures == {"called_wrong": 20.0}


def test_hidden_rows_are_scored_again_every_so_many_epochs() -> None:
    slots = np.array([4, 2])
    every, never = KeepAgreed(refresh_every=2), KeepAgreed(refresh_every=None)
    assert [len(every.due(slots, epoch=epoch)) for epoch in range(4)] == [2, 0, 2, 0]
    assert len(never.due(slots, epoch=2)) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fraction": 1.0},
            r"KeepAgreed: fraction is 1.0, expected a number in \[0, 1\); 0.3 stands",
        ),
        (
            {"begins": 0},
            "KeepAgreed: begins is 0, expected a whole number >= 1; epoch 0 has no predictions",
        ),
        ({"refresh_every": 0}, "KeepAgreed: refresh_every is 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        KeepAgreed(**settings)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.ones(4, np.float32), "'label' is float32, expected whole numbers"),
        (np.array([0, 1, 2, 10**6]), "goes from 0 to 1000000, expected at most 65536 classes"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels, message) -> None:
    rows = one_pool(reported(np.ones(4)))
    bad = Candidates(
        rows.scores, rows.sample_id, 4, rows.stream, by_field=lambda name: labels
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        KeepAgreed().select(bad, epoch=3, num_epochs=9)


def test_classes_may_begin_anywhere() -> None:
    scores = reported(np.arange(6.0))
    scores["correct"] = False
    rows = one_pool(scores)
    labels = np.array([-7, -7, -7, -7, 3, 3], np.int8)
    shifted = Candidates(scores, rows.sample_id, 6, rows.stream, by_field=lambda name: labels)
    assert sorted(hidden(KeepAgreed(), shifted)) == [2, 3, 5]
