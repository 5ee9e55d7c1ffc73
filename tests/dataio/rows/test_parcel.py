"""A parcel gives back the rows that were packed, and says so when it cannot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from dataio.base.errors import ExchangeError
from dataio.rows.parcel import (
    pack_lengths,
    pack_parcel,
    parcel_bytes,
    unpack_lengths,
    unpack_parcel,
)
from dataio.rows.rows import FixedColumn, Rows, RowSchema, corrupt_rows, make_rows, row_blocks

COLUMNS = st.tuples(
    st.sampled_from(["|u1", "<i4", "<f8"]), st.lists(st.integers(0, 3), max_size=2).map(tuple)
)
SCHEMAS = st.builds(
    lambda fixed, num_variable: RowSchema(
        tuple(FixedColumn(f"f{number}", *column) for number, column in enumerate(fixed)),
        tuple(f"v{number}" for number in range(num_variable)),
    ),
    st.lists(COLUMNS, max_size=3),
    st.integers(0, 3),
)


def random_rows(schema: RowSchema, num_rows: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 20, (num_rows, len(schema.variable)))
    fixed = [rng.integers(0, 256, (num_rows, c.width_bytes), np.uint8) for c in schema.fixed]
    variable = [rng.integers(0, 256, total, np.uint8) for total in lengths.sum(axis=0)]
    return make_rows(schema, rng.permutation(num_rows), fixed, lengths, variable)


ROWS = st.builds(random_rows, SCHEMAS, st.integers(0, 12), st.integers(0, 2**32))
BOTH = RowSchema((FixedColumn("label", "<i4"),), ("jpg",))


@given(ROWS)
def test_rows_arrive_as_they_were_packed(rows: Rows) -> None:
    found = unpack_parcel(pack_parcel(rows), rows.schema, len(rows))
    assert len(found) == len(rows)
    assert found.schema == rows.schema
    for name in ("sample_id", "checksum", "lengths"):
        sent, arrived = getattr(rows, name), getattr(found, name)
        assert arrived.dtype == sent.dtype
        assert np.array_equal(arrived, sent)
    for sent, arrived in zip(rows.fixed + rows.variable, found.fixed + found.variable, strict=True):
        assert np.array_equal(arrived, sent)
    assert len(corrupt_rows(found)) == 0


@given(ROWS)
def test_a_receiver_knows_the_size_from_the_lengths(rows: Rows) -> None:
    buffer = pack_parcel(rows)
    header = pack_lengths(rows.lengths)
    lengths = unpack_lengths(header, len(rows), len(rows.schema.variable))
    assert np.array_equal(lengths, rows.lengths)
    assert len(buffer) == parcel_bytes(rows.schema, len(rows), lengths)
    if not rows.schema.variable:
        assert len(buffer) == parcel_bytes(rows.schema, len(rows))


@given(ROWS)
def test_unpacked_columns_are_aligned_views(rows: Rows) -> None:
    buffer = pack_parcel(rows)
    found = unpack_parcel(buffer, rows.schema, len(rows))
    columns: list[NDArray[np.generic]] = [found.sample_id, found.checksum, found.lengths]
    for column in [*columns, *found.fixed, *found.variable]:
        assert column.flags.c_contiguous
        assert column.size == 0 or np.shares_memory(column, buffer)
        assert column.size == 0 or column.ctypes.data % 8 == 0


@given(ROWS)
def test_packing_twice_gives_the_same_bytes(rows: Rows) -> None:
    assert pack_parcel(rows).tobytes() == pack_parcel(rows).tobytes()


def test_columns_that_are_not_contiguous_are_packed() -> None:
    rows = random_rows(RowSchema((FixedColumn("image", "|u1", (4,)),)), 6, seed=0)
    every_other = Rows(
        rows.schema,
        rows.sample_id[::2],
        rows.checksum[::2],
        (rows.fixed[0][::2],),
        rows.lengths[::2],
        (),
    )
    found = unpack_parcel(pack_parcel(every_other), rows.schema, 3)
    assert np.array_equal(found.fixed[0], rows.fixed[0][::2])


@pytest.mark.parametrize("change", [-100, -8, 8])
def test_a_parcel_of_another_size_is_refused(change: int) -> None:
    buffer = pack_parcel(random_rows(BOTH, 4, seed=0))
    wrong = np.resize(buffer, len(buffer) + change)
    message = rf"found {len(wrong)} bytes, expected .*\d+; .*same fields"
    with pytest.raises(ExchangeError, match=message):
        unpack_parcel(wrong, BOTH, 4)


@pytest.mark.parametrize("length", [-1, 2**62, 2**63 - 1])
def test_a_parcel_with_an_impossible_length_is_refused(length: int) -> None:
    buffer = pack_parcel(random_rows(BOTH, 4, seed=0))
    buffer[8 * 8 : 12 * 8].view(np.int64)[2] = length
    with pytest.raises(ExchangeError, match=rf"found {length} bytes for a field.*restart from"):
        unpack_parcel(buffer, BOTH, 4)


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(ExchangeError, match="found 24 bytes, expected 32"):
        unpack_lengths(np.zeros(24, np.uint8), 4, 1)
    with pytest.raises(ExchangeError, match=r"found -5 bytes for a field"):
        unpack_lengths(pack_lengths(np.array([[3], [-5]])), 2, 1)


def test_lengths_are_needed_where_fields_are_variable() -> None:
    with pytest.raises(ValueError, match=r"jpg.*give their lengths"):
        parcel_bytes(BOTH, 4)


@given(ROWS, st.integers(1, 200))
def test_blocks_of_rows_are_all_rows_once_with_their_bytes(rows: Rows, block_bytes: int) -> None:
    seen = 0
    for part, block in row_blocks(rows, block_bytes):
        assert part.start == seen
        seen = part.stop
        assert len(block) == part.stop - part.start >= 1
        assert np.array_equal(block.sample_id, rows.sample_id[part])
        assert len(corrupt_rows(block)) == 0
        for whole, piece in zip(
            rows.fixed + rows.variable, block.fixed + block.variable, strict=True
        ):
            assert piece.size == 0 or np.shares_memory(whole, piece)
    assert seen == len(rows)


@pytest.mark.parametrize("num_fixed", [1, 2])
def test_a_checksum_is_of_a_rows_bytes_however_many_are_hashed_together(
    num_fixed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataio.rows.rows.HASH_BYTES", 40)
    columns = tuple(FixedColumn(f"f{number}", "<i4", (3,)) for number in range(num_fixed))
    rows = random_rows(RowSchema(columns), 11, seed=0)
    for row in range(11):
        data = b"".join(column[row].tobytes() for column in rows.fixed)
        bound = int(rows.sample_id[row]) * 0x9E3779B97F4A7C15 % (1 << 64)
        assert int(rows.checksum[row]) == xxh3_64_intdigest(data) ^ bound
