"""Rows as one contiguous buffer and back, without a copy of their bytes on arrival.

A parcel is its columns one after the other, each padded to 8 bytes, integers as in memory:
``sample_id`` int64[num_rows], ``checksum`` uint64[num_rows], ``lengths`` int64[num_rows,
num_variable], then every fixed field, then every variable field. It holds no types and no code: the
schema says what they are.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import ExchangeError
from dataio.rows.rows import Rows, RowSchema, copy_rows

ALIGN_BYTES = 8
MOST_BYTES = 1 << 36
"""More than any parcel can be: a thousand times the size into which rows of mean size are cut."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """Rows that go to a rank, or come from one, in one message.

    Attributes:
        slots: int64[num_rows]: Where they lie, or are to live from the next epoch on.
        peer: The other rank.
        tag: The same at sender and receiver.
        step: Step of the epoch before which it is posted.
    """

    slots: NDArray[np.int64]
    peer: int
    tag: int
    step: int


class ParcelBuffers:
    """Memory for parcels, used again: fresh memory costs a page fault every 4 KiB.

    What is idle fits what comes next or makes room for it, so there are never more than were under
    way together. One thread at a time uses it.

    Attributes:
        sent_bytes_per_s: How fast parcels have left that may be compressed, some megabytes each.
        sending: Bytes and seconds of those since.
    """

    def __init__(self) -> None:
        self._idle: list[NDArray[np.uint8]] = []
        self.num_allocated = 0
        self.sent_bytes_per_s: deque[float] = deque(maxlen=8)
        self.sending = 0, 0.0

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Hand out uint8[num_bytes], with whatever it holds."""
        self._idle.sort(key=len)
        fits = [place for place, buffer in enumerate(self._idle) if len(buffer) >= num_bytes]
        if fits:
            return self._idle.pop(fits[0])[:num_bytes]
        if self._idle:
            self._idle.pop()
        self.num_allocated += 1
        # An eighth more: the next parcel of variable rows is a little larger.
        return np.empty(num_bytes + num_bytes // 8, np.uint8)[:num_bytes]

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Take back what was handed out, once nobody looks at it any more."""
        assert isinstance(buffer.base, np.ndarray), "a view of what was allocated"
        self._idle.append(buffer.base)


def parcel_bytes(schema: RowSchema, num_rows: int, lengths: NDArray[np.int64] | None = None) -> int:
    """Count the bytes of a parcel, known to the receiver before it arrives.

    Args:
        schema: Fields of the rows.
        num_rows: Rows of the parcel.
        lengths: int64[num_rows, num_variable]; optional where no field is variable.
    """
    return int(_bounds(_sizes(schema, num_rows, _totals(schema, lengths)))[-1])


def pack_parcel(rows: Rows) -> NDArray[np.uint8]:
    """Copy rows into a new parcel: uint8[parcel_bytes]."""
    buffer = np.empty(parcel_bytes(rows.schema, len(rows), rows.lengths), np.uint8)
    copy_rows(rows, lay_parcel(buffer, rows.schema, rows.lengths))
    return buffer


def lay_parcel(buffer: NDArray[np.uint8], schema: RowSchema, lengths: NDArray[np.int64]) -> Rows:
    """Lay out a parcel, and view it as rows whose bytes, ids and checksums are to be written.

    Args:
        buffer: uint8[parcel_bytes]: Contiguous, its start aligned to 8 bytes.
        schema: Fields of the rows.
        lengths: int64[num_rows, num_variable].
    """
    num_rows = len(lengths)
    sizes = _sizes(schema, num_rows, _totals(schema, lengths))
    bounds = _bounds(sizes).tolist()
    # The padding travels, and must not carry what memory held before
    for start, size, end in zip(bounds, sizes, bounds[1:], strict=False):
        buffer[start + size : end] = 0
    buffer[bounds[2] : bounds[3]].view(np.int64)[:] = lengths.reshape(-1)
    return unpack_parcel(buffer, schema, num_rows)


def unpack_parcel(buffer: NDArray[np.uint8], schema: RowSchema, num_rows: int) -> Rows:
    """View a parcel as rows, whose bytes are not yet checked against their checksums.

    Args:
        buffer: uint8[parcel_bytes]: Contiguous, its start aligned to 8 bytes.
        schema: Fields that the sender packed.
        num_rows: Rows that the sender packed.

    Raises:
        ExchangeError: If the buffer has not the size that rows of this schema and its lengths take.
    """
    num_variable = len(schema.variable)
    head_bytes = num_rows * ALIGN_BYTES * (2 + num_variable)
    _check_size(buffer, num_rows, head_bytes, exact=False)
    head = buffer[:head_bytes].view(np.int64)
    lengths = head[2 * num_rows :].reshape(num_rows, num_variable)
    _check_lengths(lengths, len(buffer))
    sizes = _sizes(schema, num_rows, _totals(schema, lengths))
    bounds = _bounds(sizes)
    _check_size(buffer, num_rows, int(bounds[-1]), exact=True)
    # The first three columns are the head; fields follow
    columns = [buffer[at : at + size] for at, size in zip(bounds[3:], sizes[3:], strict=False)]
    widths = [column.width_bytes for column in schema.fixed]
    return Rows(
        schema,
        head[:num_rows],
        head[num_rows : 2 * num_rows].view(np.uint64),
        tuple(
            column.reshape(num_rows, width) for column, width in zip(columns, widths, strict=False)
        ),
        lengths,
        tuple(columns[len(widths) :]),
    )


def pack_lengths(lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Copy lengths into the message that goes ahead of a parcel with variable fields."""
    return np.array(lengths, np.int64, order="C").reshape(-1).view(np.uint8)


def unpack_lengths(
    buffer: NDArray[np.uint8], num_rows: int, num_variable: int
) -> NDArray[np.int64]:
    """View a message of ``pack_lengths`` as int64[num_rows, num_variable].

    Raises:
        ExchangeError: If the message has another size, or a length is negative.
    """
    _check_size(buffer, num_rows, ALIGN_BYTES * num_rows * num_variable, exact=True)
    lengths = buffer.view(np.int64).reshape(num_rows, num_variable)
    _check_lengths(lengths, MOST_BYTES)
    return lengths


def _totals(schema: RowSchema, lengths: NDArray[np.int64] | None) -> list[int]:
    if lengths is None:
        if schema.variable:
            raise ValueError(f"parcel: fields {schema.variable} are variable; give their lengths")
        return []
    return [int(total) for total in lengths.sum(axis=0)]


def _sizes(schema: RowSchema, num_rows: int, totals: list[int]) -> list[int]:
    """Bytes of each column, without padding."""
    integers = [ALIGN_BYTES * num_rows * width for width in (1, 1, len(schema.variable))]
    return [*integers, *(num_rows * column.width_bytes for column in schema.fixed), *totals]


def _bounds(sizes: list[int]) -> NDArray[np.int64]:
    """int64[num_columns + 1]: Where each column begins, and the end of the parcel."""
    padded = [-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes]
    return np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)


def _check_size(
    buffer: NDArray[np.uint8], num_rows: int, expected_bytes: int, *, exact: bool
) -> None:
    found = len(buffer)
    if found < expected_bytes or (exact and found != expected_bytes):
        raise ExchangeError(
            f"parcel of {num_rows} rows: found {found} bytes, expected "
            f"{'' if exact else 'at least '}{expected_bytes}; the sender packed other fields or "
            f"another number of rows: start every rank with the same fields, exchange and version "
            f"of tonari"
        )


def _check_lengths(lengths: NDArray[np.int64], most_bytes: int) -> None:
    wrong = lengths[(lengths < 0) | (lengths > most_bytes)]
    if wrong.size:
        raise ExchangeError(
            f"lengths of {len(lengths)} rows: found {wrong[0]} bytes for a field, expected a "
            f"number in [0, {most_bytes}]; the message is damaged: restart from the last checkpoint"
        )
    # As floats: the sum of damaged lengths may have no place in an integer.
    total = float(lengths.sum(dtype=np.float64))
    if total > most_bytes:
        raise ExchangeError(
            f"lengths of {len(lengths)} rows: found {total:.0f} bytes in all, expected at most "
            f"{most_bytes}; the message is damaged: restart from the last checkpoint"
        )
