"""Files are held by the page cache in large pieces: prepared where they are new, and only there."""

import numpy as np
import pytest

from dataio.rows.rows import FixedColumn
from dataio.store.files.store import FixedFile, HeapFile

ROWS, WIDTH = 3000, 1000


@pytest.fixture
def fixed(tmp_path):
    file = FixedFile(tmp_path / "fixed-0.npy", FixedColumn("x", "|u1", (WIDTH,)))
    file.reserve(20 * ROWS)
    file.map()
    return file


def contents(seed):
    return np.random.default_rng(seed).integers(0, 256, (ROWS, WIDTH), np.uint8)


def is_prepared(file):
    return len(file._large_pages._bytes) > 0


def test_a_first_write_is_prepared_and_a_second_to_the_same_place_is_not(fixed):
    positions = np.arange(ROWS)
    fixed.write(positions, contents(0))
    assert is_prepared(fixed)
    fixed.sync()
    assert not is_prepared(fixed), "the mapping must not outlive the flush"
    fixed.write(positions, contents(1))
    assert not is_prepared(fixed), "what was written before would come from the disk"
    assert (fixed.rows[:ROWS] == contents(1)).all()


def test_a_long_run_makes_large_pieces_by_itself(fixed):
    fixed.write(np.arange(ROWS), contents(0))
    fixed.sync()
    laps = np.concatenate([contents(seed) for seed in range(1, 12)])
    fixed.write(np.arange(ROWS // 2, ROWS // 2 + len(laps)), laps)
    assert not is_prepared(fixed)
    assert (fixed.rows[: ROWS // 2] == contents(0)[: ROWS // 2]).all()
    assert (fixed.rows[ROWS // 2 : ROWS // 2 + len(laps)] == laps).all()
    assert not fixed.rows[ROWS // 2 + len(laps) :].any()


def test_the_disk_begins_with_what_was_written_before_the_flush(fixed, tmp_path, monkeypatch):
    begun = []

    def begin(descriptor, offset, num_bytes, flags):
        begun.append((offset, num_bytes))
        assert flags == 2

    monkeypatch.setattr("dataio.base.atomic._sync_file_range", begin)
    fixed.write(np.arange(ROWS), contents(0))
    assert begun == [(fixed.start_bytes, ROWS * WIDTH)]
    heap = HeapFile(tmp_path / "heap-0.bin")
    heap.write(np.array([7]), np.array([ROWS * WIDTH]), contents(1).reshape(-1))
    assert begun[1:] == [(7, ROWS * WIDTH)]
    heap.write(np.array([0]), np.array([7]), contents(1)[0, :7])
    assert len(begun) == 2, "a few bytes wait for the flush"


def test_a_kernel_without_such_a_call_writes_all_the_same(fixed, monkeypatch):
    monkeypatch.setattr("dataio.base.atomic._sync_file_range", None)
    fixed.write(np.arange(ROWS), contents(0))
    assert (fixed.rows[:ROWS] == contents(0)).all()


def test_a_heap_that_grows_is_prepared_to_its_end(tmp_path):
    heap = HeapFile(tmp_path / "heap-0.bin")
    lengths = np.full(ROWS, WIDTH)
    offsets = np.arange(ROWS) * WIDTH
    for lap in range(3):
        start = lap * ROWS * WIDTH
        heap.write(start + offsets, lengths, contents(lap).reshape(-1))
        assert len(heap._large_pages._bytes) >= start + ROWS * WIDTH
    found = heap.view(3 * ROWS * WIDTH)[: 3 * ROWS * WIDTH].reshape(3, ROWS, WIDTH)
    assert all((found[lap] == contents(lap)).all() for lap in range(3))


def test_a_kernel_without_huge_pages_writes_all_the_same(fixed, monkeypatch):
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    fixed.write(np.arange(ROWS), contents(0))
    assert not is_prepared(fixed)
    assert (fixed.rows[:ROWS] == contents(0)).all()


def test_preparing_takes_no_space_beyond_what_was_claimed(fixed):
    claimed = fixed.path.stat().st_blocks
    fixed.write(np.arange(ROWS), contents(0))
    assert fixed.path.stat().st_blocks == claimed
