"""A window shows the file's bytes, reads each once, and none outside its extents."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.rows.fields import Bytes
from dataio.source import Storage, open_source, write_index
from dataio.source.storage.window import GAP_BYTES, FileWindow, merge_extents
from tests.dataio.source.shards import ids, numbered, rows_of, write_tar


@pytest.mark.parametrize("piece_bytes", [1, 100, 333, 5000])
def test_every_byte_is_read_once_and_shown_right(tmp_path: Path, piece_bytes: int) -> None:
    data = np.random.default_rng(0).bytes(4321)
    (tmp_path / "a").write_bytes(data)
    storage = Storage()
    with storage.open(str(tmp_path / "a")) as file:
        window = FileWindow(file)
        window.piece_bytes = piece_bytes
        # Lengths that straddle the pieces, and views that overlap.
        views = [(at, window.view(at, 150)) for at in range(0, 4321, 70)]
    assert storage.bytes_read == 4321
    for at, view in views:
        assert bytes(view) == data[at : at + 150]


def test_members_far_apart_are_read_without_what_lies_between(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(50, num_bytes=200_000))
    write_index(path)
    source = open_source(str(path))
    before = source.bytes_read
    rows = rows_of(source.read(ids(0, 20, 40), {"data": Bytes("bin")}))
    assert [row[0] for row in rows] == [0, 20, 40]
    assert source.bytes_read - before < 3 * 202_000 + 6_000


@given(st.lists(st.tuples(st.integers(0, 1 << 22), st.integers(1, 1 << 18)), min_size=1))
def test_merged_extents_cover_all_and_stand_apart(pairs: list[tuple[int, int]]) -> None:
    extents = np.array([(start, start + length) for start, length in pairs])
    merged = merge_extents(extents)
    for start, stop in extents:
        assert ((merged[:, 0] <= start) & (stop <= merged[:, 1])).any()
    assert (merged[1:, 0] - merged[:-1, 1] > GAP_BYTES).all()
    assert set(merged[:, 0]) <= set(extents[:, 0])
    assert set(merged[:, 1]) <= set(extents[:, 1])
