"""Durations of single operations -> percentiles and a histogram."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tonari.bench.storage.results.results import Operation

EDGES_S = np.logspace(-7, 3, 101)
"""Ten bins a decade, from 100 ns to a quarter of an hour: the same ones always, to be compared."""


def summarise(name: str, seconds_of_repeat: Sequence[NDArray[np.floating]]) -> Operation:
    """Describe how long operations of one kind took.

    Args:
        name: Of the kind.
        seconds_of_repeat: float[n] of each repeat: One duration each, n >= 1 in all.
    """
    repeats = [np.sort(seconds.astype(np.float64)) for seconds in seconds_of_repeat]
    ordered = np.sort(np.concatenate(repeats))
    counts, edges = _histogram(ordered)
    return Operation(
        name=name, count=len(ordered), mean_s=float(ordered.mean()),
        p50_s=_within(ordered, 0.5), p90_s=_within(ordered, 0.9), p99_s=_within(ordered, 0.99),
        p999_s=_within(ordered, 0.999), max_s=float(ordered[-1]),
        p50_of_repeat_s=[_within(repeat, 0.5) for repeat in repeats if len(repeat)],
        edges_s=edges.tolist(), counts=counts.tolist(),
    )  # fmt: skip


def _within(ordered: NDArray[np.float64], fraction: float) -> float:
    """Find the least duration that this fraction did not exceed: one that was measured."""
    # Rounded, as 0.9 * 10 is a little more than 9.
    return float(ordered[max(int(np.ceil(round(fraction * len(ordered), 6))) - 1, 0)])


def _histogram(ordered: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    inside = np.clip(ordered, EDGES_S[0], EDGES_S[-1])
    counts = np.histogram(inside, EDGES_S)[0].astype(np.int64)
    first, last = np.flatnonzero(counts)[[0, -1]]
    return counts[first : last + 1], EDGES_S[first : last + 2]
