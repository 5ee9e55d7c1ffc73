"""Large pieces of local files are read into memory that is used again, never while it is seen."""

import os
from pathlib import Path

import numpy as np
import pytest

from dataio.source.storage.files import REUSED_BYTES, Storage

PIECES = 6


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    data = np.random.default_rng(0).bytes(PIECES * REUSED_BYTES + 100)
    (tmp_path / "a").write_bytes(data)
    return data


def test_a_view_that_is_kept_never_changes(tmp_path: Path, data: bytes) -> None:
    storage = Storage()
    with storage.open(str(tmp_path / "a")) as file:
        starts = [number * REUSED_BYTES for number in range(PIECES)]
        # Parts of views: the whole ones die at once.
        kept = [file.view_at(start, REUSED_BYTES)[10:] for start in starts]
        for start, view in zip(starts, kept, strict=True):
            assert view == data[start + 10 : start + REUSED_BYTES]
    assert storage.bytes_read == PIECES * REUSED_BYTES


def test_memory_nobody_sees_is_read_into_again(tmp_path: Path, data: bytes) -> None:
    storage = Storage()
    with storage.open(str(tmp_path / "a")) as file:
        for start in range(0, PIECES * REUSED_BYTES, REUSED_BYTES):
            assert file.view_at(start, REUSED_BYTES) == data[start : start + REUSED_BYTES]
        assert storage.buffers.num_allocated == 1


def test_a_view_ends_where_the_file_does(tmp_path: Path, data: bytes) -> None:
    with Storage().open(str(tmp_path / "a")) as file:
        assert (
            file.view_at(len(data) - 2 * REUSED_BYTES, 4 * REUSED_BYTES)
            == (data[-2 * REUSED_BYTES :])
        )
        assert len(file.view_at(len(data), REUSED_BYTES)) == 0
        assert file.view_at(len(data) - 100, REUSED_BYTES) == data[-100:]


def test_idle_memory_goes_when_no_file_is_open(tmp_path: Path, data: bytes) -> None:
    storage = Storage()
    with storage.open(str(tmp_path / "a")) as file:
        view, used = file.view_at(0, REUSED_BYTES), storage.buffers
    assert storage.buffers is not used
    assert view == data[:REUSED_BYTES]


@pytest.mark.parametrize("asked", [1, 1000])
def test_a_read_that_comes_in_pieces_is_whole(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(
        "dataio.source.storage.local.os.preadv",
        lambda descriptor, parts, at: preadv(
            descriptor, [parts[0][: len(parts[0]) // 2 + asked]], at
        ),
    )
    with Storage().open(str(tmp_path / "a")) as file:
        assert file.view_at(7, REUSED_BYTES) == data[7 : 7 + REUSED_BYTES]
