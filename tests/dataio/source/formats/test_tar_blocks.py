"""Headers found many at a time are the headers that are found one by one."""

import io
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.errors import SourceError
from dataio.rows.fields import Array, Bytes, Field, Int
from dataio.source import Storage, open_source, scan_shard
from dataio.source.formats.tar import members as tar_members_module
from dataio.source.formats.tar.blocks import plain_headers
from dataio.source.formats.tar.headers import HeaderReader
from dataio.source.storage.window import READ_BYTES, FileWindow
from tests.dataio.source.formats.test_tar import FIELDS, REUSE
from tests.dataio.source.shards import forget_survey, ids, numbered, read_all, rows_of, write_tar

Listed = list[tuple[bytes, int, int]]


def packed(members: list[tuple[str, bytes]], form: int, **info: float) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=form) as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            for key, value in info.items():
                setattr(entry, key, value)
            tar.addfile(entry, io.BytesIO(data))
    return held.getvalue()


def plain(data: bytes) -> Listed:
    found = plain_headers(memoryview(data), limit=len(data))
    names = [row.tobytes().rstrip(b"\0") for row in found.name]
    assert [len(name) for name in names] == found.name_bytes.tolist()
    return list(zip(names, found.offset.tolist(), found.num_bytes.tolist(), strict=True))


NAMES = st.lists(
    st.text("ab./_é", min_size=1, max_size=12)
    | st.sampled_from(["x" * 100, "x" * 101, "d/" * 60 + "e.txt", "__a__/b.c", "__a.b", "a.b.c"]),
    max_size=8,
)
FORMS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


@given(NAMES, FORMS, st.sampled_from([0, 1.5, 1e9]), st.binary(max_size=1100))
def test_plain_headers_are_what_tarfile_lists_up_to_the_first_that_is_not(
    names: list[str], form: int, mtime: float, data: bytes
) -> None:
    members = [(name, data[: len(data) - i]) for i, name in enumerate(names)]
    try:
        raw = packed(members, form, mtime=mtime)
    except ValueError:
        return  # USTAR cannot say every name
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        expected = [(m.name.encode(), m.offset_data, m.size) for m in tar]
    found = plain(raw)
    # tarfile takes the slash off the end of a name.
    assert [(name.rstrip(b"/"), *at) for name, *at in found] == [
        (name.rstrip(b"/"), *at) for name, *at in expected[: len(found)]
    ]
    short = all(len(name.encode()) <= 100 for name in names)
    ascii_or_not_pax = form != tarfile.PAX_FORMAT or all(name.isascii() for name in names)
    if short and ascii_or_not_pax:
        assert len(found) == len(names)


def test_webdatasets_own_shards_are_plain(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import webdataset

        with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
            for i in range(30):
                writer.write({"__key__": f"{i:04d}", "cls": b"%d" % i, "bin": b"x" * 700})
    raw = (tmp_path / "a.tar").read_bytes()
    assert b"mtime=" in raw
    assert len(plain(raw)) == 60


def test_data_that_looks_like_a_header_is_never_believed(tmp_path: Path) -> None:
    inner = packed([("evil.cls", b"666"), ("evil.bin", b"x")], tarfile.USTAR_FORMAT)
    members = []
    for i in range(20):
        members += [(f"{i}.bin", inner), (f"{i}.cls", b"%d" % i)]
    path = write_tar(tmp_path / "a.tar", members)
    rows = read_all(open_source(str(path)), FIELDS)
    assert [row[1] for row in rows] == [[i.to_bytes(8, "little"), inner] for i in range(20)]
    assert [row[1] for row in rows_of(open_source(str(path)).read(ids(7), FIELDS))] == [rows[7][1]]


@pytest.mark.parametrize(
    ("at", "value"),
    [(156, b"2"), (156, b"S"), (124, b"\x80"), (345, b"d"), (257, b"X"), (148, b"9"), (50, b"y")],
)
def test_what_is_not_plain_is_left_to_the_reader_of_one(at: int, value: bytes) -> None:
    raw = bytearray(packed(list(numbered(4, num_bytes=600)), tarfile.USTAR_FORMAT))
    third = plain(bytes(raw))[2][1] - 512
    raw[third + at : third + at + 1] = value
    if at != 148:
        raw[third + 148 : third + 156] = b" " * 8
        raw[third + 148 : third + 156] = b"%06o\0 " % sum(raw[third : third + 512])
    assert len(plain(bytes(raw))) == 2


def shard_of_every_kind(path: Path) -> Path:
    """Plain members, pax names, long names and samples larger than a window, mixed."""
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for i in range(600):
            key = f"d/{i:04d}" + ("é" if i % 97 == 0 else "") + ("long" * 40 if i % 89 == 0 else "")
            sizes = {"bin": 5 << 20 if i == 300 else int(rng.integers(20_000)), "cls": 3}
            for extension, size in sizes.items():
                data = rng.bytes(size) if extension == "bin" else b"%03d" % i
                entry = tarfile.TarInfo(f"{key}.{extension}")
                entry.size, entry.mtime = len(data), i + (0.5 if i % 3 else 0)
                tar.addfile(entry, io.BytesIO(data))
    return path


def expected_of(path: Path) -> list[list[bytes]]:
    with tarfile.open(path) as tar:
        held = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    keys = dict.fromkeys(name.partition(".")[0] for name in held)
    return [
        [int(held[f"{key}.cls"]).to_bytes(8, "little"), key.encode(), held[f"{key}.bin"]]
        for key in keys
    ]


def test_windows_cut_samples_anywhere_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shard_of_every_kind(tmp_path / "a.tar")
    fields: dict[str, Field] = {"key": Bytes("__key__"), **FIELDS}
    expected = expected_of(path)
    size = path.stat().st_size
    for piece_bytes in (READ_BYTES, 64 << 10, 99_328):
        monkeypatch.setattr("dataio.source.formats.tar.samples.READ_BYTES", piece_bytes)
        source = open_source(str(path))
        assert [row[1] for row in read_all(source, fields)] == expected
        assert source.bytes_read < 2.1 * size
        some = [0, 3, 4, 299, 300, 301, 599]
        found = rows_of(open_source(str(path)).read(ids(*some), fields))
        assert [row[1] for row in found] == [expected[i] for i in some]


def test_one_by_one_lists_the_same_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard_of_every_kind(tmp_path / "a.tar")
    with Storage().open(str(path)) as file:
        together = scan_shard(file)
        monkeypatch.setattr(tar_members_module, "MANY_BYTES", 1 << 40)
        one_by_one = scan_shard(file)
        reader, names = HeaderReader(FileWindow(file)), []
        while not reader.ended:
            names += [member.name for member in reader.step()]
    assert together == one_by_one
    assert len(together) == 600
    assert len(names) == 1200


def test_a_label_beside_large_members_does_not_read_them(tmp_path: Path) -> None:
    members = []
    for i in range(4):
        members += [(f"{i}.bin", bytes(3 * READ_BYTES)), (f"{i}.cls", b"%d" % i)]
    source = open_source(str(write_tar(tmp_path / "a.tar", members)))
    before = source.bytes_read
    rows = rows_of(source.read(np.arange(4), {"label": Int("cls")}))
    assert [int.from_bytes(row[1][0], "little") for row in rows] == [0, 1, 2, 3]
    assert source.bytes_read - before <= 5 * READ_BYTES


@REUSE
@given(
    st.lists(
        st.sampled_from([b"1", b" 2\n", b"-3", b"1_0", b"+4", b"\xd9\xa3", b"", b"x", b"9" * 20]),
        min_size=1,
        max_size=5,
    )
)
def test_digits_read_together_are_what_each_alone_says(tmp_path: Path, values: list[bytes]) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{i}.cls", v) for i, v in enumerate(values)])
    bad = [i for i, v in enumerate(values) if v in (b"1_0", b"\xd9\xa3", b"", b"x", b"9" * 20)]
    if bad:
        with pytest.raises(Exception, match=rf"a\.tar: sample '{bad[0]}', field 'label': found"):
            read_all(open_source(str(path)), {"label": Int("cls")})
        return
    rows = read_all(open_source(str(path)), {"label": Int("cls")})
    assert [int.from_bytes(r[1][0], "little", signed=True) for r in rows] == [*map(int, values)]


def test_an_array_of_another_size_names_its_sample(tmp_path: Path) -> None:
    members = [("a.bin", bytes(8)), ("b.bin", bytes(9))]
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(Exception, match=r"a\.tar: sample 'b', field 'x': found .*9 bytes"):
        read_all(open_source(str(path)), {"x": Array("bin", (2,), "int32")})


def test_two_members_of_one_extension_are_refused_while_reading(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [*numbered(3), ("a.bin", b""), ("a.cls", b"1")])
    source = open_source(str(path))
    write_tar(path, [*numbered(3), ("a.cls", b"1"), ("a.cls", b"1")])
    forget_survey(source)
    with pytest.raises(SourceError, match="sample 'a' has two members 'cls', expected one; write"):
        read_all(source, FIELDS)


def test_a_name_behind_the_time_in_one_header_counts(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("é.bin", "é.cls"):
            entry = tarfile.TarInfo(name)
            entry.size, entry.pax_headers = 1, {"mtime": "1.5"}
            tar.addfile(entry, io.BytesIO(b"7"))
    raw = (tmp_path / "a.tar").read_bytes()
    assert raw.index(b"mtime=") < raw.index(b"path=")
    fields: dict[str, Field] = {"key": Bytes("__key__")}
    assert read_all(open_source(str(tmp_path / "a.tar")), fields)[0][1] == ["é".encode()]


@pytest.mark.parametrize("keys", [["ab", "a"], ["a", "ab"], ["d/a", "a"], ["a", "d/a"], ["a", "b"]])
def test_keys_that_begin_alike_are_two_samples(tmp_path: Path, keys: list[str]) -> None:
    members = [(f"{key}.{extension}", b"1") for key in keys for extension in ("bin", "cls")]
    rows = read_all(
        open_source(str(write_tar(tmp_path / "a.tar", members))), {"k": Bytes("__key__")}
    )
    assert [row[1] for row in rows] == [[key.encode()] for key in keys]


def test_what_is_of_no_sample_is_passed_over_in_plain_headers_too(tmp_path: Path) -> None:
    others = ["__meta__/x.cls", "__x__", ".hidden.cls", "d/.hidden.cls", "noextension", "d.e/none"]
    kept = ["__a.cls", "d/__b__.cls", "d.e/c.cls", "d.cls"]
    raw = packed([(name, b"1") for name in [*others, *kept, *others]], tarfile.USTAR_FORMAT)
    assert len(plain(raw)) == 16
    (tmp_path / "a.tar").write_bytes(raw)
    rows = read_all(open_source(str(tmp_path / "a.tar")), {"key": Bytes("__key__")})
    assert [row[1] for row in rows] == [[b"__a"], [b"d/__b__"], [b"d.e/c"], [b"d"]]
