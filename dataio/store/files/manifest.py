"""Where every row of a pool lies: slot -> position, heap extent, sample, checksum.

A pool's manifest is a base plus one small delta an epoch and share, each an Arrow table whose
columns are as narrow as their values, or two numbers where they are ``start + step * row``. Pure:
`cache.py` reads and writes the files.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

MISSING = -1
"""``sample_id`` of a slot whose row is not there (yet)."""

BLOCK_ROWS = 1 << 20
"""Rows looked at together where all of a pool must be: bounds memory."""

NARROW = tuple(map(np.dtype, "uint8 uint16 uint32 int8 int16 int32".split()))
NAMES = ("slot", "sample_id", "checksum", "position", "heap", "offset")
META = b"tonari"

Wide = TypeVar("Wide", np.int64, np.uint64)
Rows = NDArray[np.int64] | NDArray[np.bool_] | slice
Affine = tuple[int, int]
"""start and step."""


class Column(Generic[Wide]):
    """A number for each row: an array as narrow as it may be, or ``start + step * row``.

    Args:
        values: Any integers, or (start, step).
        num_rows: How many.
        wide: What reading gives, whatever is kept.
    """

    def __init__(
        self, values: NDArray[np.generic] | Affine, num_rows: int, wide: type[Wide]
    ) -> None:
        self._values = values
        self._num_rows = num_rows
        self.wide: type[Wide] = wide

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, rows: Rows) -> NDArray[Wide]:
        if isinstance(self._values, tuple):
            start, step = self._values
            return (start + step * as_rows(rows, self._num_rows)).astype(self.wide, copy=False)
        return self._values[rows].astype(self.wide, copy=False)

    def __array__(
        self, dtype: np.dtype[np.generic] | None = None, copy: bool | None = None
    ) -> NDArray[np.generic]:
        values = self[:]
        return values if dtype is None else values.astype(dtype)

    def tolist(self) -> list[int]:
        """Every row's number."""
        return list(map(int, self[:]))

    def copy(self) -> "Column[Wide]":
        """Make one that `put` changes alone."""
        values = self._values if isinstance(self._values, tuple) else self._values.copy()
        return Column(values, self._num_rows, self.wide)

    def put(self, rows: NDArray[np.int64], values: NDArray[Wide]) -> None:
        """Change some rows, in place where the new numbers fit."""
        if isinstance(self._values, tuple):
            if np.array_equal(self[rows], values):
                return
            every = self[:]
            self._values = every.astype(_narrowest(*_range(every), self.wide))
        kept = self._values
        low, high = _range(values)
        if not _fits(low, high, kept.dtype):
            least, most = _range(kept)
            kept = kept.astype(_narrowest(min(low, least), max(high, most), self.wide))
        elif not kept.flags.writeable:
            kept = kept.copy()
        kept[rows] = values.astype(kept.dtype)
        self._values = kept

    def sum(self) -> int:
        """Add up all rows."""
        if isinstance(self._values, tuple):
            start, step = self._values
            return self._num_rows * start + step * (self._num_rows * (self._num_rows - 1) // 2)
        return int(self._values.sum(dtype=self.wide))

    def max(self) -> int:
        """Find the largest number; -1 if there is none."""
        if not self._num_rows:
            return -1
        if isinstance(self._values, tuple):
            start, step = self._values
            return start + max(step, 0) * (self._num_rows - 1)
        return int(self._values.max())

    def is_slot(self) -> bool:
        """Whether every row's number is known to be the row's own."""
        return self._values == (0, 1) if isinstance(self._values, tuple) else False

    def packed(self) -> NDArray[np.generic] | Affine:
        """Find the smallest form, for a file."""
        if isinstance(self._values, tuple):
            return self._values
        if self._num_rows == 0:
            return 0, 0
        head = [int(number) for number in self._values[:2]]
        step = head[1] - head[0] if len(head) > 1 else 0
        affine = Column((head[0], step), self._num_rows, np.int64)
        if self.wide is np.int64 and all(
            np.array_equal(self[part], affine[part]) for part in blocks(self._num_rows)
        ):
            return head[0], step
        return self._values.astype(_narrowest(*_range(self._values), self.wide), copy=False)


class Lengths:
    """Bytes of each variable field, row by row: ``lengths[rows]`` is int64[n, num_variable].

    Args:
        columns: One a variable field.
        num_rows: Of the table.
    """

    def __init__(self, columns: Sequence[Column[np.int64]], num_rows: int) -> None:
        self.columns = tuple(columns)
        self._num_rows = num_rows

    def __getitem__(self, rows: Rows) -> NDArray[np.int64]:
        if not self.columns:
            return np.empty((*as_rows(rows, self._num_rows).shape, 0), np.int64)
        return np.stack([column[rows] for column in self.columns], axis=-1)


@dataclass(frozen=True)
class Entries:
    """Manifest entries of some slots; each column reads like an int64 array.

    Attributes:
        slot: Distinct.
        sample_id: MISSING where the slot is empty.
        checksum: uint64: xxh3_64 of the row's bytes.
        position: Row of the fixed fields' arrays; -1 where there is none.
        heap: Number of the heap file that holds the variable fields.
        offset: Where the row's variable fields begin there, back to back.
        lengths: Bytes of each variable field.
    """

    slot: Column[np.int64]
    sample_id: Column[np.int64]
    checksum: Column[np.uint64]
    position: Column[np.int64]
    heap: Column[np.int64]
    offset: Column[np.int64]
    lengths: Lengths

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def extent_bytes(self) -> NDArray[np.int64]:
        """int64[n]: Bytes of a row's variable fields together."""
        return np.asarray(self.lengths[:].sum(axis=1), np.int64)

    @property
    def extents_total_bytes(self) -> int:
        """Bytes of all rows' variable fields."""
        return sum(column.sum() for column in self.lengths.columns)

    @property
    def present(self) -> NDArray[np.bool_]:
        """bool[n]: Whether the slot holds its row."""
        return np.not_equal(self.sample_id[:], MISSING)

    def count_missing(self) -> int:
        """Count the slots whose rows are not there."""
        if self.sample_id.is_slot():
            return 0
        parts = (self.sample_id[part] == MISSING for part in blocks(len(self)))
        return sum(int(np.count_nonzero(part)) for part in parts)

    def take(self, rows: Rows) -> "Entries":
        """Copy entries by number or by mask."""
        return make_entries(
            **{name: getattr(self, name)[rows] for name in NAMES}, lengths=self.lengths[rows]
        )

    def copy(self) -> "Entries":
        """Make entries that `put` changes alone."""
        return _assembled({name: c.copy() for name, c in self.columns().items()}, len(self))

    def put(self, delta: "Entries") -> None:
        """Replace the delta's slots in this whole pool's entries.

        ``sample_id`` goes last: another thread that sees a row there sees all of its entry.
        """
        slots = delta.slot[:]
        mine, theirs = self.columns(), delta.columns()
        for name in sorted(mine, key=lambda name: name == "sample_id"):
            if name != "slot":
                mine[name].put(slots, theirs[name][:])

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Say of slots that their rows are not there, and take no space."""
        gone = empty_entries(len(slots), len(self.lengths.columns))
        gone.slot.put(np.arange(len(slots)), slots)
        self.put(gone)

    def columns(self) -> dict[str, "Column[np.int64]"]:
        """Every column by the name it has in a file."""
        lengths = {f"length_{j}": column for j, column in enumerate(self.lengths.columns)}
        return {name: getattr(self, name) for name in NAMES} | lengths


def make_entries(
    *,
    slot: NDArray[np.int64],
    sample_id: NDArray[np.int64],
    checksum: NDArray[np.uint64],
    position: NDArray[np.int64],
    heap: NDArray[np.int64],
    offset: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> Entries:
    """Put arrays together; ``lengths`` is int64[n, num_variable]."""
    arrays = [slot, sample_id, checksum, position, heap, offset, *lengths.T]
    names = [*NAMES, *(f"length_{j}" for j in range(lengths.shape[1]))]
    return _assembled(
        {name: _column(name, array, len(slot)) for name, array in zip(names, arrays, strict=True)},
        len(slot),
    )


def empty_entries(num_slots: int, num_variable: int) -> Entries:
    """Make the entries of a pool that holds nothing yet."""
    affine: dict[str, Affine] = dict.fromkeys(
        (*NAMES, *(f"length_{j}" for j in range(num_variable))), (0, 0)
    )
    affine |= {"slot": (0, 1), "sample_id": (MISSING, 0), "position": (MISSING, 0)}
    return _assembled(
        {name: _column(name, form, num_slots) for name, form in affine.items()}, num_slots
    )


def join_entries(parts: Sequence[Entries], num_variable: int) -> Entries:
    """Lay entries one after another."""
    return make_entries(
        **{
            name: np.concatenate(
                [getattr(part, name)[:] for part in parts] or [np.empty(0, _wide(name))]
            )
            for name in NAMES
        },
        lengths=np.concatenate(
            [np.empty((0, num_variable), np.int64), *(part.lengths[:] for part in parts)]
        ),
    )


def rehome(held: Entries, wanted: NDArray[np.int64]) -> Entries:
    """Give every wanted sample that is held, in whatever slot, to the slot that wants it.

    Args:
        held: What lies in the node's files.
        wanted: int64[num_slots]: The sample that each slot is to hold.

    Returns:
        Entries of all ``num_slots`` slots; MISSING where the sample is not held.
    """
    here = np.flatnonzero(held.present)
    ids = held.sample_id[here]
    order = np.argsort(ids, kind="stable")
    result = empty_entries(len(wanted), len(held.lengths.columns))
    if len(here) == 0:
        return result
    place = order[np.minimum(np.searchsorted(ids, wanted, sorter=order), len(here) - 1)]
    slots = np.flatnonzero(ids[place] == wanted)
    kept = here[place[slots]]
    arrays = {name: getattr(held, name)[kept] for name in NAMES if name != "slot"}
    result.put(make_entries(slot=slots, **arrays, lengths=held.lengths[kept]))
    return result


def to_table(entries: Entries) -> pa.Table:
    """Lay entries out as an Arrow table; what is affine goes into its metadata."""
    packed = {name: column.packed() for name, column in entries.columns().items()}
    affine = {name: form for name, form in packed.items() if isinstance(form, tuple)}
    table = pa.table({name: form for name, form in packed.items() if name not in affine})
    meta = {"rows": len(entries), "affine": affine}
    return table.replace_schema_metadata({META: json.dumps(meta)})


def from_arrays(arrays: Mapping[str, NDArray[np.generic]], meta: Mapping[bytes, bytes]) -> Entries:
    """Put together the columns of a table that `to_table` made, without a copy.

    Raises:
        ValueError, KeyError, TypeError: If it is not one.
    """
    described = json.loads(meta[META])
    num_rows = int(described["rows"])
    forms: dict[str, NDArray[np.generic] | Affine] = dict(arrays)
    for name, (start, step) in described["affine"].items():
        forms[name] = int(start), int(step)
    if any(len(array) != num_rows for array in arrays.values()):
        raise ValueError(f"columns do not have {num_rows} rows")
    return _assembled(
        {name: _column(name, form, num_rows) for name, form in forms.items()}, num_rows
    )


def from_table(table: pa.Table) -> Entries:
    """Read entries back from the table that `to_table` made."""
    arrays = {name: table.column(name).to_numpy() for name in table.column_names}
    return from_arrays(arrays, table.schema.metadata or {})


def as_rows(rows: Rows, num_rows: int) -> NDArray[np.int64]:
    """Turn a mask or a slice into row numbers."""
    if isinstance(rows, slice):
        return np.arange(*rows.indices(num_rows), dtype=np.int64)
    return np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64, copy=False)


def blocks(num_rows: int) -> Iterator[slice]:
    """Cut all rows into slices that are worth an array operation and fit in memory."""
    for first in range(0, num_rows, BLOCK_ROWS):
        yield slice(first, min(first + BLOCK_ROWS, num_rows))


def _column(name: str, form: NDArray[np.generic] | Affine, num_rows: int) -> "Column[np.int64]":
    # Checksums are uint64, which only `Entries` needs to know.
    return cast("Column[np.int64]", Column(form, num_rows, _wide(name)))


def _assembled(columns: Mapping[str, "Column[np.int64]"], num_rows: int) -> Entries:
    lengths = [columns[name] for name in sorted(columns, key=_number) if name not in NAMES]
    slot, sample_id, checksum, position, heap, offset = (columns[name] for name in NAMES)
    return Entries(
        slot,
        sample_id,
        cast(Column[np.uint64], checksum),
        position,
        heap,
        offset,
        Lengths(lengths, num_rows),
    )


def _number(name: str) -> int:
    return int(name.removeprefix("length_")) if name.startswith("length_") else -1


def _wide(name: str) -> type[np.int64]:
    return cast(type[np.int64], np.uint64) if name == "checksum" else np.int64


def _range(values: NDArray[np.generic]) -> tuple[int, int]:
    return (int(values.min()), int(values.max())) if len(values) else (0, 0)


def _narrowest(low: int, high: int, wide: type[np.generic]) -> np.dtype[np.generic]:
    return next((dtype for dtype in NARROW if _fits(low, high, dtype)), np.dtype(wide))


def _fits(low: int, high: int, dtype: np.dtype[np.generic]) -> bool:
    limits = np.iinfo(str(dtype))
    return int(limits.min) <= low and high <= int(limits.max)
