"""Decide what must become of the rows that a node holds, for it to hold the rows wanted. Pure.

`Pool.ensure` asks, and `filling.py` carries out the answer. A row of the node never moves:
only its slot changes, in the manifest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dataio.plan.placement import Placement
from dataio.store.files.manifest import Entries, rehome
from dataio.store.quota import Budget

Change = Literal["none", "name", "epoch", "step back", "slots"]
"""What becomes of the manifest. `none`: it is right, but for rows that may be missing. `name`: the
placement has another name, and the same samples. `epoch`: it belongs to another epoch, and the
slots hold the same samples. `step back`: the epoch before is in force again. `slots`: rows belong
to other slots than before."""


@dataclass(frozen=True)
class HeldRows:
    """What a node holds, as its manifest says.

    Attributes:
        entries: Of every slot, in the epoch in force.
        epoch: That epoch.
        placement: Name of the placement that the entries follow.
        num_missing: Slots whose rows are not there.
        before: Gives the entries of the epoch before; None if that epoch is gone.
        rows: Gives every row that lies on the node: of the slots, of the epoch before, surplus.
        has_surplus: Whether there are rows that belong to no slot.
        is_filled: Whether all rows that the budget lets stay are there.
    """

    entries: Entries
    epoch: int
    placement: str
    num_missing: int
    before: Callable[[], Entries] | None
    rows: Callable[[], Entries]
    has_surplus: bool
    is_filled: bool


@dataclass(frozen=True)
class MissingRows:
    """Rows that are to come to the node.

    Attributes:
        slots: int64[n]: Where they belong, ascending.
        sample_ids: int64[n]: Their samples.
    """

    slots: NDArray[np.int64]
    sample_ids: NDArray[np.int64]


@dataclass(frozen=True)
class FillingPlan:
    """What is to be done on one node.

    Attributes:
        wanted: The placement that the node is to hold in the end.
        change: What becomes of the manifest.
        entries: What the manifest becomes; None if it need not be written anew.
        missing: Rows that no slot has, as far as the budget lets them stay. They come from other
            nodes if these hold them, else from the source.
        has_work: Whether this node must write anything.
    """

    wanted: Placement
    change: Change
    entries: Entries | None
    missing: MissingRows
    has_work: bool


def reconcile(
    held: HeldRows, wanted: Placement, *, budget: Budget | None, rows_move: bool, may_exchange: bool
) -> FillingPlan:
    """Decide how a node comes to hold these samples, each in its slot.

    Args:
        held: What it holds.
        wanted: What it is to hold. Its samples are computed only if names do not decide.
        budget: What may stay; None: everything.
        rows_move: Whether the placement differs from epoch to epoch.
        may_exchange: Whether the budget has room for rows on their way: then all rows may stay.
    """
    change, entries = _change(
        held, wanted, budget=budget, rows_move=rows_move, may_exchange=may_exchange
    )
    now = held.entries if entries is None else entries
    num_missing = held.num_missing if entries is None else entries.count_missing()
    is_filled = held.is_filled and entries is None
    return FillingPlan(
        wanted,
        change,
        entries,
        find_missing(now, wanted, num_missing=num_missing, is_filled=is_filled, budget=budget),
        has_work=entries is not None or num_missing > 0 or held.has_surplus,
    )


def _change(
    held: HeldRows, wanted: Placement, *, budget: Budget | None, rows_move: bool, may_exchange: bool
) -> tuple[Change, Entries | None]:
    if budget is not None and held.num_missing and find_beyond(held.entries, budget).any():
        # As after a run with smaller batches, which had smaller windows.
        staying = held.entries.take(~find_beyond(held.entries, budget))
        return "slots", rehome(staying, wanted.sample_ids())
    has_name = held.placement == wanted.name and len(held.entries) == wanted.num_slots
    # Rows that never move lie in every epoch where they lay in the first.
    is_in_time = held.epoch == wanted.epoch or not rows_move
    if has_name and is_in_time:
        return "none", None
    if has_name and held.before is not None and held.epoch == wanted.epoch + 1:
        return "step back", held.before()
    ids = wanted.sample_ids()
    if np.array_equal(held.entries.sample_id[:], ids):
        return ("name", None) if is_in_time else ("epoch", held.entries)
    if held.before is not None:
        before = held.before()
        if np.array_equal(before.sample_id[:], ids):
            return "step back", before
    if budget is None or (may_exchange and not held.num_missing):
        return "slots", rehome(held.rows(), ids)
    return "slots", rehome(held.entries.take(~find_beyond(held.entries, budget)), ids)


def find_missing(
    entries: Entries,
    wanted: Placement,
    *,
    num_missing: int,
    is_filled: bool,
    budget: Budget | None,
) -> MissingRows:
    """Find the slots whose rows are missing and may stay, and their samples."""
    if not num_missing or is_filled:
        return MissingRows(np.empty(0, np.int64), np.empty(0, np.int64))
    slots = np.flatnonzero(~entries.present)
    ids = wanted.sample_ids()[slots]
    if budget is not None:
        room = budget.resident_rows - (len(entries) - num_missing)
        # Whole shards, so that later as few as possible are read for the rows that do not stay.
        chosen = np.sort(np.argsort(ids, kind="stable")[: max(room, 0)])
        slots, ids = slots[chosen], ids[chosen]
    return MissingRows(slots, ids)


def find_surplus(rows: Entries, wanted: NDArray[np.int64]) -> Entries:
    """Find the rows that lie here and are not wanted here, each sample once.

    Other nodes may want them: they are kept until these have pulled them.
    """
    leaving = np.flatnonzero(~np.isin(rows.sample_id[:], wanted))
    _, first = np.unique(rows.sample_id[leaving], return_index=True)
    return rows.take(leaving[np.sort(first)])


def find_beyond(entries: Entries, budget: Budget) -> NDArray[np.bool_]:
    """bool[num_slots]: Rows that lie where windows must be, or are more than may stay."""
    beyond = entries.offset[:] + entries.extent_bytes > budget.resident_heap_bytes
    beyond &= entries.present
    kept = np.flatnonzero(entries.present & ~beyond)
    beyond[kept[budget.resident_rows :]] = True
    return beyond
