"""Gzipped tar shards read like plain ones; what is broken is named."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from dataio.base.errors import SourceError
from dataio.rows.fields import Bytes, Field
from dataio.source import Storage, open_source
from dataio.source.storage.compressed import DecompressedFile
from tests.dataio.source.formats.test_tar import FIELDS
from tests.dataio.source.shards import forget_survey, ids, numbered, read_all, rows_of, write_tar


def gzipped(path: Path, *, parts: int = 1, tail: bytes = b"") -> tuple[str, str]:
    """A plain shard, and the same one gzipped in some parts."""
    plain = write_tar(path, numbered(400, num_bytes=30_000))
    raw = plain.read_bytes()
    cut = -(-len(raw) // parts)
    packed = b"".join(gzip.compress(raw[i * cut : (i + 1) * cut], 1) for i in range(parts))
    compressed = path.with_name(f"{path.name}.gz")
    compressed.write_bytes(packed + tail)
    return str(plain), str(compressed)


@pytest.mark.parametrize(("parts", "tail"), [(1, b""), (3, b""), (1, bytes(3000))])
def test_a_gzipped_shard_reads_like_the_plain_one(tmp_path: Path, parts: int, tail: bytes) -> None:
    plain, compressed = (
        open_source(p) for p in gzipped(tmp_path / "a.tar", parts=parts, tail=tail)
    )
    fields: dict[str, Field] = {"key": Bytes("__key__"), **FIELDS}
    rows = read_all(plain, fields)
    assert compressed.num_samples == 400
    assert read_all(compressed, fields) == rows
    some = [1, 2, 150, 399]
    assert rows_of(compressed.read(ids(*some), fields)) == [rows[i] for i in some]


def test_both_suffixes_are_one_format(tmp_path: Path) -> None:
    compressed = Path(gzipped(tmp_path / "a.tar")[1])
    (tmp_path / "a.tar").unlink()
    (tmp_path / "b.tgz").write_bytes(compressed.read_bytes())
    assert open_source(str(tmp_path)).num_samples == 800


def test_a_part_costs_what_lies_before_it(tmp_path: Path) -> None:
    path = str(tmp_path / "a.tar.gz")
    raw = np.random.default_rng(0).bytes(6 << 20)
    Path(path).write_bytes(
        gzip.compress(
            write_tar(
                tmp_path / "b.tar", [(f"{i}.bin", raw[i << 20 : i + 1 << 20]) for i in range(6)]
            ).read_bytes(),
            1,
        )
    )
    size = Path(path).stat().st_size
    source = open_source(path)
    before = source.bytes_read
    assert len(rows_of(source.read(ids(0), {"data": Bytes("bin")}))) == 1
    assert source.bytes_read - before < size - (1 << 19)


def test_a_truncated_gzip_is_refused(tmp_path: Path) -> None:
    _, path = gzipped(tmp_path / "a.tar")
    source = open_source(path)
    forget_survey(source)
    whole = Path(path).read_bytes()
    for keep in (0, 5, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        Path(path).write_bytes(whole[:keep])
        with pytest.raises(SourceError, match=r"a\.tar\.gz: .*whole gzip file; it is truncated"):
            read_all(source, FIELDS)


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    # Of bytes that repeat, damage may decompress to the same.
    data = np.random.default_rng(0).bytes(30_000)
    raw = write_tar(tmp_path / "a.tar", [("a.bin", data), ("a.cls", b"1")]).read_bytes()
    path = str(tmp_path / "a.tar.gz")
    whole = bytearray(gzip.compress(raw))
    for at in (0, len(whole) // 2, len(whole) - 6):
        damaged = whole.copy()
        damaged[at] ^= 0x15
        Path(path).write_bytes(damaged)
        with pytest.raises(SourceError, match=r"a\.tar\.gz: found .* copy the shard again"):
            open_source(path)


@pytest.mark.parametrize("keep", [1000, 400 * 1024 - 300])
def test_a_shard_truncated_before_it_was_gzipped_is_refused(tmp_path: Path, keep: int) -> None:
    raw = write_tar(tmp_path / "a.tar", numbered(200, num_bytes=1500)).read_bytes()
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(raw))
    source = open_source(str(path))
    path.write_bytes(gzip.compress(raw[:keep]))
    forget_survey(source)
    for wanted in (FIELDS, {"data": FIELDS["data"]}):
        with pytest.raises(SourceError, match=r"a\.tar\.gz: found "):
            read_all(source, wanted)
    with pytest.raises(SourceError, match=r"a\.tar\.gz: found "):
        open_source(str(path))


def test_a_gzip_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tgz"
    path.write_bytes(gzip.compress(b"x" * 5000))
    with pytest.raises(SourceError, match=r"a\.tgz: found b'xxxxxxxx' at byte 0.*not a tar file"):
        open_source(str(path))


def test_reads_of_any_length_join_to_the_whole(tmp_path: Path) -> None:
    plain, path = gzipped(tmp_path / "a.tar", parts=2)
    raw = Path(plain).read_bytes()
    with Storage().open(path) as file:
        inside, at = DecompressedFile(file, "gzip"), 0
        for length in (1, 511, 1 << 20, 7, 5 << 20, 1 << 40):
            assert inside.read_at(at, length) == raw[at : at + length]
            at = min(at + length + 100, len(raw))
        assert inside.read_at(at, 1) == b""
        assert inside.size == len(raw)


@pytest.mark.parametrize("lacking", [100, 1 << 20])
def test_a_last_member_cut_before_it_was_gzipped_is_refused(tmp_path: Path, lacking: int) -> None:
    # Larger than what is read at once: the end is not yet known when its header is.
    raw = write_tar(tmp_path / "a.tar", [("a.cls", b"1"), ("a.bin", bytes(6 << 20))]).read_bytes()
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(raw, 1))
    source = open_source(str(path))
    path.write_bytes(gzip.compress(raw[: 3 * 512 + (6 << 20) - lacking], 1))
    forget_survey(source)
    with pytest.raises(SourceError, match=r"a\.tar\.gz: found "):
        read_all(source, FIELDS)
    if lacking > 512:
        with pytest.raises(SourceError, match=r"a\.tar\.gz: found .*the shard is truncated"):
            open_source(str(path))
