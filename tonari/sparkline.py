"""Numbers drawn in a line of text."""

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
GAP, BEYOND = "·", "∞"


def sparkline(values: Sequence[float]) -> str:
    """Draw a bar a number, from the lowest to the highest; a gap for nan, and what is infinite."""
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low
    return "".join(_bar(value, low, span) for value in values)


def _bar(value: float, low: float, span: float) -> str:
    if math.isnan(value):
        return GAP
    if not math.isfinite(value):
        return BEYOND
    share = (value - low) / span if span else 0.0
    return BARS[min(int(share * len(BARS)), len(BARS) - 1)]
