"""Divide the bytes that a cache may take: manifests and scores first, then rows. Pure.

Where not all rows fit, a fixed set of them stays (every row is read once an epoch, so no choice of
what to evict can beat keeping the same ones) and the others share the rest of the space, window
after window.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dataio.base.errors import QuotaError
from dataio.base.sizes import format_bytes
from dataio.plan.history import COLUMNS, ScoreColumn, score_dtype
from dataio.rows.rows import RowSchema

MANIFEST_COPIES = 3
"""The base in force, the one that replaces it, and what was sealed meanwhile."""

WINDOW_SHARE = 4
"""One part in so many, at least, is for the rows that do not stay."""

DENSE_ROW_BYTES = 64 << 10
"""Rows smaller than this are read with their neighbours: each window is a pass over the shards."""

BLOCK_BYTES = 4096
"""What the last bytes of a file take at least."""

SMALL_FILE_BYTES = 2 * BLOCK_BYTES
UNKNOWN_HEADERS = 8
"""A row of variable fields alone, of which nothing is known, is guessed as so many headers."""
SCORE_BYTES = score_dtype(name for name in COLUMNS if name != "history").itemsize
"""Of a row at most, but for its ``history``: another job on the same cache may go by more columns
than this one."""

HISTORY_BYTES = score_dtype(COLUMNS).itemsize - SCORE_BYTES
"""Of a row beside its other scores, where a job keeps it."""

DELTA_FILES = 18
"""Of each local rank, where rows are exchanged: see `commit_log.DELTAS_PER_BASE`."""


@dataclass(frozen=True)
class Budget:
    """What a node's cache may hold.

    Attributes:
        quota_bytes: All its files together.
        num_slots: Rows of the pool.
        positions: Rows that the fixed fields may have room for.
        heap_bytes: Of each local rank's heap file.
        resident_rows: Rows that may stay; all of the pool unless it is known that they do not fit.
        resident_heap_bytes: Of a heap, what rows that stay may take once it is known that not all
            do.
        has_room_to_move: Whether arrivals fit beside the pool, as far as positions go.
        num_seals: Files of staged rows that a local rank may leave before they are joined.
        spare_bytes: Of the quota, what is not there all the time: new manifests, scores.
        other_bytes: Beside rows, where some stay.
        whole_rows: What there has to be room for, so that all stay and are exchanged.
    """

    quota_bytes: int
    num_slots: int
    positions: int
    heap_bytes: int
    resident_rows: int
    resident_heap_bytes: int
    has_room_to_move: bool
    num_seals: int
    spare_bytes: int
    other_bytes: int = 0
    whole_rows: int = 0


def without_history(quota_bytes: int, columns: Iterable[ScoreColumn], num_slots: int) -> int:
    """Take off a quota what only jobs that keep ``history`` need beside a cache."""
    return quota_bytes - (num_slots * HISTORY_BYTES if "history" in columns else 0)


@dataclass(frozen=True)
class Need:
    """What decides how many bytes a node's pool takes.

    Attributes:
        schema: Stored form of a row.
        num_samples: Of the dataset.
        num_slots: Rows of the pool.
        num_arrivals: Rows that lie beside it while rows are exchanged.
        local_size: Ranks on the node.
        batch_size: Rows a batch and rank.
        scored: Whether scores are kept.
        variable_bytes: Of a row, 0: unknown.
        shard_bytes: Of the largest shard; 0: unknown.
    """

    schema: RowSchema
    num_samples: int
    num_slots: int
    num_arrivals: int
    local_size: int
    batch_size: int
    scored: bool
    variable_bytes: int
    shard_bytes: int

    @property
    def window_rows(self) -> int:
        """Rows that the smallest windows hold: two batches on each rank."""
        return min(2 * self.batch_size * self.local_size, 2 * self.num_slots)

    @property
    def row_bytes(self) -> int:
        """Of a row, as far as it is known."""
        return self.schema.position_bytes + self.variable_bytes

    def least_bytes(self) -> int:
        """Find the quota below which no epoch could be trained."""
        windows = self.other_bytes(num_seals=0, resident=False) + self.window_rows * self.row_bytes
        return max(windows, self.shard_bytes)

    def other_bytes(self, *, num_seals: int, resident: bool) -> int:
        """Everything but rows: at the worst moment, rounded up to blocks."""
        files = 11 + len(self.schema.fixed) + self.local_size
        files += num_seals * self.local_size
        files += DELTA_FILES * self.local_size if self.num_arrivals and resident else 0
        scores = self.num_slots * SCORE_BYTES + BLOCK_BYTES if self.scored else 0
        return files * SMALL_FILE_BYTES + scores + (self.manifest_bytes() if resident else 0)

    def manifest_bytes(self) -> int:
        # Lengths beyond int32 would be rows of 2 GiB.
        entry = 8 + 2 * _width(self.num_samples) + _width(2 * self.num_slots)
        entry += (1 + 8 + 4 * len(self.schema.variable)) if self.schema.variable else 0
        return MANIFEST_COPIES * self.num_slots * entry


def plan_budget(quota_bytes: int, need: Need) -> Budget:
    """Divide a quota.

    Raises:
        QuotaError: If no epoch could be trained within it.
    """
    if quota_bytes < need.least_bytes():
        raise too_small(quota_bytes, need.least_bytes(), need)
    num_seals = min(max(quota_bytes >> 26, 4), 64)
    other = need.other_bytes(num_seals=num_seals, resident=True)
    rows_bytes = quota_bytes - other
    if rows_bytes * (WINDOW_SHARE - 1) < WINDOW_SHARE * need.window_rows * max(need.row_bytes, 1):
        # Not worth its manifest: nothing stays.
        other = need.other_bytes(num_seals=0, resident=False)
        return _divide(quota_bytes, quota_bytes - other, need, num_seals=4, none_stay=True)
    return _divide(quota_bytes, rows_bytes, need, num_seals=num_seals, none_stay=False)


def _divide(
    quota_bytes: int, rows_bytes: int, need: Need, *, num_seals: int, none_stay: bool
) -> Budget:
    num_slots, position_bytes = need.num_slots, need.schema.position_bytes
    moving = num_slots + need.num_arrivals
    beside = max(num_slots // WINDOW_SHARE, need.window_rows)
    positions = moving + beside
    part = rows_bytes
    if need.schema.variable:
        # Where their size is unknown: as much as the fixed fields, or most of the space.
        guess = need.variable_bytes or need.schema.fixed_bytes or UNKNOWN_HEADERS * position_bytes
        part = rows_bytes * position_bytes // (position_bytes + guess)
    positions = min(positions, part // position_bytes)
    heap_bytes = 0
    if need.schema.variable:
        if num_slots <= positions < num_slots + beside:
            # All fixed fields would fit, but no window beside them should a heap be full.
            positions = num_slots - 1
        heap_bytes = (rows_bytes - positions * position_bytes) // need.local_size
    windows = min(max(_windows(positions, num_slots, need), need.window_rows), positions)
    # A batch of rows that are larger than most still fits.
    heap_windows = 3 * need.batch_size * need.row_bytes
    whole = num_slots * need.variable_bytes // need.local_size
    shared = _windows(heap_bytes, whole, need) if need.variable_bytes else heap_bytes // 2
    heap_windows = min(max(shared, heap_windows), heap_bytes)
    resident = num_slots if positions >= num_slots else max(positions - windows, 0)
    more_manifests = need.manifest_bytes() * (MANIFEST_COPIES - 1) // MANIFEST_COPIES
    scores = num_slots * SCORE_BYTES if need.scored else 0
    return Budget(
        quota_bytes,
        num_slots,
        positions,
        heap_bytes,
        0 if none_stay else resident,
        0 if none_stay else heap_bytes - heap_windows,
        not none_stay and positions >= moving,
        num_seals,
        scores + (more_manifests if need.num_arrivals else 0),
        need.other_bytes(num_seals=num_seals, resident=True),
        moving + (beside if need.schema.variable else 0),
    )


def _windows(space: int, whole: int, need: Need) -> int:
    """Choose how much of the space is for rows that do not stay.

    Where a window is a pass over the shards, an epoch reads (whole - staying) x that / windows,
    which is least where as much is for windows as the space falls short of the whole. Some rows
    stay in any case: they show how large a row is.
    """
    dense = need.row_bytes < DENSE_ROW_BYTES
    return min(max(space // WINDOW_SHARE, whole - space if dense else 0), space - space // 8)


def too_small(
    quota_bytes: int, least_bytes: int, need: Need, *, on_all_ranks: bool = False
) -> QuotaError:
    """Make the error that says what the quota would have to be."""
    shard = f"the largest shard ({format_bytes(need.shard_bytes)}) and " if need.shard_bytes else ""
    smaller = "write smaller shards" if least_bytes == need.shard_bytes else "lower batch_size"
    return QuotaError(
        f"quota: {quota_bytes} bytes are too few for this node's cache, expected at least "
        f"{least_bytes}: room for {shard}two batches on each of {need.local_size} ranks; "
        f"raise the quota or {smaller}",
        on_all_ranks=on_all_ranks,
    )


def _width(largest: int) -> int:
    return next((width for width in (1, 2, 4) if largest < 1 << (8 * width - 1)), 8)
