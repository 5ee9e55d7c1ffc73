"""What others put into tar shards: several archives, links, keys that come again, far too much."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dataio import Loader, Reports, Shards, Workers
from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Bytes, Field
from dataio.source import Source, open_source, write_index
from dataio.source.formats import seek_points
from dataio.source.storage import compressed
from tests.dataio.source.formats.test_tar import FIELDS
from tests.dataio.source.shards import ids, numbered, read_all, rows_of, write_tar

KEYED: dict[str, Field] = {"key": Bytes("__key__"), "text": Bytes("txt")}
Entries = list[tuple[str, bytes | tuple[bytes, str]]]


def write_entries(path: Path, entries: Entries, *, form: int = tarfile.PAX_FORMAT) -> Path:
    """Files of some bytes, or members of another kind that lead somewhere."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in entries:
            info = tarfile.TarInfo(name)
            if isinstance(data, bytes):
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            else:
                info.type, info.linkname = data
                tar.addfile(info)
    return path


def texts(source: Source, *, parts: int = 1) -> list[tuple[str, bytes]]:
    numbers = np.array_split(np.arange(source.num_samples), parts)
    rows = [row for part in numbers for row in rows_of(source.read(part, KEYED))]
    return [(row[1][0].decode(), row[1][1]) for row in rows]


def raw_tar(directory: Path, first: int, *, padded: bool = True, num_samples: int = 20) -> bytes:
    raw = write_tar(directory / "part", numbered(num_samples, first=first)).read_bytes()
    (directory / "part").unlink()
    if padded:
        return raw
    raw = raw.rstrip(b"\0")
    return raw + bytes(-len(raw) % 512 + 1024)


@pytest.mark.parametrize("between", [b"", bytes(512), bytes(5120), bytes(3 << 20)])
@pytest.mark.parametrize("padded", [True, False])
def test_joined_archives_are_refused_or_read_on_request(
    tmp_path: Path, padded: bool, between: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seek_points, "SPACING_BYTES", 4096)
    parts = [raw_tar(tmp_path, first, padded=padded) for first in (0, 20, 40)]
    raw = between.join(parts)
    expected = read_all(open_source(str(write_tar(tmp_path / "whole.tar", numbered(60)))), FIELDS)
    for name, data in (("a.tar", raw), ("a.tar.gz", b"".join(map(gzip.compress, (raw, between))))):
        path = str(tmp_path / name)
        Path(path).write_bytes(data)
        with pytest.raises(SourceError, match=r"found zeros up to byte \d+, .*Shards\(.*joined="):
            open_source(path)
        source = open_source(path, joined=True)
        assert read_all(source, FIELDS) == expected
        assert rows_of(source.read(ids(19, 20, 41, 59), FIELDS)) == [
            expected[i] for i in (19, 20, 41, 59)
        ]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("behind", [b"", bytes(1024), bytes(8192)])
def test_an_extended_header_without_its_member_is_refused(
    tmp_path: Path, form: int, joined: bool, behind: bytes
) -> None:
    name = "d" * 90 + "/" + "n" * 120
    path = write_entries(tmp_path / "a.tar", [(f"{name}{i}.txt", b"v") for i in (0, 1)], form=form)
    # An extended header, its payload, a header and its payload are a member.
    raw = path.read_bytes()[: (4 + 2) * 512] + behind
    for file, data in ((path, raw), (tmp_path / "a.tar.gz", gzip.compress(raw))):
        file.write_bytes(data)
        expected = r"end at byte 3072, expected the member that the extended header before names"
        with pytest.raises(SourceError, match=rf"{file.name}: found the .*{expected}"):
            open_source(str(file), joined=joined)


def test_a_loader_of_joined_archives_trains_all(tmp_path: Path) -> None:
    # Two sets that both number their samples from 0 on.
    (tmp_path / "a.tar").write_bytes(raw_tar(tmp_path, 0) * 2 + bytes(1 << 20))
    with Loader(
        Shards(str(tmp_path / "a.tar"), joined=True), fields=FIELDS, batch_size=8,
        cache=tmp_path / "cache", workers=Workers(threads=0), reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        labels = [
            label for batch in loader for label, weight in zip(batch["label"].tolist(),
            batch["weight"].tolist(), strict=True) if weight
        ]  # fmt: skip
    assert sorted(labels) == sorted([*range(20), *range(20)])


def test_what_was_counted_as_joined_is_not_believed_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(raw_tar(tmp_path, 0) * 2)
    for _ in range(2):
        source = open_source(str(path), index_cache=tmp_path / "indexes", joined=True)
        assert source.num_samples == 40
        with pytest.raises(SourceError, match="joined=True"):
            open_source(str(path), index_cache=tmp_path / "indexes")


def test_only_tar_shards_are_joined(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(SourceError, match=r"shards that end in \.jsonl, expected tar shards"):
        open_source(str(tmp_path / "a.jsonl"), joined=True)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda raw: raw[:1024] + bytes(512) + raw[1536:], "zeros up to byte 1536, and more"),
        (lambda raw: raw[:1024] + bytes(2048) + raw[3072:], "zeros up to byte 3072, and more"),
        (lambda raw: raw + bytes(64 << 10), r"66560 zeros at byte \d+, expected 1024 to 10752"),
        (lambda raw: raw + bytes(10240) + b"x", "zeros up to byte 20480, and more"),
        (lambda raw: raw[:9216], "the end of the file at byte 9216"),
        (lambda raw: raw[:9728], "512 zeros at byte 9216"),
    ],
)
def test_zeros_that_are_no_end_are_refused(tmp_path: Path, change: object, found: str) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{i}.txt", b"x" * 500) for i in range(9)])
    raw = path.read_bytes()
    path.write_bytes(change(raw))  # type: ignore[operator]
    with pytest.raises(SourceError, match=rf"a\.tar: found {found}.*joined=True"):
        open_source(str(path))


def test_writers_may_fill_records_of_any_common_size(tmp_path: Path) -> None:
    raw = raw_tar(tmp_path, 0, padded=False)
    for blocks in range(20):
        path = tmp_path / "a.tar"
        path.write_bytes(raw + bytes(512 * blocks))
        assert open_source(str(path)).num_samples == 20


FILES: Entries = [("s0.txt", b"zero"), ("d/s1.txt", b"one")]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("parts", [1, 3])
def test_links_are_followed_within_the_shard(
    tmp_path: Path, form: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seek_points, "SPACING_BYTES", 512)
    # Longer names are in records of their own.
    deep = "deep/" * (8 if form == tarfile.USTAR_FORMAT else 28) + "target.txt"
    entries: Entries = [
        ("a.txt", (tarfile.SYMTYPE, "z.txt")),
        ("b.txt", (tarfile.LNKTYPE, "d/s1.txt")),
        *FILES,
        ("d/e/c.txt", (tarfile.SYMTYPE, "../s1.txt")),
        ("d/e/f.txt", (tarfile.SYMTYPE, "c.txt")),
        (deep, b"deep" * 400_000),
        ("./g.txt", (tarfile.LNKTYPE, deep)),
        ("h.txt", (tarfile.SYMTYPE, f"./{deep}")),
        ("folder", (tarfile.SYMTYPE, "nowhere")),
        ("z.txt", b"last"),
    ]
    source = open_source(str(write_entries(tmp_path / "a.tar", entries, form=form)))
    assert texts(source, parts=parts) == [
        ("a", b"last"), ("b", b"one"), ("s0", b"zero"), ("d/s1", b"one"), ("d/e/c", b"one"),
        ("d/e/f", b"one"), (deep[:-4], b"deep" * 400_000), ("./g", b"deep" * 400_000),
        ("h", b"deep" * 400_000), ("z", b"last"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (("x.txt", (tarfile.SYMTYPE, "absent.txt")), "the link 'x.txt' to 'absent.txt' at byte"),
        (("x.txt", (tarfile.SYMTYPE, "../s0.txt")), r"to '\.\./s0\.txt'"),
        (("x.txt", (tarfile.SYMTYPE, "/s0.txt")), "to '/s0.txt'"),
        (("x.txt", (tarfile.SYMTYPE, "x.txt")), "to 'x.txt', a circle"),
        (("x.txt", (tarfile.FIFOTYPE, "")), "member 'x.txt' of kind '6'"),
        (("x.txt", (tarfile.CHRTYPE, "")), "member 'x.txt' of kind '3'"),
    ],
)
def test_what_leads_to_no_file_is_refused(
    tmp_path: Path, entry: tuple[str, tuple[bytes, str]], found: str
) -> None:
    path = write_entries(tmp_path / "a.tar", [*FILES, entry])
    with pytest.raises(SourceError, match=rf"a\.tar: found .*{found}"):
        open_source(str(path))
    with pytest.raises(SourceError, match=rf"a\.tar: found .*{found}"):
        write_index(path)


def test_links_of_a_circle_are_refused(tmp_path: Path) -> None:
    circle: Entries = [("x.txt", (tarfile.SYMTYPE, "y.txt")), ("y.txt", (tarfile.LNKTYPE, "x.txt"))]
    with pytest.raises(SourceError, match=r"the link 'x\.txt' to 'x\.txt', a circle.*dereference"):
        open_source(str(write_entries(tmp_path / "a.tar", [*FILES, *circle])))


def test_links_of_a_compressed_shard_are_refused(tmp_path: Path) -> None:
    path = write_entries(tmp_path / "a.tar", [*FILES, ("x.txt", (tarfile.LNKTYPE, "s0.txt"))])
    packed = tmp_path / "b.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(SourceError, match=r"b\.tar\.gz: found a link at byte .*hard-dereference"):
        open_source(str(packed))


def test_links_of_joined_archives_stay_in_their_own(tmp_path: Path) -> None:
    parts = []
    for text in (b"first", b"second"):
        entries: Entries = [("a.txt", (tarfile.SYMTYPE, "b.txt")), ("b.txt", text)]
        parts.append(write_entries(tmp_path / "a.tar", entries).read_bytes())
    (tmp_path / "a.tar").write_bytes(b"".join(parts))
    assert texts(open_source(str(tmp_path / "a.tar"), joined=True)) == [
        ("a", b"first"), ("b", b"first"), ("a", b"second"), ("b", b"second")
    ]  # fmt: skip


@pytest.mark.parametrize("indexed", [False, True])
def test_a_key_that_comes_again_is_refused_or_another_sample(tmp_path: Path, indexed: bool) -> None:
    members = [("a.txt", b"1"), ("b.txt", b"2"), ("a.txt", b"3"), ("c.txt", b"4")]
    path = write_tar(tmp_path / "a.tar", members)
    if indexed:
        lines = [f"txt {512 + 1024 * i} 1 {name}" for i, (name, _) in enumerate(members)]
        (tmp_path / "a.idx").write_text("\n".join(["v1.2 4", *lines, ""]))
    with pytest.raises(SourceError, match=r"a\.tar: found sample 'a' in two places.*joined=True"):
        open_source(str(path))
    with pytest.raises(SourceError, match=r"a\.tar: found sample 'a' in two places"):
        write_index(path)
    source = open_source(str(path), joined=True)
    assert texts(source) == [("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4")]


def test_a_sample_in_two_halves_is_refused(tmp_path: Path) -> None:
    members = [("a.txt", b"1"), ("b.txt", b"2"), ("b.cls", b"2"), ("a.cls", b"1")]
    path = str(write_tar(tmp_path / "a.tar", members))
    with pytest.raises(SourceError, match=r"sample 'a' in two places, expected the members of a"):
        open_source(path)
    with pytest.raises(FieldError, match="sample 'a' holds cls, expected 'txt'"):
        texts(open_source(path, joined=True))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_a_small_compressed_shard_that_expands_without_limit_is_refused(
    tmp_path: Path, form: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "VALUE_BYTES", 6 << 20)
    path, num_bytes = tmp_path / "a.tar.gz", 8 << 20
    head = tarfile.TarInfo("a.txt")
    head.size = num_bytes
    if form == tarfile.PAX_FORMAT:
        head.size, head.pax_headers = 0, {"size": str(num_bytes)}
    raw = head.tobuf(form)  # type: ignore[arg-type]
    path.write_bytes(gzip.compress(raw + bytes(num_bytes + 1024)))
    assert path.stat().st_size < 10_000
    with pytest.raises(
        SourceError, match=r"member 'a\.txt' of 8388608 bytes in a compressed shard"
    ):
        open_source(str(path))


def test_a_long_name_without_end_is_refused(tmp_path: Path) -> None:
    head = tarfile.TarInfo("././@LongLink")
    head.type, head.size = b"L", 1 << 30
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(head.tobuf(tarfile.USTAR_FORMAT) + bytes(4 << 20)))
    with pytest.raises(SourceError, match="a long name of 1073741824 bytes at byte 512, expected"):
        open_source(str(path))


def test_counts_of_an_index_go_with_it(tmp_path: Path) -> None:
    path, kept = write_tar(tmp_path / "a.tar", numbered(30)), tmp_path / "indexes"
    index = write_index(path)
    first = open_source(str(path), index_cache=kept)
    warm = open_source(str(path), index_cache=kept)
    assert (warm.num_samples, warm.bytes_read) == (30, 0)
    index.unlink()
    again = open_source(str(path), index_cache=kept)
    assert again.num_samples == 30
    assert again.bytes_read > 0
    assert first.fingerprint == warm.fingerprint == again.fingerprint


def test_a_list_that_changed_is_read_again(tmp_path: Path) -> None:
    path, kept = write_tar(tmp_path / "a.tar", numbered(30)), tmp_path / "indexes"
    for num_samples in (31, 30):
        shardlist = [{"url": "a.tar", "nsamples": num_samples}]
        (tmp_path / "index.json").write_text(json.dumps({"shardlist": shardlist}))
        assert open_source(str(path), index_cache=kept).num_samples == num_samples
    assert len(read_all(open_source(str(path), index_cache=kept), FIELDS)) == 30
