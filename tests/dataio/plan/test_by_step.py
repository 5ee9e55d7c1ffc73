"""Datasets are drawn as their weights say up to every step, however the weights change."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataio.base.seeding import key
from dataio.plan.by_step import ByStep, StepOrder, largest_debt_first

NAMES = ("web", "code", "books")


def order(weights: ByStep, *, seed: int = 0) -> StepOrder:
    return StepOrder(weights, NAMES, key(seed, "mixture"))


def shares(num_datasets: int, steps: int, seed: int, *, zeros: bool) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    # Weights that stay for a while, then jump
    values = np.repeat(rng.lognormal(sigma=2, size=(steps // 7 + 1, num_datasets)), 7, axis=0)
    if zeros:
        values[rng.random(values.shape) < 0.3] = 0
        values[values.sum(axis=1) == 0, 0] = 1
    return np.asarray(values[:steps] / values[:steps].sum(axis=1, keepdims=True))


@given(st.integers(1, 9), st.integers(1, 400), st.integers(0, 999), st.booleans())
def test_up_to_any_step_each_is_drawn_as_often_as_its_shares_add_up_to(
    num_datasets: int, steps: int, seed: int, zeros: bool
) -> None:
    due = shares(num_datasets, steps, seed, zeros=zeros)
    chosen = largest_debt_first(due, [0.0] * num_datasets)
    drawn = np.cumsum(chosen[:, None] == np.arange(num_datasets), axis=0)
    assert np.abs(drawn - np.cumsum(due, axis=0)).max() <= 1 + math.log(num_datasets)


@given(st.integers(1, 6), st.integers(1, 300), st.integers(0, 999))
def test_nothing_is_drawn_at_a_step_at_which_it_weighs_0(
    num_datasets: int, steps: int, seed: int
) -> None:
    due = shares(num_datasets, steps, seed, zeros=True)
    chosen = largest_debt_first(due, [0.0] * num_datasets)
    assert (due[np.arange(steps), chosen] > 0).all()


def test_weights_between_points_are_on_a_straight_line() -> None:
    points = ByStep([(2, {"web": 1, "code": 0}), (6, {"web": 1, "code": 3})])
    found = points.shares(("code", "web"), range(9))[:, 0]
    weights = np.array([0, 0, 0, 0.75, 1.5, 2.25, 3, 3, 3])
    assert found == pytest.approx(weights / (weights + 1))


@given(st.integers(0, 60), st.integers(1, 40))
def test_any_steps_are_the_same_whatever_was_asked_before(first: int, count: int) -> None:
    def weights(step: int) -> dict[str, float]:
        return {"web": 1, "code": step / 10, "books": 0.3}

    whole = order(ByStep(weights)).plan(range(120))
    asked = order(ByStep(weights))
    for start in (first, 0, first):
        steps = range(start, start + count)
        assert asked.plan(steps).tolist() == whole[start : start + count].tolist()


def test_the_seed_decides_who_comes_first_among_equals() -> None:
    same = ByStep([(0, dict.fromkeys(NAMES, 1.0))])
    firsts = {int(order(same, seed=seed).plan(range(1))[0]) for seed in range(20)}
    assert firsts == {0, 1, 2}
    drawn = order(same).plan(range(30)).reshape(10, 3)
    assert (np.sort(drawn, axis=1) == [0, 1, 2]).all()


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "points are at steps .*, with weights for nothing; expected at least one"),
        (
            [(-1, {"web": 1})],
            r"at steps \[-1\], .* expected at least one, at increasing steps >= 0",
        ),
        ([(3, {"web": 1}), (3, {"web": 2})], r"at steps \[3, 3\]"),
        ([(0, {"web": 1}), (3, {"code": 2})], r"for \['web'\], \['code'\]; .* of the same names"),
    ],
)
def test_points_that_say_nothing_are_refused(
    points: list[tuple[int, dict[str, float]]], message: str
) -> None:
    with pytest.raises(ValueError, match=f"ByStep: .*{message}"):
        ByStep(points)


def test_weights_of_a_step_are_checked() -> None:
    def lost(step: int) -> dict[str, float]:
        return {"web": 1.0} if step == 2 else dict.fromkeys(NAMES, 1.0)

    with pytest.raises(ValueError, match="step 2 has weights for web, the loaders are books"):
        order(ByStep(lost)).plan(range(4))
    with pytest.raises(ValueError, match=r"step 0 has weights \{.*\}, expected numbers >= 0 that"):
        order(ByStep([(0, dict.fromkeys(NAMES, 0.0))])).plan(range(4))
