"""Rows in columns: what travels from the source to the cache, and from one cache to the next.

A field is stored in one of two forms: *fixed*, every row the same number of bytes, or *variable*.
Bytes are kept as the source had them; nothing here decodes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

HASH_BYTES = 1 << 18
"""Rows hashed together: what a core's cache holds while their fields are joined."""
WIDE_BYTES = 1 << 14
"""From here on joining a row's fields costs more than hashing them one after the other."""
ID_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no two samples share a product; the golden ratio, whose bits look random."""


@dataclass(frozen=True)
class FixedColumn:
    """A field whose rows all have one dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @cached_property
    def width_bytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class RowSchema:
    """The stored form of every field, fixed ones first; the order of a row's bytes."""

    fixed: tuple[FixedColumn, ...] = ()
    variable: tuple[str, ...] = ()

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes of a row's fixed fields."""
        return sum(column.width_bytes for column in self.fixed)

    @cached_property
    def header(self) -> FixedColumn:
        """What lies beside a row's fixed fields, so that it can prove itself.

        Its int64 are the sample id and the bits of the checksum; where there are variable fields
        also where they begin, heap << 48 | offset, and the length of each.
        """
        return FixedColumn("header", "<i8", (3 + len(self.variable) if self.variable else 2,))

    @cached_property
    def position_bytes(self) -> int:
        """Bytes of a position in a cache's files: a row's fixed fields and its header."""
        return self.fixed_bytes + self.header.width_bytes


@dataclass(frozen=True)
class Rows:
    """Some rows, column by column.

    Attributes:
        schema: What the columns are.
        sample_id: int64[num_rows].
        checksum: uint64[num_rows]: Of a row's bytes and its sample id, see `checksums`.
        fixed: For each fixed field uint8[num_rows, width_bytes].
        lengths: int64[num_rows, num_variable]: Bytes of each variable field.
        variable: For each variable field uint8[sum of its lengths], rows back to back.
    """

    schema: RowSchema
    sample_id: NDArray[np.int64]
    checksum: NDArray[np.uint64]
    fixed: tuple[NDArray[np.uint8], ...]
    lengths: NDArray[np.int64]
    variable: tuple[NDArray[np.uint8], ...]

    def __len__(self) -> int:
        return len(self.sample_id)

    def head(self, num_rows: int) -> "Rows":
        """View the first rows."""
        lengths = self.lengths[:num_rows]
        ends = lengths.sum(axis=0).tolist()
        return Rows(
            self.schema,
            self.sample_id[:num_rows],
            self.checksum[:num_rows],
            tuple(column[:num_rows] for column in self.fixed),
            lengths,
            tuple(column[:end] for column, end in zip(self.variable, ends, strict=True)),
        )


Fetch = Callable[[NDArray[np.int64]], Iterator[Rows]]
"""Reads samples from the source, by their ids: sorted, distinct."""


def empty_rows(schema: RowSchema, lengths: NDArray[np.int64]) -> Rows:
    """Make room for rows of these lengths; what it holds is for the caller to write."""
    num_rows = len(lengths)
    return Rows(
        schema,
        np.empty(num_rows, np.int64),
        np.empty(num_rows, np.uint64),
        tuple(np.empty((num_rows, column.width_bytes), np.uint8) for column in schema.fixed),
        lengths,
        tuple(np.empty(int(total), np.uint8) for total in lengths.sum(axis=0)),
    )


def copy_rows(rows: Rows, into: Rows) -> None:
    """Copy rows to where there is room for them, of the same schema and lengths."""
    into.sample_id[:] = rows.sample_id
    into.checksum[:] = rows.checksum
    for column, room in zip(rows.fixed + rows.variable, into.fixed + into.variable, strict=True):
        room[:] = column


def replace_rows(rows: Rows, others: Rows, numbers: NDArray[np.int64]) -> None:
    """Copy the bytes of the same samples over those of rows ``numbers``.

    A row that ``others`` has not, or not of the same lengths and checksum, stays as it is.
    """
    ends, other_ends = (np.cumsum(part.lengths, axis=0) for part in (rows, others))
    places = {sample: row for row, sample in enumerate(others.sample_id.tolist())}
    for row in numbers.tolist():
        place = places.get(int(rows.sample_id[row]))
        if place is None or others.checksum[place] != rows.checksum[row]:
            continue
        lengths = rows.lengths[row]
        if not np.array_equal(lengths, others.lengths[place]):
            continue
        for column, other in zip(rows.fixed, others.fixed, strict=True):
            column[row] = other[place]
        for field, (column, other) in enumerate(zip(rows.variable, others.variable, strict=True)):
            end, other_end, length = ends[row, field], other_ends[place, field], lengths[field]
            column[end - length : end] = other[other_end - length : other_end]


def row_blocks(rows: Rows, block_bytes: int) -> Iterator[tuple[slice, Rows]]:
    """View rows in blocks of about ``block_bytes``, each of one row at least, and say which."""
    num_rows = len(rows)
    total_bytes = sum(column.nbytes for column in rows.fixed + rows.variable)
    step = max(1, num_rows * block_bytes // max(total_bytes, 1))
    bounds = [row_offsets(rows.lengths[:, field]) for field in range(len(rows.variable))]
    for first in range(0, num_rows, step):
        part = slice(first, min(first + step, num_rows))
        yield (
            part,
            Rows(
                rows.schema,
                rows.sample_id[part],
                rows.checksum[part],
                tuple(column[part] for column in rows.fixed),
                rows.lengths[part],
                tuple(
                    column[bound[part.start] : bound[part.stop]]
                    for column, bound in zip(rows.variable, bounds, strict=True)
                ),
            ),
        )


def row_offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Turn the lengths of back-to-back rows, int64[n], into int64[n + 1] bounds."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def checksums(
    sample_id: NDArray[np.int64],
    fixed: Sequence[NDArray[np.uint8]],
    lengths: NDArray[np.int64],
    variable: Sequence[NDArray[np.uint8]],
) -> NDArray[np.uint64]:
    """Hash every row: the bytes of another sample never match, even where they are sound.

    Returns:
        uint64[num_rows]: xxh3_64 over the row's fixed fields, then its variable fields, bound to
        its sample by `bind_checksums`.
    """
    return bind_checksums(_byte_checksums(fixed, lengths, variable), sample_id)


def bind_checksums(sums: NDArray[np.uint64], sample_id: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Bind hashes of bytes to the samples whose bytes they are."""
    return sums ^ (sample_id.astype(np.uint64) * ID_FACTOR)


def _byte_checksums(
    fixed: Sequence[NDArray[np.uint8]],
    lengths: NDArray[np.int64],
    variable: Sequence[NDArray[np.uint8]],
) -> NDArray[np.uint64]:
    num_rows = len(lengths)
    if fixed and not variable:
        return _fixed_checksums(fixed)
    columns = [
        (column.data, row_offsets(lengths[:, field]).tolist())
        for field, column in enumerate(variable)
    ]
    if fixed:
        # uint8[num_rows, fixed_bytes]
        head = np.ascontiguousarray(np.concatenate(fixed, axis=1) if len(fixed) > 1 else fixed[0])
        bounds = (head.shape[1] * np.arange(num_rows + 1)).tolist()
        columns.insert(0, (head.reshape(-1).data, bounds))
    if not columns:
        return np.full(num_rows, xxh3_64_intdigest(b""), np.uint64)
    first, at = columns[0]
    if len(columns) == 1:
        sums = [xxh3_64_intdigest(first[a:b]) for a, b in pairwise(at)]
        return np.array(sums, np.uint64)
    digests = [xxh3_64(first[a:b]) for a, b in pairwise(at)]
    for column, bound in columns[1:]:
        for digest, (a, b) in zip(digests, pairwise(bound), strict=True):
            digest.update(column[a:b])
    return np.array([digest.intdigest() for digest in digests], np.uint64)


def _fixed_checksums(fixed: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint64]:
    """Hash rows without variable fields: narrow ones joined a few at a time, wide ones in place."""
    num_rows, width = len(fixed[0]), sum(column.shape[1] for column in fixed)
    if len(fixed) > 1 and width >= WIDE_BYTES:
        digests = list(map(xxh3_64, np.ascontiguousarray(fixed[0])))
        for column in fixed[1:]:
            for digest, row in zip(digests, np.ascontiguousarray(column), strict=True):
                digest.update(row)
        return np.array([digest.intdigest() for digest in digests], np.uint64)
    step = max(1, HASH_BYTES // max(1, width))
    sums = np.empty(num_rows, np.uint64)
    joined = np.empty((min(step, num_rows), width), np.uint8)
    for first in range(0, num_rows, step):
        part = slice(first, min(first + step, num_rows))
        # uint8[rows of the block, fixed_bytes]
        head = np.ascontiguousarray(fixed[0][part])
        if len(fixed) > 1:
            columns = [column[part] for column in fixed]
            head = np.concatenate(columns, axis=1, out=joined[: len(head)])
        sums[part] = np.fromiter(map(xxh3_64_intdigest, head), np.uint64, len(head))
    return sums


def make_rows(
    schema: RowSchema,
    sample_id: NDArray[np.int64],
    fixed: Sequence[NDArray[np.uint8]],
    lengths: NDArray[np.int64],
    variable: Sequence[NDArray[np.uint8]],
) -> Rows:
    """Put columns together and add the checksums."""
    sums = checksums(sample_id, fixed, lengths, variable)
    return Rows(schema, sample_id, sums, tuple(fixed), lengths, tuple(variable))


def lost_rows(schema: RowSchema, sample_id: NDArray[np.int64]) -> Rows:
    """Make rows that stand for samples that cannot be read: their checksums are the complement.

    Thus they are corrupt wherever their bytes are asked for, and yet travel with an exchange.
    """
    rows = empty_rows(schema, np.zeros((len(sample_id), len(schema.variable)), np.int64))
    for column in rows.fixed:
        column[:] = 0
    sums = checksums(sample_id, rows.fixed, rows.lengths, rows.variable)
    return replace(rows, sample_id=sample_id, checksum=~sums)


def corrupt_rows(rows: Rows, *, lost_too: bool = True) -> NDArray[np.int64]:
    """Find the rows whose bytes do not match their checksum: int64[num_corrupt] row numbers."""
    found = checksums(rows.sample_id, rows.fixed, rows.lengths, rows.variable)
    return np.flatnonzero((found != rows.checksum) & (lost_too | (~found != rows.checksum)))


class IdStore:
    """Sample ids in place of rows, for an exchange that moves what belongs to them alone.

    Args:
        sample_ids: int64[num_slots].
    """

    schema = RowSchema((FixedColumn("sample_id", "<i8"),))

    def __init__(self, sample_ids: NDArray[np.int64]) -> None:
        self._sample_ids = sample_ids

    def lengths(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[len(slots), 0]."""
        return np.empty((len(slots), 0), np.int64)

    def read_into(self, slots: NDArray[np.int64], into: Rows) -> None:
        """Copy `read_rows` to where there is room for them."""
        copy_rows(self.read_rows(slots), into)

    def read_rows(self, slots: NDArray[np.int64]) -> Rows:
        """Make rows of the ids of slots."""
        ids = np.ascontiguousarray(self._sample_ids[slots], "<i8")
        return make_rows(
            self.schema, ids, [ids.view(np.uint8).reshape(-1, 8)], self.lengths(slots), []
        )

    def write_arrivals(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Keep nothing: what the slots hold next is known."""

    def keep_rows(self, slots: NDArray[np.int64], *, held_in: NDArray[np.int64]) -> None:
        """Keep nothing here either."""
