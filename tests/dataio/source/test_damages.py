"""The table of formats and damages: each cell is the right samples, or one error with a cure."""

import gzip
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from dataio.rows.fields import Bytes, Field, Int
from dataio.source import write_index
from tests.dataio.source.damages import DAMAGES, REPEATS, Format, flip, judge, samples_of
from tests.dataio.source.shards import numbered, write_tar

FIELDS: dict[str, Field] = {"key": Bytes("__key__"), "data": Bytes("bin"), "label": Int("cls")}


def tar(directory: Path, *, indexed: bool = False, padded: bool = True) -> Path:
    """Members of different sizes, many of a block only."""
    path = write_tar(directory / "shard.tar", numbered(60, num_bytes=900))
    if not padded:
        raw = path.read_bytes().rstrip(b"\0")
        path.write_bytes(raw + bytes(-len(raw) % 512 + 1024))
    if indexed:
        write_index(path)
    return path


def of_one_member(directory: Path) -> Path:
    """Samples of 1,024 bytes: whatever is cut or zeroed begins or ends between two."""
    return write_tar(directory / "shard.tar", [(f"{i:03d}.cls", b"%d" % i) for i in range(90)])


def gzipped(directory: Path) -> Path:
    raw = write_tar(directory / "a.tar", numbered(60, num_bytes=900)).read_bytes()
    (directory / "a.tar").unlink()
    path = directory / "shard.tar.gz"
    path.write_bytes(gzip.compress(raw[:30_000]) + gzip.compress(raw[30_000:]))
    return path


def stale(directory: Path) -> Path:
    """The same sizes, in another order."""
    path = tar(directory, indexed=True)
    members = numbered(60, num_bytes=900)
    return write_tar(path, [*members[10:], *members[:10]])


def of_headers(data: bytes) -> Iterable[int]:
    """Bytes of names, sizes, checksums and kinds of the headers of a tar file."""
    starts = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    return [start + at for start in starts[:: len(starts) // 3] for at in (2, 100, 124, 150, 156)]


FORMATS = [
    Format("tar", tar, FIELDS, of_headers),
    Format("tar without padding", partial(tar, padded=False), FIELDS, of_headers),
    Format("tar with .idx", partial(tar, indexed=True), FIELDS, of_headers, stale=stale),
    Format("tar of one member a sample", of_one_member, {"label": Int("cls")}, of_headers),
    Format("tar.gz", gzipped, FIELDS, lambda data: range(0, len(data), len(data) // 9)),
]

each = pytest.mark.parametrize("of", FORMATS, ids=lambda of: of.name)


@each
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_noticed_or_harms_nothing(of: Format, damage: str, tmp_path: Path) -> None:
    path = of.write(tmp_path)
    expected = samples_of(of, path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    error = judge(path, of, [*expected, *expected] if damage in REPEATS else expected)
    assert damage != "nothing" or error is None


@each
def test_every_flipped_bit_that_a_checksum_covers_is_noticed(of: Format, tmp_path: Path) -> None:
    path = of.write(tmp_path)
    expected, data = samples_of(of, path), path.read_bytes()
    for at in of.checked(data):
        path.write_bytes(flip(data, at))
        judge(path, of, expected)


@pytest.mark.parametrize("of", [of for of in FORMATS if of.stale], ids=lambda of: of.name)
def test_an_index_of_before_changes_no_sample(of: Format, tmp_path: Path) -> None:
    assert of.stale is not None
    path = of.stale(tmp_path)
    fresh = samples_of(of, path)
    judge(path, of, fresh)
