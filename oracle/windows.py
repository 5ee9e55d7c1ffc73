"""Rows that a quota leaves no room for: read from the source ahead of their steps. Pure.

As `dataio.pool.streaming` does it: in windows of steps, one of which is read while the steps of the
one before are trained.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dataio.cache.quota import DENSE_ROW_BYTES, Need, plan_budget
from dataio.pool.streaming import FILL, FIRST_WINDOW_BYTES


@dataclass(frozen=True, kw_only=True)
class Quota:
    """How a node's rows share a quota.

    Attributes:
        resident_rows: That stay.
        missing_rows: The others.
        window_rows: Of these, what each replica holds at a time, beside as many that are on their
            way; 0: none is missing.
        row_bytes: Mean, as rows lie in the cache.
        source_row_bytes: Read from the source for one; mean.
        local_size: Replicas on the node.
    """

    resident_rows: int
    missing_rows: int
    window_rows: int
    row_bytes: float
    source_row_bytes: float
    local_size: int

    def windows(self, *, visible_fraction: float = 1.0) -> Iterator[tuple[float, float]]:
        """Yield an epoch's windows: the share of its missing rows, and bytes that the node reads.

        A window of rows that are read with their neighbours is a pass over all that are missing,
        of each replica.

        Args:
            visible_fraction: Of the rows.
        """
        total = round(self.missing_rows * visible_fraction / self.local_size)
        most, left = max(int(FIRST_WINDOW_BYTES / max(self.row_bytes, 1.0)), 1), total
        while left > 0:
            rows = min(most, self.window_rows, left)
            one = self.missing_rows if self.row_bytes < DENSE_ROW_BYTES else rows
            yield rows / total, one * self.local_size * self.source_row_bytes
            left, most = left - rows, 2 * most


def share_quota(
    quota_bytes: int, need: Need, *, row_bytes: float, source_row_bytes: float
) -> Quota:
    """Divide a quota between rows that stay and windows of the others.

    That an exchange has no room within it, so that rows come by the source instead, is not seen.

    Args:
        quota_bytes: Of the node.
        need: Its rows.
        row_bytes: Mean, as rows lie in the cache.
        source_row_bytes: Read from the source for one; mean.

    Raises:
        QuotaError: If no epoch could be trained within it.
    """
    budget = plan_budget(quota_bytes, need)
    slots, variable, local = need.num_slots, need.variable_bytes, need.local_size
    if budget.resident_rows >= slots and slots * variable <= budget.heap_bytes * local:
        return Quota(
            resident_rows=slots, missing_rows=0, window_rows=0, row_bytes=row_bytes,
            source_row_bytes=source_row_bytes, local_size=local,
        )  # fmt: skip
    resident = min(budget.resident_rows, slots)
    window = (budget.positions - resident) // local // 2
    if variable:
        resident = min(resident, budget.resident_heap_bytes * local // variable)
        beside = budget.heap_bytes - resident * variable / local
        window = min((budget.positions - resident) // local // 2, int(FILL * beside / 2 / variable))
    return Quota(
        resident_rows=resident, missing_rows=slots - resident, window_rows=max(window, 1),
        row_bytes=row_bytes, source_row_bytes=source_row_bytes, local_size=local,
    )  # fmt: skip


def wait_for_windows(shares: Sequence[float], reads_s: Sequence[float], *, steps_s: float) -> float:
    """Compute for how long an epoch's steps wait for windows, the first of which nobody hides.

    Args:
        shares: Of the steps, that each window is for.
        reads_s: What each takes to be read.
        steps_s: Of all steps, where nobody waits.
    """
    waits_s = sum(reads_s[:1])
    for (share, _), (_, read_s) in pairwise(zip(shares, reads_s, strict=True)):
        waits_s += max(read_s - share * steps_s, 0.0)
    return waits_s
