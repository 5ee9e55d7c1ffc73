"""StoppedLearning hides a row whose last three second differences of the loss are small."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.history import QUANTUM, Scores, record, score_dtype, unscored
from importance import StoppedLearning
from tests.importance.rows import one_pool

LOSSES = st.lists(st.integers(0, 6).map(lambda quanta: quanta / 64), min_size=0, max_size=8)


def after(losses: list[float]) -> Scores:
    """One row, which was reported so."""
    scores = unscored(1, score_dtype(StoppedLearning().columns))
    for epoch, loss in enumerate(losses):
        record(
            scores, np.array([0]), loss=np.array([loss], np.float32), correct=None,
            confidence=None, epoch=epoch,
        )  # fmt: skip
    return scores


def is_hidden(policy: StoppedLearning, losses: list[float]) -> bool:
    rows = one_pool(after(losses))
    return len(policy.select(rows, epoch=len(losses), num_epochs=None).hidden) == 1


@given(LOSSES, st.sampled_from([1 / 64, 1 / 40, 1 / 16]))
def test_a_row_is_hidden_where_its_loss_runs_straight(losses: list[float], below: float) -> None:
    wanted = len(losses) >= 5 and np.abs(np.diff(losses, n=2))[-3:].mean() < below
    assert is_hidden(StoppedLearning(below), losses) == wanted


def test_a_straight_fall_is_as_still_as_a_loss_that_stays() -> None:
    policy = StoppedLearning()
    assert is_hidden(policy, [0.25] * 5)
    assert is_hidden(policy, [1.0, 0.75, 0.5, 0.25, 0.0])
    assert not is_hidden(policy, [0.25] * 4), "five losses are needed"
    assert not is_hidden(policy, [0.25, 0.25, 0.25, 0.25, 0.5])
    assert is_hidden(policy, [9.0, 0.25, 0.25, 0.25, 0.25, 0.25]), "what was long ago is forgotten"


def test_one_thousandth_is_three_quanta_of_three_differences() -> None:
    for quanta, wanted in ((3, True), (4, False)):
        assert is_hidden(StoppedLearning(), [0.5, 0.5, 0.5, 0.5, 0.5 + quanta * QUANTUM]) == wanted


def test_a_loss_that_was_infinite_hides_nothing() -> None:
    policy = StoppedLearning(100.0)
    assert not is_hidden(policy, [np.inf] * 6)
    assert not is_hidden(policy, [0.5, 0.5, np.inf, 0.5, 0.5])


def test_a_row_comes_back_once_its_loss_moves() -> None:
    slots = np.array([4, 2])
    every, never = StoppedLearning(refresh_every=2), StoppedLearning(refresh_every=None)
    assert [len(every.due(slots, epoch=epoch)) for epoch in range(4)] == [2, 0, 2, 0]
    assert len(never.due(slots, epoch=2)) == 0
    assert not is_hidden(StoppedLearning(), [0.25] * 6 + [1.0])


def test_any_number_of_rows_are_judged_alike() -> None:
    one = after([0.25] * 5)
    many = np.repeat(one, 70_000)
    many["loss_2"][1::2] = 3.0
    chosen = StoppedLearning().select(one_pool(many), epoch=5, num_epochs=None)
    assert chosen.hidden.tolist() == list(range(0, 70_000, 2))
    assert (chosen.weights, chosen.lr_factor, chosen.top_up) == (None, 1.0, False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"below": 0.0},
            r"StoppedLearning: below is 0.0, expected a number in \(0, inf\); 0.001 is",
        ),
        ({"below": float("nan")}, "StoppedLearning: below is nan"),
        ({"refresh_every": 0}, "StoppedLearning: refresh_every is 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        StoppedLearning(**settings)
