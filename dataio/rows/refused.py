"""Samples whose pictures were refused while they were staged: what their rows hold in their place.

A row has its place in the cache whatever its sample is. A picture that is kept compressed has
certain words before it; what another one would have become, with ``on_error="skip"``, is written
over with them. They are no picture and no size, and travel with the row: whoever delivers it knows
it by them.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import FieldError
from dataio.rows.fields import Field, row_schema
from dataio.rows.image import Image, ImageSize
from dataio.rows.rows import FixedColumn, Rows, make_rows, row_offsets

WORDS = b"tonari: refused while staging.\n\0"
LEAST_BYTES = 16
"""A column of fewer could hold the words' beginning by chance."""


def is_replaced(field: Field) -> bool:
    """Whether a field keeps what becomes of a picture, and has room for the words."""
    column = field.column("") if isinstance(field, Image | ImageSize) else None
    return column is not None and column.width_bytes >= LEAST_BYTES


def words_of(column: FixedColumn | None) -> bytes:
    """Spell the words as long as a column is wide; once where lengths vary."""
    if column is None:
        return WORDS
    return (WORDS * (column.width_bytes // len(WORDS) + 1))[: column.width_bytes]


def find_refused(
    stored: NDArray[np.generic], column: FixedColumn, positions: NDArray[np.int64] | None = None
) -> list[int]:
    """Find which of some positions hold the words; of all, where none are given.

    Args:
        stored: dtype[num_positions, ...], C-contiguous.
        column: What they are.
        positions: int64[n].
    """
    words = np.frombuffer(words_of(column), np.uint8)
    # uint8[num_positions, width_bytes]
    rows = stored.reshape(len(stored), -1).view(np.uint8)
    which = np.arange(len(rows)) if positions is None else positions
    # Most rows differ in their first bytes: no others are read.
    first = rows[which, :8].view(np.uint64)[:, 0] == words[:8].view(np.uint64)[0]
    return [n for n in np.flatnonzero(first).tolist() if np.array_equal(rows[which[n]], words)]


class Lenient:
    """A field whose samples are refused in place of an error, where they do not decode.

    Args:
        field: One that `is_replaced`.
    """

    def __init__(self, field: Field) -> None:
        self._field = field
        self.key = field.key

    def column(self, name: str) -> FixedColumn | None:
        return self._field.column(name)

    def encode(self, raw: object, where: str) -> bytes | memoryview:
        try:
            return self._field.encode(raw, where)  # type: ignore[arg-type]
        except FieldError:
            return words_of(self._field.column(""))


def refused_row(fields: Mapping[str, Field], sample_id: int) -> Rows:
    """Make the row of a sample of which nothing is known: the words, and zeros beside them."""
    schema = row_schema(fields)
    fixed = [
        np.frombuffer(words_of(column), np.uint8)[None]
        if isinstance(fields[column.name], Lenient)
        else np.zeros((1, column.width_bytes), np.uint8)
        for column in schema.fixed
    ]
    lengths = np.zeros((1, len(schema.variable)), np.int64)
    empty = [np.empty(0, np.uint8) for _ in schema.variable]
    return make_rows(schema, np.array([sample_id]), fixed, lengths, empty)


def with_refused(rows: Rows, refused: Mapping[int, set[int]]) -> Rows:
    """Write the words before some pictures.

    Args:
        rows: As they were read.
        refused: For numbers of variable fields the rows.
    """
    lengths, variable = rows.lengths.copy(), list(rows.variable)
    words = np.frombuffer(WORDS, np.uint8)
    for number, bad in refused.items():
        bounds = row_offsets(rows.lengths[:, number]).tolist()
        column = rows.variable[number]
        parts = [
            part
            for row in range(len(rows))
            for part in (words[: len(words) * (row in bad)], column[bounds[row] : bounds[row + 1]])
        ]
        variable[number] = np.concatenate(parts)
        lengths[list(bad), number] += len(words)
    return make_rows(rows.schema, rows.sample_id, rows.fixed, lengths, variable)
