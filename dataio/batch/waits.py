"""How long batches are waited for, and what for: histograms in constant memory."""

import math
from collections.abc import Mapping

import numpy as np

PER_DOUBLING = 8
"""Buckets of a histogram for each doubling: percentiles are right within 7 %."""

SHORTEST_S = 2.0**-20
NUM_BUCKETS = 32 * PER_DOUBLING

BLOCKED = ("source", "disk")
"""Causes that the loop's own thread is blocked on: rows that are read from the source, or ahead
from the node's disk."""
MAKING = ("decode", "copy", "transform", "processes")
"""Causes that others work on meanwhile: the fields of rows, decoded or else copied; transforms and
collates; or worker processes, which do not say which."""
CAUSES = (*BLOCKED, *MAKING)

PERCENTILES = (50, 95, 99)
NOT_WORTH_S = 1e-4
"""Shorter waits are not divided by their causes: that would take longer than some batches."""


class Waits:
    """A histogram of durations, from a microsecond to an hour."""

    def __init__(self) -> None:
        self._counts = [0] * NUM_BUCKETS
        self.total_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count one."""
        self.total_s += duration_s
        fraction, exponent = math.frexp(duration_s / SHORTEST_S)
        place = (exponent - 1) * PER_DOUBLING + int((fraction - 0.5) * (2 * PER_DOUBLING))
        self._counts[min(max(place, 0), NUM_BUCKETS - 1)] += 1

    def percentile(self, percent: float, *, of: int | None = None) -> float:
        """Seconds that this share of the durations stays below; 0 before the first.

        Args:
            percent: The share.
            of: Durations in all; those that were not added took no time. None: all were added.
        """
        ends = np.cumsum(self._counts)
        num_zero = 0 if of is None else of - ends[-1]
        rank = math.ceil((ends[-1] + num_zero) * percent / 100) - num_zero
        if ends[-1] == 0 or rank <= 0:
            return 0.0
        doubling, part = divmod(int(np.searchsorted(ends, rank)), PER_DOUBLING)
        return float(SHORTEST_S * 2**doubling * (1 + (part + 0.5) / PER_DOUBLING))

    def to_stats(self, name: str, *, of: int | None = None) -> dict[str, float]:
        """Give the total and the percentiles as figures, such as ``wait_s`` and ``wait_p50_s``."""
        shares = {f"{name}_p{p}_s": self.percentile(p, of=of) for p in PERCENTILES}
        return {f"{name}_s": self.total_s, **shares}


class WaitCauses:
    """Divides waits by what was waited for.

    A batch waits for what blocks its own thread; of the rest each cause has the share that it had
    in making batches since the wait before.
    """

    def __init__(self) -> None:
        self._waits: dict[str, Waits] = {}
        self._before: Mapping[str, float] = dict.fromkeys(CAUSES, 0.0)

    def add(self, wait_s: float, spent: Mapping[str, float]) -> None:
        """Divide a wait.

        Args:
            wait_s: Its length.
            spent: Seconds by cause since the loader was made: those that blocked, and those of
                making batches, on all threads; absent is 0.
        """
        left, before, self._before = wait_s, self._before, spent
        parts = {name: spent.get(name, 0.0) - before.get(name, 0.0) for name in CAUSES}
        for name in BLOCKED:
            parts[name] = min(parts[name], left)
            left -= parts[name]
        made_s = sum(parts[name] for name in MAKING)
        for name in MAKING:
            parts[name] *= left / made_s if made_s > 0 else 0.0
        if made_s <= 0:
            parts["copy"] = left
        for name, part_s in parts.items():
            if part_s > 0:
                self._waits.setdefault(name, Waits()).add(part_s)

    def to_stats(self, *, batches: int) -> dict[str, float]:
        """Give the figures of the causes that there were, such as ``wait_decode_p95_s``."""
        found: dict[str, float] = {}
        for name in CAUSES:
            if name in self._waits:
                found |= self._waits[name].to_stats(f"wait_{name}", of=batches)
        return found
