"""How bandwidth grows with readers: fairness, the knee, and a curve that saturates."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tonari.bench.storage.results.results import Phase, Repeat, Scaling

ENOUGH = 0.9
"""Part of the largest bandwidth that is reached at the knee."""
FEWEST_POINTS = 3
"""The curve has two parameters: through two points it would always fit."""


class SaturationCurve(NamedTuple):
    """n -> most x n / (n + half)."""

    most: float
    half: float
    error_fraction: float
    """Root mean square of the relative errors at the points."""


def scale(phases: Sequence[Phase]) -> Scaling | None:
    """Find how one pattern scales, from its phases at one temperature; None without bytes.

    Where clients x threads is the same by several ways, the fastest stands for it.
    """
    best: dict[int, Phase] = {}
    for phase in phases:
        readers = phase.clients * phase.threads
        if not phase.repeats or not bandwidth(phase):
            continue
        if readers not in best or bandwidth(phase) > bandwidth(best[readers]):
            best[readers] = phase
    if not best:
        return None
    numbers = sorted(best)
    rates = [bandwidth(best[number]) for number in numbers]
    curve = fit(numbers, rates)
    return Scaling(
        pattern=phases[0].pattern, wanted=phases[0].wanted, readers=numbers, bytes_per_s=rates,
        fairness=[_fairness(best[number].repeats) for number in numbers],
        knee=knee(numbers, rates),
        fitted_most_bytes_per_s=None if curve is None else curve.most,
        fitted_half=None if curve is None else curve.half,
        fit_error_fraction=None if curve is None else curve.error_fraction,
    )  # fmt: skip


def bandwidth(phase: Phase) -> float:
    """Take the median over a phase's repeats, of all clients together."""
    return statistics.median(repeat.bytes_per_s for repeat in phase.repeats)


def jain(rates: Sequence[float]) -> float:
    """Measure how alike rates are: 1 where all are the same, 1/n where one has everything.

    Source: Jain, Chiu, Hawe, DEC-TR-301, 1984.
    """
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if squares else 1.0


def _fairness(repeats: Sequence[Repeat]) -> float:
    return statistics.median(
        jain(
            [
                num_bytes / seconds if seconds else 0.0
                for num_bytes, seconds in zip(
                    repeat.bytes_of_client, repeat.seconds_of_client, strict=True
                )
            ]
        )
        for repeat in repeats
    )


def knee(readers: Sequence[int], rates: Sequence[float]) -> int:
    """Find the fewest readers that reach 90 % of the largest bandwidth."""
    return min(
        number for number, rate in zip(readers, rates, strict=True) if rate >= ENOUGH * max(rates)
    )


def fit(readers: Sequence[int], rates: Sequence[float]) -> SaturationCurve | None:
    """Fit a curve that saturates, by least squares of relative errors.

    Returns:
        The curve; None with too few points, or where they show no end of the growth.
    """
    n, rate = np.array(readers, np.float64), np.array(rates, np.float64)
    if len(n) < FEWEST_POINTS:
        return None
    # n / rate = n / most + half / most is a line, and has the same relative errors.
    line = np.stack([rate, rate / n], axis=1)
    slope, start = np.linalg.lstsq(line, np.ones(len(n)), rcond=None)[0].tolist()
    if start < 0:
        # More readers are slower: the nearest curve of this kind is flat.
        slope, start = float(rate.sum() / (rate * rate).sum()), 0.0
    if slope <= 0:
        return None
    most, half = 1 / slope, start / slope
    return SaturationCurve(most, half, _error(most * n / (n + half), rate))


def _error(fitted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean((fitted / measured - 1) ** 2)))
