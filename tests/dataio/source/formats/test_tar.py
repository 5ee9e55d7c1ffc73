"""Tar shards: the same samples as WebDataset sees, whole or in part, each byte once."""

import io
import json
import sys
import tarfile
import warnings
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Bytes, Field, Int
from dataio.source import Storage, open_source, scan_shard, write_index
from dataio.source.base import ShardedSource
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import (
    Row,
    damage,
    forget_survey,
    ids,
    numbered,
    read_all,
    rows_of,
    write_tar,
)

FIELDS: dict[str, Field] = {"data": Bytes("bin"), "label": Int("cls")}
REUSE = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def opened(*args: object, **kwargs: object) -> ShardedSource:
    source = open_source(*args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(source, ShardedSource)
    return source


@REUSE
@given(
    sizes=st.lists(st.sampled_from([0, 1, 511, 512, 513, 90_000]), min_size=1, max_size=12),
    cut=st.integers(0, 12),
    indexed=st.booleans(),
    chosen=st.sets(st.integers(0, 11)),
)
def test_any_subset_reads_the_same_rows_as_the_whole(
    tmp_path: Path, sizes: list[int], cut: int, indexed: bool, chosen: set[int]
) -> None:
    paths = []
    for number, part in enumerate((range(cut), range(cut, len(sizes)))):
        names = [i for i in part if i < len(sizes)]
        path = tmp_path / f"{number}.tar"
        path.with_suffix(".idx").unlink(missing_ok=True)
        if names:
            paths.append(str(path))
            pairs = [
                [(f"{i}.cls", b"%d" % i), (f"{i}.bin", b"%d" % (i % 10) * sizes[i])] for i in names
            ]
            write_tar(path, [member for pair in pairs for member in pair])
            if indexed:
                write_index(path)
    source = open_source(paths)
    rows = read_all(source, FIELDS)
    assert [row[1][1] for row in rows] == [b"%d" % (i % 10) * n for i, n in enumerate(sizes)]
    wanted = sorted(i for i in chosen if i < len(sizes))
    assert rows_of(source.read(np.array(wanted, np.int64), FIELDS)) == [rows[i] for i in wanted]


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_every_byte_is_read_once(tmp_path: Path, num_parts: int) -> None:
    shards = [write_tar(tmp_path / f"{i}.tar", numbered(300, first=300 * i)) for i in range(2)]
    for shard in shards:
        write_index(shard)
    parts = np.array_split(np.arange(600), num_parts)

    def read(world: World) -> tuple[list[Row], int]:
        source = opened(str(tmp_path), world=world)
        return rows_of(source.read(parts[world.rank], FIELDS)), source.bytes_read

    found = run_threads(thread_worlds([1] * num_parts), read)
    assert [row[0] for rows, _ in found for row in rows] == list(range(600))
    total = sum(shard.stat().st_size for shard in shards)
    # Each index is read once, and a part begins at the mark before it.
    assert sum(num_bytes for _, num_bytes in found) <= 1.03 * total


def test_every_shard_is_opened_once(tmp_path: Path) -> None:
    for i in range(3):
        write_tar(tmp_path / f"{i}.tar", numbered(20))
    source = opened(str(tmp_path))
    before = source.storage.num_opens
    list(source.read(np.arange(60), FIELDS))
    assert source.storage.num_opens - before == 3
    list(source.read(ids(25), FIELDS))
    assert source.storage.num_opens - before == 4


def test_a_part_of_an_unindexed_shard_does_not_read_what_lies_beyond(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(40, num_bytes=200_000))
    source = opened(str(path))
    scanned = source.bytes_read
    assert scanned < 0.1 * path.stat().st_size
    rows = rows_of(source.read(ids(20, 21), FIELDS))
    assert [row[0] for row in rows] == [20, 21]
    assert source.bytes_read - scanned < 0.2 * path.stat().st_size


def test_webdataset_reads_the_same(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import webdataset

        path = str(tmp_path / "written.tar")
        with webdataset.TarWriter(path, encoder=False) as writer:
            for i in range(50):
                image = b"%d" % i * i
                name = f"dir.{i % 3}/" + "long" * (i * 2) + f"{i:04d}"
                writer.write({"__key__": name, "cls": b"%d" % i, "seg.PNG": image, "txt": b""})
        expected = list(webdataset.WebDataset(path, shardshuffle=False))
    fields: dict[str, Field] = {
        "key": Bytes("__key__"),
        "image": Bytes("seg.png"),
        "label": Int("cls"),
    }
    source = open_source(path)
    assert source.num_samples == len(expected) == 50
    for (number, (label, key, image)), sample in zip(
        read_all(source, fields), expected, strict=True
    ):
        assert int.from_bytes(label, "little") == int(sample["cls"]) == number
        assert key.decode() == sample["__key__"]
        assert image == sample["seg.png"]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_of_tar_is_read(tmp_path: Path, form: int) -> None:
    path = tmp_path / "a.tar"
    deep = "directory/" * 12
    with tarfile.open(path, "w", format=form) as tar:
        write = [("__meta__/x.cls", b"7"), (f"{deep}a.bin", b"A"), (f"{deep}a.cls", b"1")]
        write += [("._b.cls", b"8"), ("noextension", b"9"), ("b.b.cls", b"0"), ("b.cls", b"2")]
        write += [("b.bin", b"B"), ("é.bin", b"C"), ("é.cls", b"3")]
        folder = tarfile.TarInfo("folder.cls")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "b.cls"
        tar.addfile(link)
        for name, data in write:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    fields: dict[str, Field] = {"key": Bytes("__key__"), **FIELDS}
    for _ in range(2):
        rows = [row[1] for row in read_all(open_source(str(path)), fields)]
        assert [int.from_bytes(label, "little") for label, _, _ in rows] == [1, 2, 3]
        assert [key.decode() for _, key, _ in rows] == [f"{deep}a", "b", "é"]
        assert [data for _, _, data in rows] == [b"A", b"B", b"C"]
        part = rows_of(open_source(str(path)).read(ids(1, 2), fields))
        assert [row[1] for row in part] == rows[1:]
        write_index(path)


def test_a_size_in_base_256_is_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.bin", b"data"), ("a.cls", b"1")])
    raw = bytearray(path.read_bytes())
    raw[124:136] = b"\x80" + (4).to_bytes(11, "big")
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    path.write_bytes(raw)
    assert read_all(open_source(str(path)), FIELDS)[0][1][1] == b"data"


def test_a_missing_end_marker_is_accepted_on_request(tmp_path: Path) -> None:
    # A shard that was cut between two members looks the same.
    path = write_tar(tmp_path / "a.tar", numbered(2, num_bytes=8))
    path.write_bytes(path.read_bytes().rstrip(b"\0"))
    with pytest.raises(SourceError, match=r"found the end of the file at byte 4096.*joined=True"):
        open_source(str(path))
    assert len(read_all(open_source(str(path), joined=True), FIELDS)) == 2


def test_the_index_is_dalis(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "a.tar", [("x/a.JPG", b"123"), ("x/a.cls", b"1"), ("x/b.cls", b"2")]
    )
    assert write_index(path).read_text() == (
        "v1.2 2\nJPG 512 3 x/a.JPG cls 1536 1 x/a.cls\ncls 2560 1 x/b.cls\n"
    )
    with Storage().open(str(path)) as file:
        index = scan_shard(file)
    assert index.keys == ["x/a", "x/b"]
    assert index.members == [{"jpg": (512, 3), "cls": (1536, 1)}, {"cls": (2560, 1)}]


def test_a_member_is_never_unpickled(tmp_path: Path) -> None:
    seen: list[str] = []
    watching = True

    def hook(event: str, _: tuple[object, ...]) -> None:
        if watching and event in ("pickle.find_class", "os.system"):
            seen.append(event)

    sys.addaudithook(hook)
    payload = f"cos\nsystem\n(S'touch {tmp_path}/owned'\ntR.".encode()
    members = [("a.pkl", payload), ("a.npy", b"\x93NUMPY" + payload), ("a.cls", b"1")]
    path = write_tar(tmp_path / "a.tar", members)
    fields: dict[str, Field] = {"pickle": Bytes("pkl"), "array": Bytes("npy"), "label": Int("cls")}
    rows = read_all(open_source(str(path)), fields)
    watching = False
    assert rows[0][1][1] == payload
    assert seen == []
    assert not (tmp_path / "owned").exists()


def broken(path: Path, members: list[tuple[str, bytes]], keep: int | None = None) -> str:
    write_tar(path, members)
    path.write_bytes(path.read_bytes()[:keep])
    return str(path)


def test_what_is_not_a_tar_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for data, found in [
        (b"x" * 5000, r"b'xxxxxxxx' at byte 0, expected a tar header; it is not a tar file"),
        (b"\x1f\x8b\x08" + b"x" * 999, r"as gzip begins.*; give its name the end \.tar\.gz"),
        (b"BZh9" + b"x" * 999, r"as bz2 begins.*; decompress it"),
        (b"", r"a\.tar: .*expected a tar header"),
        (bytes(10240), r"holds no samples \(10240 bytes\), expected at least one; remove"),
    ]:
        path.write_bytes(data)
        with pytest.raises(SourceError, match=found):
            open_source(str(path))


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    members = [("a.bin", b"x" * 2000), ("a.cls", b"1")]
    for keep, found in [
        (1000, r"a\.tar: found member 'a\.bin' of 2000 bytes, beyond the end of the file \(1000\)"),
        (2700, r"found no header at byte 2560, expected one or the end; the shard is truncated"),
    ]:
        path = broken(tmp_path / "a.tar", members, keep)
        with pytest.raises(SourceError, match=found):
            open_source(path)


def test_a_shard_truncated_after_indexing_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(10))
    write_index(path)
    raw = path.read_bytes()
    path.write_bytes(raw[:20_000])
    with pytest.raises(SourceError, match=r"a\.idx: found 10 samples .* copy the shard again"):
        open_source(str(path))
    path.write_bytes(raw)
    source = open_source(str(path))
    damage(path, raw[:20_000])
    forget_survey(source)
    for wanted in (np.arange(10), ids(9)):
        with pytest.raises(SourceError, match=r"a\.tar: found .*the shard is truncated"):
            list(source.read(wanted, FIELDS))


@pytest.mark.parametrize("num_samples", [8, 12])
def test_a_list_that_disagrees_is_refused(tmp_path: Path, num_samples: int) -> None:
    path, index_cache = write_tar(tmp_path / "a.tar", numbered(10)), tmp_path / "indexes"
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"shardlist": [{"url": "far/a.tar", "nsamples": num_samples}]}))
    source = open_source(str(path), index_cache=index_cache)
    assert source.num_samples == num_samples
    for wanted in (np.arange(num_samples), ids(num_samples - 1)):
        with pytest.raises(SourceError, match=f"expected {num_samples} by the index.*: remove"):
            list(source.read(wanted, FIELDS))
    # What was kept of it goes with it.
    index.unlink()
    assert len(read_all(open_source(str(path), index_cache=index_cache), FIELDS)) == 10


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_an_index_whose_marks_are_wrong_is_refused_by_any_readers(
    tmp_path: Path, readers: int
) -> None:
    path, index_cache = write_tar(tmp_path / "a.tar", numbered(40)), tmp_path / "indexes"
    index = write_index(path)
    lines = index.read_text().splitlines()
    # As many samples, and the same end; but the first is not there, and one of the others is two.
    words = lines[30].split(" ")
    two = [" ".join(words[:4]), " ".join([*words[4:7], "x.cls"])]
    index.write_text("\n".join([lines[0], *lines[2:30], *two, *lines[31:], ""]))
    source = open_source(str(path), index_cache=index_cache)
    assert source.num_samples == 40
    parts = [source.read(part, FIELDS) for part in np.array_split(np.arange(40), readers)]
    with pytest.raises(SourceError, match=r"a\.tar: found sample \d+ at byte .* by the index"):
        list(chain(*parts))
    index.unlink()
    assert len(read_all(open_source(str(path), index_cache=index_cache), FIELDS)) == 40


@pytest.mark.parametrize("readers", [1, 3])
def test_an_index_of_before_is_refused_or_harms_nothing(tmp_path: Path, readers: int) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(10))
    index = write_index(path).read_bytes()
    for num_samples, num_bytes in ((14, 3000), (10, 4000), (8, 3000), (10, 2996)):
        write_tar(path, numbered(num_samples, num_bytes=num_bytes))
        if num_bytes != 2996:
            with pytest.raises(SourceError, match=r"a\.idx: found 10 samples up .*a\.tar.*remove"):
                open_source(str(path))
            continue
        # Other values, but as many samples in the same places.
        source = open_source(str(path))
        parts = np.array_split(np.arange(source.num_samples), readers)
        rows = [row for part in parts for row in rows_of(source.read(part, FIELDS))]
        (tmp_path / "a.idx").unlink()
        assert rows == read_all(open_source(str(path)), FIELDS)
        (tmp_path / "a.idx").write_bytes(index)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "found ''"),
        ("v1.1 1\n", r"expected 'v1\.2 <number of samples>' in its first line; remove the index"),
        ("v1.2 1\ncls 512 1\n", "found 3 words in line 2, expected four a member"),
        ("v1.2 10\ncls 512 1 000000.cls\n", "found 1 lines, expected 10"),
        ("v1.2 1\ncls x 1 000000.cls\n", "found 'x' '1' in line 2"),
        ("v1.2 3\n\ncls 512 1 000000.cls\ncls 512 1 a.cls", "found 1 words in line 2, expected"),
    ],
)
def test_a_broken_idx_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(10))
    (tmp_path / "a.idx").write_text(text)
    with pytest.raises(SourceError, match=found):
        open_source(str(path))


def test_a_broken_index_json_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(2))
    (tmp_path / "index.json").write_text('{"shardlist": [{"url": "a.tar"}]}')
    with pytest.raises(SourceError, match=r"index\.json: found something else .*nsamples.*remove"):
        open_source(str(path))
    (tmp_path / "index.json").write_text('{"unrelated": 1}')
    assert open_source(str(path)).num_samples == 2


def test_a_sample_without_a_field_is_refused(tmp_path: Path) -> None:
    members = [*numbered(3), ("x.bin", b""), ("x.json", b""), *numbered(3, first=3)]
    path = write_tar(tmp_path / "a.tar", members)
    for _ in range(2):
        source = open_source(str(path))
        expected = r"a\.tar: sample 'x' holds bin, json, expected 'cls' for field 'label'; every"
        for wanted in (np.arange(7), ids(3)):
            with pytest.raises(FieldError, match=expected):
                list(source.read(wanted, FIELDS))
        write_index(path)


def test_a_wrong_value_names_its_sample(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.cls", b"1"), ("b.cls", b"cat")])
    with pytest.raises(FieldError, match=r"a\.tar: sample 'b', field 'label': found b'cat'"):
        read_all(open_source(str(path)), {"label": Int("cls")})


def test_two_members_of_one_extension_are_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.cls", b"1"), ("a.CLS", b"2")])
    with pytest.raises(SourceError, match="sample 'a' has two members 'cls', expected one; write"):
        open_source(str(path))


def test_an_index_refuses_names_with_white_space(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a b.cls", b"1")])
    with pytest.raises(SourceError, match=r"white space in the name of sample 'a b'.*rename"):
        write_index(path)
    assert not (tmp_path / "a.idx").exists()


def test_ids_that_are_not_sorted_or_beyond_are_refused(tmp_path: Path) -> None:
    source = open_source(str(write_tar(tmp_path / "a.tar", numbered(3))))
    for wrong in (ids(1, 0), ids(1, 1), ids(-1), ids(3)):
        with pytest.raises(ValueError, match=r"sorted, distinct and in \[0, 3\)"):
            source.read(wrong, FIELDS)
    assert list(source.read(ids(), FIELDS)) == []


def test_a_small_damage_never_reads_as_whole(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(3, num_bytes=100))
    raw = path.read_bytes()
    source = open_source(str(path))
    whole = read_all(source, FIELDS)
    for header in (0, 1024, 2048):
        for at in (3, 100, 124, 150, 156):
            damaged = bytearray(raw)
            damaged[header + at] ^= 0x15
            damage(path, damaged)
            with pytest.raises(SourceError, match=r"a\.tar: found "):
                read_all(source, FIELDS)
    damage(path, raw)
    assert read_all(source, FIELDS) == whole
