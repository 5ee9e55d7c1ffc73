"""InfoBatch hides rows of low loss, and the weighted gradient stays the full one in expectation."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

from dataio.plan.history import QUANTUM, Scores
from dataio.plan.policies import Importance, Selection
from importance import InfoBatch, RandomPrune
from tests.importance.rows import one_pool, reported, scattered, select_in_pools

NUM_EPOCHS = 80
LOSSES = st.lists(
    st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0, 7.0, 3e38, np.inf, np.nan]), min_size=1, max_size=60
)


def select(policy: Importance, scores: Scores, *, epoch: int = 1, seed: int = 0) -> Selection:
    return policy.select(one_pool(scores, seed=seed), epoch=epoch, num_epochs=NUM_EPOCHS)


def weights_of(selection: Selection) -> NDArray[np.float32]:
    assert selection.weights is not None
    return selection.weights


@given(LOSSES, st.floats(0, 1, exclude_max=True), st.integers(0, 999))
def test_only_rows_below_the_mean_are_hidden_and_their_exact_share(
    losses: list[float], fraction: float, seed: int
) -> None:
    hidden = select(InfoBatch(fraction), reported(losses), seed=seed).hidden
    # A loss of 3e38 counts as a million, so that the mean stays a number.
    finite = np.minimum([x for x in losses if np.isfinite(x)], 2.0**20)
    low = [x for x in losses if np.isfinite(x) and x < finite.mean()]
    assert len(hidden) == int(fraction * len(low))
    assert all(losses[slot] in low for slot in hidden)
    assert len(set(hidden.tolist())) == len(hidden)


@given(LOSSES, st.floats(0, 1, exclude_max=True), st.integers(0, 999))
def test_visible_weights_sum_to_the_number_of_rows(
    losses: list[float], fraction: float, seed: int
) -> None:
    selection = select(InfoBatch(fraction), reported(losses), seed=seed)
    weights = weights_of(selection)
    assert weights.dtype == np.float32
    visible = np.delete(weights.astype(np.float64), selection.hidden)
    assert visible.sum() == pytest.approx(len(losses), rel=1e-6)


def test_rows_of_high_loss_weigh_one_and_the_low_ones_that_stay_more() -> None:
    scores = reported([*np.zeros(10), *np.full(6, 5.0)])
    selection = select(InfoBatch(0.5), scores)
    weights = weights_of(selection)
    assert len(selection.hidden) == 5
    assert set(selection.hidden.tolist()) < set(range(10))
    assert weights[10:].tolist() == [1.0] * 6
    assert np.delete(weights, selection.hidden)[:5].tolist() == [2.0] * 5


@pytest.mark.parametrize("policy", [InfoBatch(0.45, delta=1.0), RandomPrune(0.45, delta=1.0)])
def test_the_weighted_gradient_is_the_full_gradient_in_expectation(policy: Importance) -> None:
    """Of a network over 1,000 draws: its length to 3 standard errors, each of 31 parts to 4."""
    draw = torch.Generator().manual_seed(2)
    points = torch.randn(37, 3, generator=draw, dtype=torch.float64)
    labels = torch.randint(3, (37,), generator=draw)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def losses() -> torch.Tensor:
        return cross_entropy(model(points), labels, reduction="none")

    def gradient(weights: torch.Tensor) -> NDArray[np.float64]:
        parts = torch.autograd.grad((losses() * weights).sum(), list(model.parameters()))
        return np.asarray(torch.cat([part.ravel() for part in parts]).numpy())

    scores = reported(np.round(losses().detach().numpy() / QUANTUM) * QUANTUM)
    sums = []
    for seed in range(1000):
        selection = select(policy, scores, seed=seed)
        assert len(selection.hidden) > 0
        weights = weights_of(selection).astype(np.float64)
        weights[selection.hidden] = 0
        sums.append(gradient(torch.from_numpy(weights)))
    full = gradient(torch.ones(37, dtype=torch.float64))
    errors = np.array(sums) - full
    along = errors @ full
    assert abs(np.mean(along)) < 3 * np.std(along, ddof=1) / np.sqrt(1000)
    spread = np.std(errors, axis=0, ddof=1)
    assert (np.abs(errors.mean(axis=0)) < 4 * spread / np.sqrt(1000)).all()


def test_every_low_row_is_hidden_equally_often() -> None:
    scores = reported([*np.zeros(20), *np.full(10, 5.0)])
    hidden = [select(InfoBatch(0.3), scores, seed=seed).hidden for seed in range(2000)]
    frequency = np.bincount(np.concatenate(hidden), minlength=30)[:20] / len(hidden)
    # Five standard errors of a share of 0.3 in 2000 draws.
    assert np.abs(frequency - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / 2000)


def test_epoch_0_hides_nothing_and_a_row_never_reported_stays() -> None:
    unseen = reported(np.full(10, np.inf))
    unseen["epoch"] = -1
    selection = select(InfoBatch(0.5), unseen, epoch=0)
    assert len(selection.hidden) == 0
    assert weights_of(selection).tolist() == [1.0] * 10
    unseen["loss"][:4] = [0, 0, 0, 9]
    hidden = [select(InfoBatch(0.9), unseen, seed=seed).hidden.tolist() for seed in range(20)]
    assert all(len(slots) == 2 and set(slots) < {0, 1, 2} for slots in hidden)


def test_the_end_of_the_run_is_full_data() -> None:
    scores = reported([*np.zeros(10), *np.full(10, 5.0)])
    chosen = [select(InfoBatch(), scores, epoch=epoch) for epoch in range(NUM_EPOCHS)]
    assert [len(selection.hidden) for selection in chosen] == [5] * 70 + [0] * 10
    assert all(selection.weights is None for selection in chosen[70:])


def test_pools_share_one_mean_and_one_number_of_rows_to_hide() -> None:
    # The first pool is easy, the second hard: the mean of each alone would choose other rows.
    scores = reported([*np.arange(8) / 8, *np.arange(8) + 4.0])
    pools = [np.arange(8), np.arange(8, 16)]
    easy, hard = select_in_pools(
        InfoBatch(0.5), scores, pools, epoch=1, num_epochs=NUM_EPOCHS
    )  # fmt: skip
    assert (len(easy.hidden), len(hard.hidden)) == (4, 0)
    assert set(weights_of(easy).tolist()) == {2.0}
    assert set(weights_of(hard).tolist()) == {1.0}


@given(LOSSES, st.integers(2, 4), st.integers(0, 99))
def test_the_weights_of_all_pools_sum_to_the_number_of_rows(
    losses: list[float], num_pools: int, seed: int
) -> None:
    pools = scattered(len(losses), num_pools, seed=seed)
    chosen = select_in_pools(InfoBatch(), reported(losses), pools, epoch=1, num_epochs=NUM_EPOCHS)
    visible = [np.delete(weights_of(s).astype(np.float64), s.hidden).sum() for s in chosen]
    assert sum(visible) == pytest.approx(len(losses), rel=1e-6)


def test_hidden_rows_keep_their_loss_short_steps_are_padded_and_the_rate_stays() -> None:
    selection = select(InfoBatch(), reported(np.arange(10.0)))
    assert len(selection.hidden) > 0
    assert not selection.top_up
    assert selection.lr_factor == 1.0
    assert [len(InfoBatch().due(selection.hidden, epoch=epoch)) for epoch in range(4)] == [0] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.0}, r"fraction is 1.0, expected a number in \[0, 1\); 0.3 stands"),
        ({"delta": -0.1}, r"delta is -0.1, expected a number in \[0, 1\]; 0.3 stands"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"InfoBatch: {message}"):
        InfoBatch(**settings)


def test_a_run_of_unknown_length_cannot_be_annealed() -> None:
    rows = one_pool(reported(np.arange(10.0)))
    with pytest.raises(ValueError, match=r"loader\.epochs\(n\)`, or use InfoBatch\(delta=1\.0\)"):
        InfoBatch().select(rows, epoch=0, num_epochs=None)
