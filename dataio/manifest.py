"""Where every row of a pool lies: slot -> position, heap extent, sample, checksum.

A pool's manifest is a base plus one small delta an epoch and share, each an Arrow table. Pure:
`cache.py` reads and writes the files.
"""

from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

MISSING = -1
"""``sample_id`` of a slot whose row is not there (yet)."""


@dataclass(frozen=True)
class Entries:
    """Manifest entries of some slots.

    Attributes:
        slot: int64[n], distinct.
        sample_id: int64[n]; MISSING where the slot is empty.
        checksum: uint64[n]: xxh3_64 of the row's bytes.
        position: int64[n]: Row of the fixed fields' arrays.
        heap: int64[n]: Number of the heap file that holds the variable fields.
        offset: int64[n]: Where the row's variable fields begin there, back to back.
        lengths: int64[n, num_variable]: Bytes of each variable field.
    """

    slot: NDArray[np.int64]
    sample_id: NDArray[np.int64]
    checksum: NDArray[np.uint64]
    position: NDArray[np.int64]
    heap: NDArray[np.int64]
    offset: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def extent_bytes(self) -> NDArray[np.int64]:
        """int64[n]: Bytes of a row's variable fields together."""
        return np.asarray(self.lengths.sum(axis=1), np.int64)

    @property
    def present(self) -> NDArray[np.bool_]:
        """bool[n]: Whether the slot holds its row."""
        return np.not_equal(self.sample_id, MISSING)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> "Entries":
        """Pick entries by number or by mask."""
        return Entries(*(getattr(self, column.name)[rows] for column in fields(self)))

    def replace(self, delta: "Entries") -> "Entries":
        """Return a copy of this whole pool's entries with the delta's slots replaced."""
        columns = []
        for column in fields(self):
            values = getattr(self, column.name).copy()
            values[delta.slot] = getattr(delta, column.name)
            columns.append(values)
        return Entries(*columns)


def empty_entries(num_slots: int, num_variable: int) -> Entries:
    """Make the entries of a pool that holds nothing yet."""

    def nothing() -> NDArray[np.int64]:
        return np.full(num_slots, MISSING, np.int64)

    zeros = np.zeros(num_slots, np.int64)
    return Entries(
        slot=np.arange(num_slots, dtype=np.int64),
        sample_id=nothing(),
        checksum=np.zeros(num_slots, np.uint64),
        position=nothing(),
        heap=nothing(),
        offset=zeros,
        lengths=np.zeros((num_slots, num_variable), np.int64),
    )


def rehome(held: Entries, wanted: NDArray[np.int64]) -> Entries:
    """Give every wanted sample that is held, in whatever slot, to the slot that wants it.

    Args:
        held: What lies in the node's files.
        wanted: int64[num_slots]: The sample that each slot is to hold.

    Returns:
        Entries of all ``num_slots`` slots; MISSING where the sample is not held.
    """
    here = held.take(held.present)
    order = np.argsort(here.sample_id, kind="stable")
    place = np.searchsorted(here.sample_id, wanted, sorter=order)
    place = np.minimum(place, max(len(here) - 1, 0))
    result = empty_entries(len(wanted), held.lengths.shape[1])
    if len(here) == 0:
        return result
    found = here.sample_id[order[place]] == wanted
    kept = here.take(order[place[found]])
    slots = np.flatnonzero(found)
    return result.replace(
        Entries(
            slots,
            kept.sample_id,
            kept.checksum,
            kept.position,
            kept.heap,
            kept.offset,
            kept.lengths,
        )
    )


def to_table(entries: Entries) -> pa.Table:
    """Lay entries out as an Arrow table; lengths become one column a variable field."""
    columns = {
        column.name: getattr(entries, column.name)
        for column in fields(entries)
        if column.name != "lengths"
    }
    for number in range(entries.lengths.shape[1]):
        columns[f"length_{number}"] = np.ascontiguousarray(entries.lengths[:, number])
    return pa.table(columns)


def from_table(table: pa.Table) -> Entries:
    """Read entries back from the table that `to_table` made."""
    arrays = {name: table.column(name).to_numpy() for name in table.column_names}
    lengths = [name for name in table.column_names if name.startswith("length_")]
    stacked = [arrays.pop(name) for name in lengths]
    matrix = np.stack(stacked, axis=1) if stacked else np.zeros((table.num_rows, 0), np.int64)
    return Entries(lengths=matrix, **arrays)
