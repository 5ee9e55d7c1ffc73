"""What a manifest's columns say, however they are kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.atomic import write_table
from dataio.store.files.manifest import (
    Column,
    empty_entries,
    from_arrays,
    from_table,
    make_entries,
    rehome,
    to_table,
)
from dataio.store.files.store import map_table

NUMBERS = st.integers(-1, 2**40)


def entries_of(ids, *, checksum=None):
    """Entries of rows of one variable field, whose bytes lie back to back."""
    slots = np.arange(len(ids))
    return make_entries(
        slot=slots,
        sample_id=np.asarray(ids, np.int64),
        checksum=np.asarray(ids if checksum is None else checksum).astype(np.uint64),
        position=slots,
        heap=np.zeros(len(ids), np.int64),
        offset=slots * 12,
        lengths=np.full((len(ids), 1), 12),
    )


@given(
    st.one_of(
        st.lists(NUMBERS, min_size=1, max_size=30).map(np.array),
        st.tuples(st.integers(-1, 9), st.integers(0, 3)),
    ),
    st.lists(st.tuples(st.integers(0, 29), NUMBERS), max_size=8),
)
def test_a_column_reads_as_the_array_it_stands_for_after_any_changes(values, changes):
    if isinstance(values, tuple):
        plain = values[0] + values[1] * np.arange(20, dtype=np.int64)
    else:
        plain = values.astype(np.int64)
    column = Column(values, len(plain), np.int64)
    for row, number in changes:
        row %= len(plain)
        plain[row] = number
        column.put(np.array([row]), np.array([number]))
        column = Column(column.packed(), len(plain), np.int64)
    assert column.tolist() == plain.tolist()
    assert column.sum() == plain.sum()
    assert np.array_equal(column[plain >= 0], plain[plain >= 0])
    assert np.array_equal(column[3:7], plain[3:7])
    assert column[np.arange(len(plain))[::-1]].dtype == np.int64


def test_a_staged_pool_is_a_few_numbers_and_its_checksums():
    table = to_table(entries_of(range(1000), checksum=np.arange(1000) ** 5))
    assert table.column_names == ["checksum"]
    assert table.nbytes == 8 * 1000


def test_columns_are_as_narrow_as_their_values():
    table = to_table(entries_of(np.arange(400)[::-1] ** 2 % 1009))
    types = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert types == {"sample_id": "uint16", "checksum": "uint16"}


@pytest.mark.parametrize("entries", [empty_entries(4, 2), entries_of([7, -1, 5, 2**33])])
def test_entries_survive_their_table_and_their_file(entries, tmp_path):
    write_table(tmp_path / "base", to_table(entries))
    for again in (from_table(to_table(entries)), from_arrays(*map_table(tmp_path / "base"))):
        for name, column in entries.columns().items():
            assert again.columns()[name].tolist() == column.tolist()


def test_changes_to_a_mapped_table_stay_out_of_its_file(tmp_path):
    path = tmp_path / "base"
    write_table(path, to_table(entries_of([3, 9, 4, 1])))
    before = path.read_bytes()
    mapped = from_arrays(*map_table(path))
    mapped.put(entries_of([1, 2]))
    assert mapped.sample_id.tolist() == [1, 2, 4, 1]
    assert mapped.checksum.tolist() == [1, 2, 4, 1]
    assert path.read_bytes() == before
    assert from_arrays(*map_table(path)).sample_id.tolist() == [3, 9, 4, 1]


def test_rehome_keeps_what_is_wanted_wherever_it_lies():
    found = rehome(entries_of([7, 5, -1]), np.array([5, 9, 7, 8]))
    assert found.sample_id.tolist() == [5, -1, 7, -1]
    assert found.position.tolist() == [1, -1, 0, -1]
    assert found.offset[found.present].tolist() == [12, 0]
    assert found.slot.tolist() == [0, 1, 2, 3]
