"""Gzipped shards of every format are read by one reader: what one takes, all take."""

import gzip
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from dataio.base.errors import SourceError
from dataio.rows.fields import Bytes, Field
from dataio.source import open_source
from tests.dataio.source.formats.record_cases import large_json_lines, large_mds, large_tfrecord
from tests.dataio.source.shards import numbered, read_all, write_tar

Pack = Callable[[bytes], bytes]
Fields = Mapping[str, Field]


def large_tar(pack: Pack = bytes, suffix: str = "") -> Callable[[Path], tuple[str, Fields]]:
    def write(directory: Path) -> tuple[str, Fields]:
        path = write_tar(directory / "x.tar", numbered(600, num_bytes=8000))
        packed = path.with_name(f"x.tar{suffix}")
        packed.write_bytes(pack(path.read_bytes()))
        return str(packed), {"key": Bytes("__key__"), "raw": Bytes("bin")}

    return write


FORMATS = {
    "tar": large_tar, "jsonl": large_json_lines, "tfrecord": large_tfrecord, "mds": large_mds,
}  # fmt: skip
each = pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)


def members(data: bytes, *, num: int, between: bytes, behind: bytes) -> bytes:
    """Compress data in some gzip members, one behind the other."""
    step = -(-len(data) // num)
    parts = [gzip.compress(data[at : at + step], 1) for at in range(0, len(data), step)]
    return between.join(parts) + behind


@each
@pytest.mark.parametrize(
    ("num", "between", "behind"),
    [(1, b"", bytes(1)), (1, b"", bytes(3 << 20)), (3, b"", b""), (3, bytes(700), bytes(3000))],
)
def test_members_and_zeros_behind_them_are_the_plain_shard(
    tmp_path: Path, write: Callable[..., Callable[[Path], tuple[str, Fields]]], num: int,
    between: bytes, behind: bytes,
) -> None:  # fmt: skip
    """Writers fill gzip files up with zeros, and others join them; neither is a sample."""
    plain, fields = write()(tmp_path)
    rows = read_all(open_source(plain), fields)
    pack = partial(members, num=num, between=between, behind=behind)
    found, _ = write(pack, ".gz")(tmp_path)
    assert found.endswith(".gz")
    assert read_all(open_source(found), fields) == rows


@each
@pytest.mark.parametrize("behind", [b"\1", bytes(3000) + b"\1", b"\x1f\x8b\x08"])
def test_anything_else_behind_the_last_member_is_refused(
    tmp_path: Path, write: Callable[..., Callable[[Path], tuple[str, Fields]]], behind: bytes
) -> None:
    found, fields = write(lambda data: gzip.compress(data, 1) + behind, ".gz")(tmp_path)
    with pytest.raises(SourceError, match=r"\.gz: .*(do not decompress|bytes behind the last)"):
        read_all(open_source(found), fields)
