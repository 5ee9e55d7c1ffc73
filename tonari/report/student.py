"""Student's t: how much a few repeats or seeds show of a mean."""

import math
from collections.abc import Sequence
from statistics import stdev

from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95


def tail_of_t(t: float, degrees: int) -> float:
    """Find the probability that Student's t exceeds a value.

    Args:
        t: The value.
        degrees: Degrees of freedom, >= 1.
    """
    return float(stdtr(degrees, -t))


def t_quantile(degrees: int, *, comparisons: int = 1) -> float:
    """Find how far Student's t is from 0 at most, either way, with a probability of `CONFIDENCE`.

    Args:
        degrees: Degrees of freedom, >= 1.
        comparisons: All of so many, whatever they have in common (Bonferroni), >= 1.
    """
    return float(stdtrit(degrees, 1 - (1 - CONFIDENCE) / (2 * comparisons)))


def reach_of_mean(values: Sequence[float], *, comparisons: int = 1) -> float | None:
    """Find half the width of the interval around a mean that holds the true one.

    Args:
        values: Those that the mean is of; they are independent of one another.
        comparisons: Intervals that together hold what they should, see `t_quantile`.

    Returns:
        The distance from the mean to either bound, with `CONFIDENCE`; None for fewer than two
        values, which have no spread.
    """
    if len(values) < 2:
        return None
    quantile = t_quantile(len(values) - 1, comparisons=comparisons)
    return quantile * stdev(values) / math.sqrt(len(values))
