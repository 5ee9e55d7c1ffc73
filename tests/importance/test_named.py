"""A policy is made by its name, and what it shares with the others holds for all of them."""

import math
from itertools import pairwise

import pytest

from importance import Kakurenbo, SelectiveBackprop, lr_drops, make_policy, policies


@pytest.mark.parametrize("name", policies())
def test_every_policy_has_a_name(name: str) -> None:
    assert make_policy(name) == policies()[name]()


def test_settings_are_those_of_the_policy() -> None:
    made = make_policy("kakurenbo", fraction=0.1, refresh_every=None)
    assert made == Kakurenbo(0.1, refresh_every=None)
    assert make_policy("selective_backprop", fraction=0.1) == SelectiveBackprop(0.1)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "kakurenba",
            {},
            "'kakurenba' is unknown, expected one of auto, cost_aware.*did you mean 'kakurenbo'",
        ),
        ("infobatch", {"tau": 0.7}, "'infobatch': setting 'tau' is unknown.*fraction, delta; did"),
        ("random", {"fraction": 2.0}, "RandomPrune: fraction is 2.0"),
    ],
)
def test_what_a_policy_does_not_take_is_named(
    name: str, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(name, **settings)


def test_the_drops_of_a_rate_by_steps_are_its_steps() -> None:
    def by_steps(epoch: int) -> float:
        return 0.8 * 0.2 ** sum(epoch >= drop for drop in (60, 120, 160))

    assert lr_drops(by_steps, 200) == (60, 120, 160)
    assert lr_drops(by_steps, 100) == (60,)


def test_the_drops_of_a_cosine_are_its_halvings() -> None:
    def cosine(epoch: int) -> float:
        return 1 + math.cos(math.pi * epoch / 100)

    drops = lr_drops(cosine, 100)
    # A cosine of 0 at half of the run, one of -1/2 at two thirds
    assert drops[:2] == (50, 67)
    levels = [cosine(0), *map(cosine, drops)]
    assert all(low <= high / 2 for high, low in pairwise(levels))
    assert all(cosine(drop - 1) > high / 2 for drop, high in zip(drops, levels, strict=False))


def test_a_warm_up_from_0_a_rate_that_stays_and_one_that_ends_at_0_drop_once_at_most() -> None:
    assert lr_drops(lambda epoch: min(epoch / 5, 1.0), 20) == ()
    assert lr_drops(lambda epoch: 0.1, 20) == ()
    assert lr_drops(lambda epoch: float(epoch < 10), 20) == (10,)


def test_a_rise_after_a_drop_is_no_new_peak() -> None:
    rates = [1.0, 0.4, 0.9, 0.3, 0.1]
    assert lr_drops(lambda epoch: rates[epoch], 5) == (1, 4)
