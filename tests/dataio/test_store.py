"""Where the rows of a fixed field lie in their file, which grows under them."""

import mmap

import numpy as np
import pytest

from dataio.rows import FixedColumn
from dataio.store import ALIGN_BYTES, FixedFile


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


@pytest.mark.parametrize("width", [8, mmap.PAGESIZE])
def test_a_file_whose_rows_begin_elsewhere_grows_as_it_is(tmp_path, width):
    """As NumPy writes it, and caches of before."""
    path = tmp_path / "fixed-0.npy"
    np.save(path, rows_of(width))
    file = FixedFile(path, FixedColumn("x", "|u1", (width,)))
    file.reserve(5000)
    file.map()
    assert file.start_bytes == 128
    assert np.array_equal(np.load(path, mmap_mode="r")[:3], rows_of(width))
    assert len(file.rows) == 5000
