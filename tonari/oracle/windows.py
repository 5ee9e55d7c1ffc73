"""Rows that a quota leaves no room for: read from the source ahead of their steps. Pure.

As `dataio.store.streaming` does it: in windows of steps, one of which is read while the steps of
the one before are trained.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from dataio.store.quota import DENSE_ROW_BYTES, Need, plan_budget
from dataio.store.streaming import FILL, planned_windows


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """How a source's rows lie in pieces that are read whole, such as Parquet's row groups.

    Attributes:
        rows: Of a piece; mean.
        read_bytes: Read for any row of one; mean.
        of_shard: Pieces of a file; mean.
        opening_bytes: Read beside, for each file that is opened.
        core_s: Of a processor, to read one; mean.
    """

    rows: float
    read_bytes: float
    of_shard: float = 1.0
    opening_bytes: float = 0.0
    core_s: float = 0.0

    def cost_of(self, share: float, *, first: int, num_rows: int) -> tuple[float, float]:
        """Compute what is read for a random share of rows that lie side by side.

        Args:
            share: Of them, in [0, 1].
            first: Of the rows.
            num_rows: How many they are.

        Returns:
            Bytes, and seconds of a processor.
        """
        stop = first + num_rows

        def touched(rows: float) -> float:
            bounds = np.append(np.arange(first // rows * rows, stop, rows), stop)
            held = np.diff(np.maximum(bounds, first))
            return float((1 - (1 - share) ** held).sum())

        pieces, files = touched(self.rows), touched(self.rows * self.of_shard)
        num_bytes = pieces * self.read_bytes + files * self.opening_bytes
        return num_bytes, pieces * self.core_s


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
        batch_size: Rows of a replica's batch.
        first_row: Of the node, by its number in the dataset.
        pieces: That the source reads whole; None: it reads rows alone, or all that are missing.
    """

    resident_rows: int
    missing_rows: int
    window_rows: int
    row_bytes: float
    source_row_bytes: float
    local_size: int
    batch_size: int = 1
    first_row: int = 0
    pieces: Pieces | None = None

    def runs(self, *, visible_fraction: float = 1.0) -> Iterator[tuple[int, float, float]]:
        """Yield an epoch's runs of equal windows, of which there are few.

        Of each: how many windows; of one, its share of the missing rows, and the node's bytes.

        A window is of whole batches. Of each replica, it takes every piece that holds one of its
        rows. Where there are no pieces, one of rows that are read with their neighbours is a pass
        over all that are missing.

        Args:
            visible_fraction: Of the rows.
        """
        for count, share in self._shares(visible_fraction):
            yield count, share, self._cost_of(share * visible_fraction)[0] * self.local_size

    def reading_s(self, *, visible_fraction: float = 1.0) -> float:
        """Compute for how long a replica's windows of an epoch take a processor.

        Args:
            visible_fraction: Of the rows.
        """
        shares = self._shares(visible_fraction)
        return sum(count * self._cost_of(share * visible_fraction)[1] for count, share in shares)

    def _shares(self, visible_fraction: float) -> Iterator[tuple[int, float]]:
        """Yield runs of windows: how many, and each one's part of the missing rows to be seen."""
        total = round(self.missing_rows * visible_fraction / self.local_size)
        of_batch = self.batch_size * self.missing_rows / (self.missing_rows + self.resident_rows)
        for count, rows in planned_windows(
            total, of_batch=of_batch, most_rows=self.window_rows, row_bytes=self.row_bytes
        ):
            yield count, rows / total

    def _cost_of(self, share: float) -> tuple[float, float]:
        """Price a window of one replica, by its part of its missing rows: bytes, processor time."""
        rows = share * self.missing_rows / self.local_size
        if self.pieces is not None:
            return self.pieces.cost_of(
                rows / self.missing_rows, first=self.first_row + self.resident_rows,
                num_rows=self.missing_rows,
            )  # fmt: skip
        one = self.missing_rows if self.row_bytes < DENSE_ROW_BYTES else rows
        return one * self.source_row_bytes, 0.0


def share_quota(
    quota_bytes: int, need: Need, *, variable_bytes: int, row_bytes: float,
    source_row_bytes: float, first_row: int = 0, pieces: Pieces | None = None,
) -> Quota:  # fmt: skip
    """Divide a quota between rows that stay and windows of the others.

    That an exchange has no room within it, so that rows come by the source instead, is not seen.

    Args:
        quota_bytes: Of the node.
        need: Its rows, and what the loader guesses of them before it has seen any.
        variable_bytes: Of a row's variable fields, in truth; 0: it has none.
        row_bytes: Mean, as rows lie in the cache.
        source_row_bytes: Read from the source for one; mean.
        first_row: See `Quota`.
        pieces: See `Quota`.

    Raises:
        QuotaError: If no epoch could be trained within it.
    """
    budget = plan_budget(quota_bytes, need)
    slots, variable, local = need.num_slots, variable_bytes, need.local_size
    made = partial(
        Quota, row_bytes=row_bytes, source_row_bytes=source_row_bytes, local_size=local,
        batch_size=need.batch_size, first_row=first_row, pieces=pieces,
    )  # fmt: skip
    if budget.resident_rows >= slots and slots * variable <= budget.heap_bytes * local:
        return made(resident_rows=slots, missing_rows=0, window_rows=0)
    resident = min(budget.resident_rows, slots)
    window = (budget.positions - resident) // local // 2
    if variable:
        resident = min(resident, budget.resident_heap_bytes * local // variable)
        beside = budget.heap_bytes - resident * variable / local
        window = min((budget.positions - resident) // local // 2, int(FILL * beside / 2 / variable))
    return made(resident_rows=resident, missing_rows=slots - resident, window_rows=max(window, 1))


def wait_for_windows(
    shares: Sequence[float], reads_s: Sequence[float], *, steps_s: float,
    counts: Sequence[int] | None = None,
) -> float:  # fmt: skip
    """Compute for how long an epoch's steps wait for windows, the first of which nobody hides.

    Args:
        shares: Of the steps, that each window is for.
        reads_s: What each takes to be read.
        steps_s: Of all steps, where nobody waits.
        counts: How many of each come one after another; None: one.
    """
    waits_s = sum(reads_s[:1], 0.0)
    for (share, _), (_, read_s) in pairwise(zip(shares, reads_s, strict=True)):
        waits_s += max(read_s - share * steps_s, 0.0)
    for share, read_s, count in zip(shares, reads_s, counts or (), strict=counts is not None):
        waits_s += (count - 1) * max(read_s - share * steps_s, 0.0)
    return waits_s
