"""Distinguish changes from noise: figures of two runs, each repeated a few times."""

import math
from collections.abc import Sequence
from statistics import fmean, median, variance

from tonari.report.student import tail_of_t

ENOUGH_REPEATS = 3
"""Repeats that a figure needs in both runs; fewer have no useful spread."""

FALSE_ALARMS = 0.01
"""How often two runs that differ in nothing may differ in some figure, at most."""

BORROWED = 8
"""Degrees of freedom with which the typical noise of all figures supports a figure's own."""


def worse_by_chance(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> list[float]:
    """Find how probably chance alone makes each figure fall as much as it did.

    Student's t on logarithms, one-sided. A few repeats show little of a figure's noise, so its
    variance is the larger of its own and the mean of its own, weighted by its degrees of freedom,
    and the median one of all figures, weighted by `BORROWED`.

    Args:
        before: By figure, its repeats; at least two, all > 0.
        after: By figure, likewise; lower is worse.

    Returns:
        By figure: its probability.
    """
    # [figures] each
    samples = [(_logarithms(a), _logarithms(b)) for a, b in zip(before, after, strict=True)]
    own = [_pooled(a, b) for a, b in samples]
    typical = median(own) if len(own) > 1 else None
    found = []
    for (a, b), spread in zip(samples, own, strict=True):
        degrees, borrowed = len(a) + len(b) - 2, spread
        if typical is not None:
            borrowed = (BORROWED * typical + degrees * spread) / (BORROWED + degrees)
            degrees += BORROWED
        error = math.sqrt(max(borrowed, spread) * (1 / len(a) + 1 / len(b)))
        found.append(_tail(fmean(a) - fmean(b), error, degrees))
    return found


def significant(probabilities: Sequence[float], level: float = FALSE_ALARMS) -> list[bool]:
    """Choose which of many figures changed, by Benjamini and Hochberg's rule.

    Where nothing changed, some figure is chosen with a probability of at most ``level``, however
    many there are; where some did, at most that share of the chosen ones is expected to be wrong.

    Args:
        probabilities: By figure, of its change by chance.
        level: See above.

    Returns:
        By figure: whether it changed.
    """
    total = len(probabilities)
    ranked = sorted(probabilities)
    bounds = [p for rank, p in enumerate(ranked, 1) if p <= level * rank / total]
    return [bool(bounds) and p <= bounds[-1] for p in probabilities]


def _logarithms(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]


def _pooled(a: Sequence[float], b: Sequence[float]) -> float:
    squares = variance(a) * (len(a) - 1) + variance(b) * (len(b) - 1)
    return squares / (len(a) + len(b) - 2)


def _tail(difference: float, error: float, degrees: int) -> float:
    if error == 0:
        return 0.0 if difference > 0 else 1.0
    return tail_of_t(difference / error, degrees)
