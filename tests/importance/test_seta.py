"""SeTa shows a window of loss groups that slides from easy to hard; the groups are k-means."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.history import Scores
from importance import SeTa
from importance.seta import group_levels
from tests.importance.rows import one_pool, reported

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=60).map(np.array)


def shown(policy: SeTa, scores: Scores, epoch: int, num_epochs: int | None = 100) -> list[float]:
    rows = one_pool(scores, epoch=epoch)
    chosen = policy.select(rows, epoch=epoch, num_epochs=num_epochs)
    left: list[float] = np.sort(np.delete(scores["loss"], chosen.hidden)).tolist()
    return left


@given(COUNTS, st.integers(1, 8))
def test_each_level_is_in_the_group_of_the_nearest_mean(counts: np.ndarray, wanted: int) -> None:
    group_of, num_groups = group_levels(counts, wanted)
    assert num_groups <= min(wanted, int(np.count_nonzero(counts)))
    assert (num_groups > 0) == counts.any()
    assert (np.diff(group_of) >= 0).all(), "groups do not interlace"
    levels = np.arange(len(counts))
    held = [counts[group_of == group] for group in range(num_groups)]
    assert all(part.sum() for part in held), "each group holds rows"
    means = np.array([
        np.average(levels[group_of == group], weights=part) for group, part in enumerate(held)
    ])  # fmt: skip
    for level in np.flatnonzero(counts):
        distance = np.abs(means - level)
        assert distance[group_of[level]] == pytest.approx(distance.min())


def test_clusters_that_lie_apart_are_the_groups() -> None:
    counts = np.zeros(1000, np.int64)
    counts[[10, 11, 12, 300, 301, 900]] = 5
    group_of, num_groups = group_levels(counts, 3)
    assert num_groups == 3
    assert group_of[[10, 11, 12, 300, 301, 900]].tolist() == [0, 0, 0, 1, 1, 2]


def test_the_window_slides_from_easy_to_hard_and_begins_anew() -> None:
    scores = reported(np.repeat([0.0, 1.0, 2.0, 3.0], 5))
    policy = SeTa(groups=4, window=0.5)
    seen = [sorted(set(shown(policy, scores, epoch))) for epoch in range(1, 6)]
    assert seen == [[1, 2], [2, 3], [0, 1], [1, 2], [2, 3]]


def test_epoch_0_and_the_end_show_all_but_the_draw() -> None:
    scores = reported(np.repeat([0.0, 1.0, 2.0, 3.0], 5))
    policy = SeTa(0.2, groups=4, window=0.5, delta=0.5)
    assert [len(shown(policy, scores, epoch, 10)) for epoch in (0, 5, 9)] == [16, 16, 16]
    assert len(shown(policy, scores, 4, 10)) < 12
    first, second = (shown(policy, scores, epoch, 10) for epoch in (5, 9))
    assert first != second, "each epoch draws anew"


def test_rows_that_were_never_reported_are_shown_and_in_no_group() -> None:
    scores = reported([0.0, 1.0, np.inf, np.inf])
    scores["epoch"][2:] = -1
    assert shown(SeTa(groups=2, window=0.5), scores, 1) == [1.0, np.inf, np.inf]
    scores["epoch"] = -1
    assert len(shown(SeTa(groups=2, window=0.5), scores, 1)) == 4


def test_equal_losses_are_one_group_which_is_shown() -> None:
    scores = reported([0.5] * 9)
    assert [len(shown(SeTa(), scores, epoch)) for epoch in range(4)] == [9] * 4
    chosen = SeTa().select(one_pool(scores), epoch=3, num_epochs=9)
    assert chosen.figures == {"loss_groups": 1.0, "first_group": 0.0}
    assert (chosen.weights, chosen.lr_factor, chosen.top_up) == (None, 1.0, False)


@given(st.lists(st.floats(0, 20, width=32), min_size=1, max_size=60), st.integers(0, 20))
def test_some_rows_are_always_shown(losses: list[float], epoch: int) -> None:
    assert shown(SeTa(groups=7, window=0.1), reported(losses), epoch)


def test_no_row_is_passed_forward_again() -> None:
    assert len(SeTa().due(np.array([4, 2]), epoch=1)) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.0}, r"SeTa: fraction is 1.0, expected a number in \[0, 1\); 0.3 stands"),
        (
            {"groups": 0},
            r"SeTa: groups is 0, expected a whole number in \[1, 16384\]; 10 is the published",
        ),
        ({"window": 0.0}, r"SeTa: window is 0.0, expected a number in \(0, 1\]; 0.5 shows half"),
        ({"delta": 1.5}, "SeTa: delta is 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        SeTa(**settings)


def test_a_schedule_by_fractions_needs_the_length_of_the_run() -> None:
    with pytest.raises(ValueError, match=r"SeTa: at epoch 1 the length of the run is not known.*"):
        SeTa().select(one_pool(reported([0.5])), epoch=1, num_epochs=None)
