"""What a row costs in the next epoch, by what rows have cost so far. Pure.

Ranks measure for themselves and add up whole numbers, so that all of them price a row alike.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PER_DOUBLING = 4
"""Rates are rounded to so many levels for each doubling: a measurement that differs by a few
percent, as of another run, mostly prices rows alike."""

MB = 10**6
UNKNOWN = np.float32(1.0)
"""What every row costs before anything was measured."""

FIGURES = ("source_s_per_mb", "batch_s_per_mb", "step_s_per_row", "exposed_fraction")
"""What the rates are called among an epoch's figures."""


@dataclass(frozen=True)
class SpentCosts:
    """What one rank spent since it began, on rows of so many bytes.

    Attributes:
        source_s: Reading rows that do not stay in the cache, by the thread that reads them.
        source_bytes: Of these rows, as they are stored.
        batch_s: Making batches: reading the cache, decoding and transforms; of several threads
            their mean.
        batch_bytes: Of these batches' rows, as they are stored.
        step_s: The median time that the caller takes between two batches.
        window_wait_s: Waiting for rows from the source.
        total_s: Waiting for batches, and between two of them.
    """

    source_s: float
    source_bytes: int
    batch_s: float
    batch_bytes: int
    step_s: float
    window_wait_s: float
    total_s: float

    def to_array(self) -> NDArray[np.int64]:
        """int64[8]: Nanoseconds and bytes, and how many ranks took steps: they can be added."""
        spent = (self.source_s, self.batch_s, self.step_s, self.window_wait_s, self.total_s)
        source, batch, step, waited, total = (round(seconds * 1e9) for seconds in spent)
        amounts = [source, self.source_bytes, batch, self.batch_bytes, step, step > 0]
        return np.array([*amounts, waited, total], np.int64)


@dataclass(frozen=True)
class CostRates:
    """What rows cost on a rank; 0: not measured.

    The source is read while batches are made and trained. As long as steps wait for the source, a
    row from the cache makes an epoch no longer; so its part counts as far as it is not hidden
    behind the source. The more rows of the cache are trained, the less do steps wait, and the more
    do these rows cost: the two come to rest where an epoch reads as long as it computes, or where
    all rows of the cache are trained.

    Attributes:
        source_s_per_mb: Of a row that is read from the source, beside the rest.
        batch_s_per_mb: Of a row that becomes a part of a batch.
        step_s_per_row: Of a row that is trained.
        exposed_fraction: Of the time of epochs, what did not wait for the source: the part of the
            last two that counts.
    """

    source_s_per_mb: float = 0.0
    batch_s_per_mb: float = 0.0
    step_s_per_row: float = 0.0
    exposed_fraction: float = 0.0

    def to_figures(self) -> dict[str, float]:
        """Name them for ``Selection.figures``, which are saved and handed on."""
        return {name: getattr(self, name) for name in FIGURES}


def find_rates(
    total: NDArray[np.int64], *, batch_size: int, before: Mapping[str, float]
) -> CostRates:
    """Find the rates from what all ranks spent.

    Args:
        total: int64[8]: The sum of all ranks' `SpentCosts.to_array`.
        batch_size: Rows a batch.
        before: Figures of the epoch before, for what was not measured since, as after a restart.
    """
    source_ns, source_bytes, batch_ns, batch_bytes, step_ns, num_ranks, waited_ns, total_ns = (
        total.tolist()
    )
    found = (
        (source_ns, source_bytes / MB),
        (batch_ns, batch_bytes / MB),
        (step_ns, num_ranks * batch_size),
        ((total_ns - waited_ns) * 1e9, total_ns),
    )
    rates = {}
    for name, (spent_ns, amount) in zip(FIGURES, found, strict=True):
        measured = spent_ns * 1e-9 / amount if amount else 0.0
        rates[name] = _rounded(measured) if measured else float(before.get(name, 0.0))
    return CostRates(**rates)


def price_rows(
    num_bytes: NDArray[np.int64],
    is_missing: NDArray[np.bool_],
    *,
    rates: CostRates,
    mean_bytes: int,
) -> NDArray[np.float32]:
    """Price rows.

    Args:
        num_bytes: int64[num_slots]: Of each row as it is stored; 0: not known.
        is_missing: bool[num_slots]: Whether the row would be read from the source.
        rates: The same on all ranks.
        mean_bytes: Of the rows of known size, for those of unknown size.

    Returns:
        float32[num_slots]: Seconds of a rank, > 0.
    """
    if rates == CostRates():
        return np.full(len(num_bytes), UNKNOWN)
    mb = np.where(num_bytes > 0, num_bytes, mean_bytes) / MB
    cost_s = rates.exposed_fraction * (rates.step_s_per_row + mb * rates.batch_s_per_mb)
    cost_s += np.where(is_missing, mb * rates.source_s_per_mb, 0.0)
    least = np.float32(1e-6)
    return np.maximum(cost_s.astype(np.float32), least)


def _rounded(rate: float) -> float:
    return float(2.0 ** (round(PER_DOUBLING * math.log2(rate)) / PER_DOUBLING))
