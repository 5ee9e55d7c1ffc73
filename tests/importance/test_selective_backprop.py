"""SelectiveBackprop shows a row the likelier, the higher its loss is among all pools' rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.history import Scores
from importance import SelectiveBackprop
from tests.importance.rows import one_pool, reported

DRAWS = 2000


def hide(policy: SelectiveBackprop, scores: Scores, *, seed: int = 0, epoch: int = 1) -> list[int]:
    rows = one_pool(scores, seed=seed)
    return [int(slot) for slot in policy.select(rows, epoch=epoch, num_epochs=None).hidden]


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.7])
def test_a_row_is_shown_with_the_power_of_its_percentile(fraction: float) -> None:
    """Each row to five standard errors, each tenth of the rows to four."""
    num_rows = 2000
    scores = reported(np.arange(num_rows) / 128)
    hidden = [hide(SelectiveBackprop(fraction), scores, seed=seed) for seed in range(DRAWS)]
    found = np.bincount(np.concatenate(hidden), minlength=num_rows) / DRAWS
    percentile = (np.arange(num_rows) + 0.5) / num_rows
    # A place is one of num_rows: a share is rounded by half a place.
    expected = 1 - percentile ** (fraction / (1 - fraction))
    variance = np.maximum(expected * (1 - expected), 1 / DRAWS) / DRAWS
    assert (np.abs(found - expected) < 5 * np.sqrt(variance) + 0.5 / num_rows).all()
    tenths = (found - expected).reshape(10, -1).mean(axis=1)
    error = np.sqrt(variance.reshape(10, -1).sum(axis=1)) / (num_rows / 10)
    assert (np.abs(tenths) < 4 * error + 0.5 / num_rows).all()


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.8])
def test_about_the_fraction_is_hidden(fraction: float) -> None:
    scores = reported(np.random.default_rng(0).lognormal(size=20_000))
    share = len(hide(SelectiveBackprop(fraction), scores)) / 20_000
    # Three standard errors of independent draws, and what losses in steps of 1/1024 leave.
    assert share == pytest.approx(fraction, abs=0.012)


@given(st.lists(st.sampled_from([0.0, 1.0, np.inf, np.nan]), min_size=1, max_size=40))
def test_a_fraction_of_0_hides_nothing(losses: list[float]) -> None:
    assert hide(SelectiveBackprop(0.0), reported(losses)) == []


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 1.0, 1.0, 9.0, np.inf, np.nan]), min_size=1, max_size=40),
    st.floats(0, 1, exclude_max=True),
)
def test_hidden_slots_are_distinct_and_come_least_worth_first(
    losses: list[float], fraction: float
) -> None:
    hidden = hide(SelectiveBackprop(fraction), reported(losses))
    assert len(set(hidden)) == len(hidden)
    known = [np.fmin(losses[slot], np.inf) for slot in hidden]
    assert known == sorted(known)


def test_rows_that_were_never_reported_are_shown() -> None:
    scores = reported(np.zeros(50))
    scores["epoch"] = -1
    assert hide(SelectiveBackprop(0.9), scores, epoch=0) == []
    scores["epoch"][:10] = 0
    assert set(hide(SelectiveBackprop(0.9), scores)) <= set(range(10))


def test_gradients_are_not_weighted_and_hidden_rows_top_up() -> None:
    rows = one_pool(reported(np.arange(10.0)))
    selection = SelectiveBackprop().select(rows, epoch=1, num_epochs=None)
    assert (selection.weights, selection.lr_factor, selection.top_up) == (None, 1.0, True)


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (None, [])])
def test_hidden_rows_are_due_every_so_many_epochs_or_never(
    every: int | None, expected: list[int]
) -> None:
    policy = SelectiveBackprop(refresh_every=every)
    due = [epoch for epoch in range(1, 5) if len(policy.due(np.array([3]), epoch=epoch))]
    assert due == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.0}, r"fraction is 1.0, expected a number in \[0, 1\); 0.3 stands"),
        ({"refresh_every": 0}, "refresh_every is 0, expected a whole number >= 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"SelectiveBackprop: {message}"):
        SelectiveBackprop(**settings)  # type: ignore[arg-type]
