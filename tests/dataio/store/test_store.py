"""Where the rows of a fixed field lie in their file, which grows under them."""

import mmap
import os

import numpy as np
import pytest

from dataio.base.errors import CacheError
from dataio.rows.rows import FixedColumn
from dataio.store.files.store import ALIGN_BYTES, FixedFile, HeapFile


def rows_of(width):
    return (np.arange(3 * width) % 251).astype("u1").reshape(3, width)


@pytest.mark.parametrize("width", [1, 8, 3000, mmap.PAGESIZE, 48 << 10, 5000])
def test_rows_of_a_page_or_more_begin_on_a_page_and_stay_there_as_the_file_grows(tmp_path, width):
    file = FixedFile(tmp_path / "fixed-0.npy", FixedColumn("x", "|u1", (width,)))
    for num_positions in (3, 2000):
        file.reserve(num_positions)
        file.map()
        if num_positions == 3:
            file.rows[:] = rows_of(width)
        loaded = np.load(file.path, mmap_mode="r")
        assert loaded.shape == (num_positions, width)
        assert np.array_equal(loaded[:3], rows_of(width))
        assert (file.start_bytes % ALIGN_BYTES == 0) == (width >= ALIGN_BYTES)


def test_numpy_reads_the_files_of_a_machine_with_pages_of_64_kib(tmp_path, monkeypatch):
    monkeypatch.setattr(mmap, "PAGESIZE", 64 << 10)
    width = 100_000
    file = FixedFile(tmp_path / "fixed-0.npy", FixedColumn("x", "|u1", (width,)))
    file.reserve(3)
    file.map()
    file.rows[:] = rows_of(width)
    assert np.array_equal(np.load(file.path, mmap_mode="r"), rows_of(width))


def test_a_header_that_is_not_what_the_size_says_is_written_anew(tmp_path):
    """As after a kill between growing and the header; or where it was damaged."""
    file = FixedFile(tmp_path / "fixed-0.npy", FixedColumn("x", "|u1", (8,)))
    file.reserve(3)
    file.map()
    file.rows[:] = rows_of(8)
    whole = file.path.read_bytes()
    file.path.write_bytes(bytes(60) + whole[60:])
    file.map()
    assert np.array_equal(file.rows, rows_of(8)), "rows do not depend on it"
    file.repair_header()
    assert file.path.read_bytes() == whole


def test_a_heap_that_grows_claims_only_what_is_new(tmp_path, monkeypatch):
    claimed, fallocate = [], os.posix_fallocate

    def recorded(descriptor, offset, length):
        claimed.append((offset, offset + length))
        fallocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", recorded)
    heap = HeapFile(tmp_path / "heap")
    for end in (1000, 500_000, 90 << 20):
        heap.reserve(end)
    # On a tmpfs each call visits all pages that it names: no page may be named twice.
    assert claimed[0][0] == 0
    assert [start for start, _ in claimed[1:]] == [stop for _, stop in claimed[:-1]]
    assert heap.path.stat().st_size == claimed[-1][1] >= 90 << 20


def test_a_file_that_was_cut_is_named_before_it_is_written_through_its_mapping(tmp_path):
    """As a cut page that is touched ends the process."""
    file = FixedFile(tmp_path / "headers.npy", FixedColumn("a", "<i8", (2,)))
    file.reserve(100)
    file.map()
    rows = np.ones((2, 16), np.uint8)
    file.write(np.array([3, 99]), rows)
    content = file.path.read_bytes()
    os.truncate(file.path, 200)
    with pytest.raises(CacheError, match=r"headers\.npy: is 200 bytes long, expected at least"):
        file.write(np.array([3, 99]), rows)
    file.path.write_bytes(content)
    file.close()
