"""Which dataset of a mixture each step draws from, where the weights change by step. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dataio.base.checked import checked
from dataio.base.permutation import permute
from dataio.base.seeding import Key

Weights = Mapping[str, float]
"""Share of the steps that each dataset gets, by name, in any scale."""


@checked
@dataclass(frozen=True)
class ByStep:
    """Weights of a `Mixture` that change from step to step.

    Steps are counted over the whole run: step ``s`` of epoch ``e`` is ``e * steps + s``. Up to any
    step each dataset has been drawn as often as its shares of the steps so far add up to, within
    1 + ln(number of datasets) steps; so over any window of steps within twice that. A dataset is
    not drawn at a step at which its weight is 0.

    Args:
        weights: A function of the step, the same on all ranks; or points, such as
            ``[(0, {"web": 1, "code": 0}), (1000, {"web": 1, "code": 3})]``: between two points the
            weights are on a straight line, before the first and after the last they stay.

    Raises:
        ValueError: If the points' steps do not increase, or their names differ.

    Source: the largest debt first, one of the rules of apportionment in Tijdeman, The Chairman
    Assignment Problem, Discrete Mathematics 1980; the bound is that of emptying the fullest of
    some cups.
    """

    weights: Callable[[int], Weights] | Sequence[tuple[int, Weights]]

    def __post_init__(self) -> None:
        if callable(self.weights):
            return
        points = list(self.weights)
        steps, names = [step for step, _ in points], [set(weights) for _, weights in points]
        in_order = steps[:1] >= [0] and all(a < b for a, b in pairwise(steps))
        if not in_order or any(name != names[0] for name in names):
            raise ValueError(
                f"ByStep: the points are at steps {steps}, with weights for "
                f"{', '.join(str(sorted(name)) for name in names) or 'nothing'}; expected at least "
                'one, at increasing steps >= 0, of the same names; give for example [(0, {"web": '
                '1, "code": 0}), (1000, {"web": 1, "code": 3})]'
            )

    def shares(self, names: Sequence[str], steps: range) -> NDArray[np.float64]:
        """Compute the share of each step that each dataset is due: float64[steps, names].

        Raises:
            ValueError: If a step's weights are not one number >= 0 for each name, not all 0.
        """
        if callable(self.weights):
            each = [check_weights(self.weights(step), names, when=f"step {step}") for step in steps]
            values = np.array(each, np.float64).reshape(len(steps), len(names))
        else:
            at = [step for step, _ in self.weights]
            points = [
                check_weights(weights, names, when=f"step {step}") for step, weights in self.weights
            ]
            columns = np.array(points).T
            values = np.stack([np.interp(steps, at, column) for column in columns], axis=1)
        return np.asarray(values / values.sum(axis=1, keepdims=True))


class StepOrder:
    """The dataset of each step of a run, by number.

    Args:
        weights: Of the datasets.
        names: Theirs, in the order of their numbers.
        stream: Key of who comes first among those that are due alike.
    """

    def __init__(self, weights: ByStep, names: Sequence[str], stream: Key) -> None:
        self._weights, self._names = weights, names
        self._first = permute(np.arange(len(names)), len(names), stream)
        self._done = 0
        self._owed = [0.0] * len(names)

    def plan(self, steps: range) -> NDArray[np.int64]:
        """int64[len(steps)]: The dataset that each of some steps draws from.

        Time O(steps) where they follow those of the last call, else O(steps since the first).
        """
        if steps.start < self._done:
            self._done, self._owed = 0, [0.0] * len(self._names)
        begun = self._done
        shares = self._weights.shares(self._names, range(begun, steps.stop))[:, self._first]
        drawn = largest_debt_first(shares, self._owed)
        self._done = steps.stop
        return np.asarray(self._first[drawn[steps.start - begun :]])


def largest_debt_first(shares: NDArray[np.float64], owed: list[float]) -> NDArray[np.int64]:
    """Give each step to the one that is owed most, of those that have a share of it.

    Args:
        shares: float64[steps, n]: What each is due of each step, >= 0; a step's sum is 1.
        owed: What each is owed before; changed to what it is owed after.

    Returns:
        int64[steps]: Whom each step is given to; of equal ones the first.
    """
    chosen = np.empty(len(shares), np.int64)
    for step, due in enumerate(shares.tolist()):
        number, most = 0, -math.inf
        for other, share in enumerate(due):
            owed[other] += share
            if share > 0 and owed[other] > most:
                number, most = other, owed[other]
        owed[number] -= 1
        chosen[step] = number
    return chosen


def check_weights(weights: Weights, names: Sequence[str], *, when: str) -> list[float]:
    """Bring weights into the order of names.

    Args:
        weights: Of the datasets.
        names: Theirs.
        when: The epoch or step that they are of, for the message.

    Raises:
        ValueError: If they are not one number >= 0 for each, not all 0.
    """
    if set(weights) != set(names):
        raise ValueError(
            f"Mixture: {when} has weights for {', '.join(sorted(weights))}, the loaders "
            f"are {', '.join(sorted(names))}; give one weight for each"
        )
    values = [float(weights[name]) for name in names]
    if not all(value >= 0 for value in values) or not 0 < sum(values) < math.inf:
        raise ValueError(
            f"Mixture: {when} has weights {dict(weights)}, expected numbers >= 0 that are not all 0"
        )
    return values
