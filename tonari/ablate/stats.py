"""Paired differences over seeds, and what may be said of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Student's t, 97.5 %, for 1 to 30 degrees of freedom
T_QUANTILES = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class Mean:
    """Mean and standard deviation over seeds; no deviation of one seed."""

    mean: float
    deviation: float | None
    num_seeds: int


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences, and the bounds of its 95 % interval; none with one pair."""

    mean: float
    low: float | None
    high: float | None
    num_seeds: int


def t_quantile(degrees: int) -> float:
    """Find the 97.5 % quantile of Student's t distribution.

    Args:
        degrees: Degrees of freedom, >= 1.
    """
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    z = NORMAL_QUANTILE
    # The first two terms of its expansion about the normal one: right to 4 digits from 31 on
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Average at least one seed's values."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return Mean(mean, None, n)
    return Mean(mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1)), n)


def paired_difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Compare an arm with its baseline by the seeds that both have; None where there is none.

    Args:
        arm: Its figure for each seed.
        baseline: Likewise.
    """
    gaps = [arm[seed] - baseline[seed] for seed in sorted(arm.keys() & baseline.keys())]
    if not gaps:
        return None
    found = mean_over_seeds(gaps)
    if found.deviation is None:
        return Difference(found.mean, None, None, 1)
    n = found.num_seeds
    reach = t_quantile(n - 1) * found.deviation / math.sqrt(n)
    return Difference(found.mean, found.mean - reach, found.mean + reach, n)


def paired_ratio(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """Compare two positive figures by the seeds that both have: geometric mean of their ratios.

    Args:
        arm: Its figure for each seed; seeds where either is not positive are left out.
        baseline: Likewise.

    Returns:
        The mean ratio and the bounds of its interval, computed on logarithms.
    """
    found = paired_difference(_logarithms(arm), _logarithms(baseline))
    if found is None or found.low is None or found.high is None:
        return found and Difference(math.exp(found.mean), None, None, found.num_seeds)
    low, high = math.exp(found.low), math.exp(found.high)
    return Difference(math.exp(found.mean), low, high, found.num_seeds)


def negated(found: Difference) -> Difference:
    """The same comparison, seen from the other side."""
    if found.low is None or found.high is None:
        return Difference(-found.mean, None, None, found.num_seeds)
    return Difference(-found.mean, -found.high, -found.low, found.num_seeds)


def _logarithms(figures: Mapping[int, float]) -> dict[int, float]:
    return {seed: math.log(value) for seed, value in figures.items() if value > 0}


def direction(difference: Difference | None) -> str:
    """Say on which side of 0 the interval lies: "better", "worse", or "undecided"."""
    if difference is None or difference.low is None or difference.high is None:
        return "undecided"
    if difference.low > 0:
        return "better"
    return "worse" if difference.high < 0 else "undecided"


def verdict(difference: Difference | None, *, margin: float) -> str:
    """Say what the interval allows to say.

    Args:
        difference: In points.
        margin: Points that count as no difference.
    """
    if difference is None:
        return "no pair yet"
    if difference.low is None or difference.high is None:
        return "undecided with one seed"
    if -margin <= difference.low and difference.high <= margin:
        return f"within {margin:g} points"
    if difference.high < 0:
        return "worse"
    if difference.low > 0:
        return "better"
    return f"undecided with {difference.num_seeds} seeds"
