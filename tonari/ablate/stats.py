"""Paired differences over seeds, and what may be said of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev

from tonari.report.student import reach_of_mean


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


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Average at least one seed's values."""
    n = len(values)
    return Mean(sum(values) / n, stdev(values) if n > 1 else None, n)


def paired_difference(
    arm: Mapping[int, float], baseline: Mapping[int, float], *, comparisons: int = 1
) -> Difference | None:
    """Compare an arm with its baseline by the seeds that both have; None where there is none.

    Args:
        arm: Its figure for each seed.
        baseline: Likewise.
        comparisons: Intervals that are to hold the truth together, so that each is wider.
    """
    gaps = [arm[seed] - baseline[seed] for seed in sorted(arm.keys() & baseline.keys())]
    if not gaps:
        return None
    mean, reach = sum(gaps) / len(gaps), reach_of_mean(gaps, comparisons=comparisons)
    if reach is None:
        return Difference(mean, None, None, 1)
    return Difference(mean, mean - reach, mean + reach, len(gaps))


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
