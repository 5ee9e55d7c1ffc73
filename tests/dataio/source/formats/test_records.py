"""What files of records hold beyond the table of sources, and what is refused in them."""

import bz2
import codecs
import gc
import gzip
import io
import json
import lzma
import os
import re
import sys
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio import Loader, Reports, Workers
from dataio.base.errors import DataioError
from dataio.rows.fields import Array, Bytes, Field, Image, Int, Text, Tokens
from dataio.source import Shards, Source, open_source
from dataio.source.base import ShardedSource, place_of
from dataio.source.formats import json_lines as json_lines_module
from dataio.source.formats.example import _varints, read_example
from dataio.source.storage.compressed import HEAD_BYTES, codec_of
from dataio.world import World, run_threads, single_world, thread_worlds
from tests.dataio.source.formats.record_cases import (
    GOLDEN,
    LIT_FIELDS,
    RECORDS,
    copied,
    framed,
    large_json_lines,
    large_tfrecord,
    megatron,
    packed,
    truncated,
    write_megatron,
    zstd,
)
from tests.dataio.source.formats.record_samples import NUM_SAMPLES, sample
from tests.dataio.source.shards import forget_survey, ids, read_all, rows_of, write_tar

Spec = Callable[[Path], str]


def make(source: Any, cache: Path, fields: dict[str, Field]) -> Loader:
    return Loader(
        source, batch_size=4, fields=fields, cache=cache, world=single_world(),
        workers=Workers(threads=0), reports=Reports(progress=False),
    )  # fmt: skip


@pytest.mark.parametrize("case", RECORDS, ids=lambda case: case.name)
def test_ranks_read_what_one_reads(case: Any, tmp_path: Path) -> None:
    spec = case.write(tmp_path)
    alone = open_source(spec)
    whole = read_all(alone, case.fields)
    assert len(whole) == alone.num_samples == case.num_samples

    def work(world: World) -> list[tuple[int, list[bytes]]]:
        source = open_source(spec, world=world)
        assert source.fingerprint == alone.fingerprint
        mine = np.arange(world.rank, source.num_samples, world.world_size)
        return rows_of(source.read(mine, case.fields))

    ranks = run_threads(thread_worlds([2, 1]), work)
    assert sorted(row for rows in ranks for row in rows) == whole


@pytest.mark.parametrize("large", [large_tfrecord(), large_json_lines()], ids=["tfrecord", "jsonl"])
def test_any_choice_of_samples_is_read_by_the_seek_points(large: Any, tmp_path: Path) -> None:
    spec, fields = large(tmp_path)
    source = open_source(spec)
    whole = read_all(source, fields)
    rng = np.random.default_rng(0)
    for count in (1, 3, 50):
        chosen = np.sort(rng.choice(source.num_samples, count, replace=False))
        assert rows_of(source.read(chosen, fields)) == [whole[i] for i in chosen.tolist()]
    before = source.bytes_read
    assert rows_of(source.read(ids(0, 599), fields)) == [whole[0], whole[599]]
    # Two samples of the ends, of some MB between.
    assert source.bytes_read - before < 1 << 20


@pytest.mark.parametrize("name", ["mds", "litdata"])
def test_arrays_of_every_form_are_read(name: str, tmp_path: Path) -> None:
    source = open_source(copied(name)(tmp_path))
    (row,) = rows_of(source.read(ids(4), {"free": Array("free", (2, 2), "int16")}))
    assert row[1] == [sample(4)["free"].tobytes()]


def test_a_jpeg_of_litdata_is_kept_as_it_is(tmp_path: Path) -> None:
    source = open_source(copied("litdata")(tmp_path))
    for _, (data,) in read_all(source, {"jpeg": Image("jpeg")}):
        assert data.startswith(b"\xff\xd8")


def test_packed_numbers_are_read_as_single_ones() -> None:
    # Written by hand: tfrecord packs, other writers repeat.
    single = b"\x08\x05\x08\xac\x02\x08" + b"\xff" * 9 + b"\x01"
    packed = b"\x0a\x0d\x05\xac\x02" + b"\xff" * 9 + b"\x01"

    def example(values: bytes) -> memoryview:
        feature = b"\x1a" + bytes([len(values)]) + values
        entry = b"\x0a\x01n\x12" + bytes([len(feature)]) + feature
        features = b"\x0a" + bytes([len(entry)]) + entry
        return memoryview(b"\x0a" + bytes([len(features)]) + features)

    for values in (single, packed):
        assert read_example(example(values), "n")["n"].tolist() == [5, 300, -1]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="end within field 1"):
        read_example(example(single)[:-1], "n")


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60))
def test_any_numbers_are_read(numbers: list[int]) -> None:
    """Few are decoded one by one, many together."""
    data = b""
    for number in numbers:
        number &= 2**64 - 1
        while number > 127:
            data += bytes([number & 127 | 128])
            number >>= 7
        data += bytes([number])
    assert _varints(data).tolist() == numbers


def test_documents_without_sequences_have_none(tmp_path: Path) -> None:
    sequences = [np.arange(3, dtype="<i4"), np.arange(0, dtype="<i4"), np.arange(2, dtype="<i4")]
    name = write_megatron(tmp_path / "x", sequences, [0, 1, 1, 3], code=4)
    rows = read_all(open_source(name), {"tokens": Tokens("tokens"), "d": Int("document")})
    assert [(np.frombuffer(d, "<i8")[0], len(t) // 4) for _, (d, t) in rows] == [
        (0, 3),
        (2, 0),
        (2, 2),
    ]


def test_tensorflow_names_need_no_suffix(tmp_path: Path) -> None:
    data = (GOLDEN / "train.tfrecord-00000-of-00001").read_bytes()
    for number in range(2):
        (tmp_path / f"train-0000{number}-of-00002").write_bytes(data)
    source = open_source(str(tmp_path))
    assert source.num_samples == 2 * NUM_SAMPLES
    fields: dict[str, Field] = {"label": Int("label")}
    labels = [int(np.frombuffer(row[0], "<i8")[0]) for _, row in read_all(source, fields)]
    assert labels == [7 * number for number in range(NUM_SAMPLES)] * 2


def test_lines_beside_shards_are_notes(tmp_path: Path) -> None:
    copied("train.tfrecord-00000-of-00001")(tmp_path)
    (tmp_path / "metadata.jsonl").write_text('{"a": 1}\n')
    assert open_source(str(tmp_path)).num_samples == NUM_SAMPLES


def test_mds_shards_open_without_their_index(tmp_path: Path) -> None:
    copied("mds")(tmp_path)
    (tmp_path / "index.json").unlink()
    assert open_source(f"{tmp_path}/shard.*.mds").num_samples == NUM_SAMPLES


@pytest.mark.parametrize("name", ["mds", "litdata"])
def test_shards_are_read_by_their_urls(name: str, tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    for path in (GOLDEN / name).iterdir():
        files.pipe(f"/{name}/{path.name}", path.read_bytes())
    fields: dict[str, Field] = {"label": Int("label"), "text": Text("text")}
    pattern = {"mds": "memory://mds", "litdata": "memory://litdata/chunk-*.bin"}[name]
    local = open_source(copied(name)(tmp_path))
    assert read_all(open_source(pattern), fields) == read_all(local, fields)


def test_the_splits_of_a_directory_are_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        copied("mds")(tmp_path / split)
    with pytest.raises(DataioError, match=r"name one of its splits: .*/train, .*/val$"):
        open_source(str(tmp_path))


def test_members_of_json_and_npy_in_a_tar_are_read(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(3, dtype=np.int16))
    members = [("0.json", b'{"a": 1}'), ("0.x.npy", file.getvalue())]
    source = open_source(write_tar(tmp_path / "x.tar", members))
    fields: dict[str, Field] = {"json": Text("json"), "x": Array("x.npy", (3,), "int16")}
    ((_, (array, text)),) = read_all(source, fields)
    assert text == b'{"a": 1}'
    assert np.frombuffer(array, "<i2").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"shards": ["a", "b"]}, None),
        ({"shards": [{"name": "a.tar"}]}, None),
        (
            {"shards": [{"format": "json", "version": 2}]},
            "the format 'json', version 2, expected mds",
        ),
        ({"shards": [{"format": "mds", "version": 2}]}, r"index\.json: does not read as the index"),
        ({"chunks": [{}], "config": {}}, r"index\.json: does not read as the index of a dataset"),
        ({"chunks": [], "config": {}}, r"index\.json: names 0 shards"),
    ],
)
def test_only_their_own_indexes_are_read(index: Any, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps(index))
    write_tar(tmp_path / "x.tar", [("0.cls", b"1")])
    if message is None:
        assert open_source(str(tmp_path)).num_samples == 1
    else:
        with pytest.raises(DataioError, match=message):
            open_source(str(tmp_path))


def lines(*documents: object) -> Spec:
    def write(directory: Path) -> str:
        path = directory / "x.jsonl"
        path.write_text("\n".join(map(json.dumps, documents)))
        return str(path)

    return write


def tfrecord(data: bytes) -> Spec:
    def write(directory: Path) -> str:
        path = directory / "x.tfrecord"
        path.write_bytes(data)
        return str(path)

    return write


def without(write: Spec, name: str) -> Spec:
    def left(directory: Path) -> str:
        spec = write(directory)
        (directory / name).unlink()
        return spec

    return left


@pytest.mark.parametrize(
    ("write", "field", "message"),
    [
        (copied("mds"), Int("cls"), r"shard\.00000\.mds holds .*label.*, expected 'cls' for field"),
        (copied("mds"), Int("meta.x"), r"column 'meta' holds id, tags, deep, expected 'x'"),
        (copied("mds"), Int("text"), r"sample 0, field 'x': found b's.*expected a whole number"),
        (
            copied("mds_pickle"), Bytes("b"),
            r"column 'b' has the encoding 'pkl': pickles, which are never loaded; expected one of",
        ),
        (truncated("mds", "shard.00001.mds", 3200), Int("label"), r"is 103 bytes long, expected"),
        (copied("litdata"), Bytes("any"), r"'any' has the serializer 'pickle': pickles, which are"),
        (copied("litdata"), Int("cls"), r"chunk-0-0\.bin holds .*meta\.id.*, expected 'cls'"),
        (
            without(copied("litdata"), "index.json"), Int("label"),
            r"the directory holds no shard, expected files",
        ),
        (
            tfrecord(b"x" * 100), Int("label"),
            r"x\.tfrecord: record 0 at byte 0: found a length that its checksum does not match",
        ),
        (
            tfrecord(framed(b"abc") + framed(b"d" * 99)[:-5]), Bytes("__record__"),
            r"record 1 at byte 19: found the end of the file within 99 bytes",
        ),
        (tfrecord(framed(b"abc")), Int("label"), r"record 0 .*no tf\.train\.Example"),
        (
            copied("train.tfrecord-00000-of-00001"), Int("cls"),
            r"sample 0 holds .*label.*, expected 'cls' for field 'x'",
        ),
        (lines({"a": 1}, {"b": 1}), Int("a"), r"x\.jsonl: sample 1 holds b, expected 'a'"),
        (lines({"a": None}), Int("a"), r"sample 0, key 'a': found NoneType, expected a number"),
        (lines({"a": [1, 2]}), Array("a", (3,), "int8"), r"found int64\[2\], expected int8\[3\]"),
        (lines({"a": [300]}), Array("a", (1,), "int8"), r"found int64\[1\], expected int8\[1\]"),
        (lines(), Text("a"), r"x\.jsonl: holds no samples \(0 bytes\)"),
        (
            without(megatron, "my_text.v2_document.idx"), Tokens("tokens"),
            r"my_text\.v2_document: no such file",
        ),
        (megatron, Int("label"), r"\.bin holds tokens, document, expected 'label'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_message(
    write: Spec, field: Field, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataioError, match=message):
        read_all(open_source(write(tmp_path)), {"x": field})


HASHED = pytest.mark.parametrize("name", ["mds_hashes", "mds_zstd_hashes"])


def damaged(directory: Path) -> Path:
    """Change a letter of the second shard that its format does not notice."""
    (shard,) = directory.glob("*00001.mds*")
    data = bytearray(shard.read_bytes())
    if shard.suffix == ".zstd":
        # As damaged on its way into the archive: it decompresses to other bytes.
        with pa.CompressedInputStream(pa.BufferReader(bytes(data)), "zstd") as packed:
            data = bytearray(zstd(packed.read()[:-1] + b"?"))
    else:
        data[-1] ^= 1
    shard.write_bytes(data)
    return shard


@HASHED
def test_a_shard_that_its_hash_does_not_match_is_refused(name: str, tmp_path: Path) -> None:
    spec = copied(name)(tmp_path)
    fields: dict[str, Field] = {"text": Text("text")}
    whole = read_all(open_source(spec), fields)
    assert [row[1] for row in whole] == [[f"text {i}".encode()] for i in range(NUM_SAMPLES)]
    shard = damaged(tmp_path)
    message = (
        rf"{shard.name}: has the xxh64 \w+, expected \w+ by index\.json beside it; .*hashes=Fa"
    )
    for numbers in (np.arange(NUM_SAMPLES), ids(NUM_SAMPLES - 2)):
        source = open_source(spec)
        for _ in range(2):
            with pytest.raises(DataioError, match=message):
                rows_of(source.read(numbers, fields))
    # What does not touch it is read.
    assert rows_of(open_source(spec).read(ids(0), fields)) == whole[:1]
    with make(Shards(spec, hashes=False), tmp_path / "cache", fields) as loader:
        assert len(list(loader)) == NUM_SAMPLES // 4
    with pytest.raises(DataioError, match=message):
        make(Shards(spec), tmp_path / "other", fields)


@HASHED
def test_a_shard_with_a_hash_is_read_whole_once(name: str, tmp_path: Path) -> None:
    spec = copied(name)(tmp_path)
    source, fields = open_source(spec), {"text": Text("text")}
    sizes = sorted(path.stat().st_size for path in tmp_path.iterdir())
    before = source.bytes_read
    rows = read_all(source, fields)
    assert source.bytes_read - before == sum(sizes)
    again = source.bytes_read
    assert rows_of(source.read(ids(3), fields)) == rows[3:4]
    # Its first bytes, by which it is known to be compressed, are read for themselves.
    assert source.bytes_read - again <= sizes[1] + HEAD_BYTES


@pytest.mark.parametrize("name", ["litdata", "mds_hashes"])
def test_an_index_is_read_once_for_each_source_and_goes_with_it(name: str, tmp_path: Path) -> None:
    source = open_source(copied(name)(tmp_path))
    assert isinstance(source, ShardedSource)
    before, storage = source.storage.num_opens, weakref.ref(source.storage)
    for _ in range(3):
        read_all(source, {"text": Text("text")})
    assert source.storage.num_opens - before == 3 * len(source.shards) + 1
    del source
    gc.collect()
    assert storage() is None, "something beyond the source keeps it"


def test_a_hash_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    spec = copied("mds_hashes")(tmp_path)
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace("sha1", "blink").replace("xxh64", "crc9"))
    with pytest.raises(DataioError, match=r"has hashes by blink, crc9, expected one that xxhash"):
        read_all(open_source(spec), {"text": Text("text")})


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"x": 1}\n' * 3 + bytes(5000), r"x\.jsonl: at byte 27: found a byte of zero,"),
        (b'{"x": 1}\n{"x": 1, "x": 2}\n', r"sample 1 at byte 9: .*\(the key 'x' twice\)"),
        (b'{"x": 1}\n{"x": 1e400}\n', r"sample 1, key 'x': found a number beyond 1.8e308"),
        (b'{"x": [1.5, -2e999]}\n', r"sample 0, key 'x': found a number beyond 1.8e308"),
        (b'{"x": 1, "y": {"a": 1, "a": 1}}\n', r"sample 0 .*\(the key 'a' twice\)"),
        (b'{"x": 1}\n{"x": 1', r"sample 1 at byte 9: found b'\{\"x\": 1', expected one object"),
        (b'{"x": 1} {"x": 2}\n', r"sample 0 .*Extra data"),
        (b"[1]\n", r"sample 0 .*it is a list"),
        (b'{"x": ' + b"[" * 100_000, r"sample 0 at byte 0: found b'\{\"x\": \["),
        ('{"x": "é"}\n'.encode("latin-1"), r"sample 0 .*in UTF-8 \('utf-8' codec can't decode"),
        ('{"x": 1}\n'.encode("utf-16"), r"x\.jsonl: at byte 3: found a byte of zero,"),
        (lzma.compress(b'{"x": 1}\n'), r"x\.jsonl: is compressed by xz, .*; decompress the shard"),
    ],
)  # fmt: skip
def test_lines_that_are_none_are_refused(data: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataioError, match=found):
        read_all(open_source(str(path)), {"x": Int("x")})


def test_a_line_without_an_end_takes_no_more_than_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines_module, "MOST_LINE_BYTES", 1 << 20)
    path = tmp_path / "x.jsonl"
    path.write_bytes(gzip.compress(b" " * (32 << 20)))
    with pytest.raises(DataioError, match=r"found a line of more than 1048576 bytes"):
        open_source(str(path))


def test_marks_and_ends_of_lines_of_other_systems_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    part = codecs.BOM_UTF8 + b'{"x": 1}\r\n\r\n  {"x": 2} \r\n'
    path.write_bytes(2 * part)
    rows = read_all(open_source(str(path)), {"x": Int("x")})
    assert [int(np.frombuffer(x, "<i8")[0]) for _, (x,) in rows] == [1, 2, 1, 2]


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress, "zlib": zlib.compress, "zstd": zstd, "bz2": bz2.compress,
    "xz": lzma.compress, "none": bytes,
}  # fmt: skip


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.tfrec", "x-00000-of-00001", "x.mds"])
def test_what_is_compressed_is_known_by_its_content(name: str, tmp_path: Path) -> None:
    records: dict[str, tuple[bytes, Field]] = {
        "x.tfrec": (framed(b"abc") * 4, Bytes("__record__")),
        "x-00000-of-00001": (framed(b"abc") * 4, Bytes("__record__")),
        "x.mds": (
            packed([b"\3\0\0\0abc"] * 4, json.dumps({
                "column_names": ["x"], "column_encodings": ["str"], "column_sizes": [None],
                "version": 2,
            }).encode()),
            Text("x"),
        ),
    }  # fmt: skip
    raw, field = records.get(name, (b'{"x": "abc"}\n' * 4, Text("x")))
    for codec, pack in PACKINGS.items():
        (tmp_path / name).write_bytes(pack(raw))
        assert codec_of(pack(raw)[:12]) == (None if codec == "none" else codec)
        if codec == "xz":
            with pytest.raises(DataioError, match=r"is compressed by xz"):
                open_source(str(tmp_path / name))
        else:
            rows = read_all(open_source(str(tmp_path / name)), {"x": field})
            assert [row[1] for row in rows] == [[b"abc"]] * 4
    with make(str(tmp_path / name), tmp_path / "cache", {"x": field}) as loader:
        assert sum(int((batch["weight"] > 0).sum()) for batch in loader) == 4


def test_a_record_as_long_as_a_codec_begins_is_not_taken_for_compressed(tmp_path: Path) -> None:
    data = framed(bytes(0x088B1F))
    assert codec_of(data[:12]) == "gzip"
    (tmp_path / "x.tfrecord").write_bytes(data)
    rows = read_all(open_source(str(tmp_path / "x.tfrecord")), {"x": Bytes("__record__")})
    assert len(rows[0][1][0]) == 0x088B1F


@pytest.mark.parametrize("name", ["mds", "mds_zstd", "litdata"])
@pytest.mark.parametrize("where", ["", "memory://indexed"])
def test_an_index_names_all_shards_that_are_there(where: str, name: str, tmp_path: Path) -> None:
    spec = copied(name)(tmp_path)
    root = where or spec
    if where:
        fsspec.filesystem("memory").put(f"{spec}/", f"/indexed/{name}/", recursive=True)
        root = f"{where}/{name}"
    fields: dict[str, Field] = {"text": Text("text")}
    expected = [[f"sämple {number}".encode()] for number in range(NUM_SAMPLES)]
    assert [row[1] for row in read_all(open_source(root), fields)] == expected
    first = sorted(path.name for path in tmp_path.iterdir() if path.name != "index.json")[0]
    for other in (re.sub(r"\d(?=\.)", "7", first, count=1), None):
        with fsspec.open(f"{root}/{first}", "rb") as file:
            data = file.read()
        if other is not None:
            with fsspec.open(f"{root}/{other}", "wb") as file:
                file.write(data)
            with pytest.raises(
                DataioError, match=rf"but not {other}, of 1 others .* is older than"
            ):
                open_source(root)
        system, path = fsspec.core.url_to_fs(f"{root}/{other or first}")
        system.rm(path)
    with pytest.raises(DataioError, match=r"index\.json: names \d shards, of which 1 are missing"):
        open_source(root)


def test_a_chunk_of_another_length_than_its_index_says_is_refused(tmp_path: Path) -> None:
    spec = copied("litdata")(tmp_path)
    index = tmp_path / "index.json"
    document = json.loads(index.read_text())
    document["chunks"][1]["chunk_bytes"] += 1
    index.write_text(json.dumps(document))
    with pytest.raises(
        DataioError, match=r"chunk-0-1\.bin: holds \d+ bytes, expected \d+ by index"
    ):
        read_all(open_source(spec), {"text": Text("text")})


@pytest.mark.parametrize(
    ("first", "second"),
    [("a.jsonl", "a.jsonl.gz"), ("a.tar", "a.tgz"), ("x.00000.mds", "x.00000.mds.zstd")],
)
def test_a_shard_beside_its_compressed_copy_is_refused(
    first: str, second: str, tmp_path: Path
) -> None:
    for name in (first, second):
        (tmp_path / name).touch()
    for pattern in (str(tmp_path), f"{tmp_path}/{first[0]}*"):
        with pytest.raises(DataioError, match=r"each sample would come twice; remove one, or name"):
            open_source(pattern)


def test_documents_that_an_index_names_out_of_order_are_refused(tmp_path: Path) -> None:
    sequences = [np.arange(3, dtype="<u2"), np.arange(2, dtype="<u2")]
    for documents in ([0, 3], [0, 2, 1], [1, 2], [0, -1, 2], []):
        name = write_megatron(tmp_path / "x", sequences, documents)
        assert len(read_all(open_source(name), {"t": Tokens("tokens")})) == 2
        with pytest.raises(
            DataioError, match=r"x\.idx: found documents that begin at .*from 0 to 2"
        ):
            read_all(open_source(name), {"d": Int("document")})


def test_another_index_of_a_bin_is_noticed(tmp_path: Path) -> None:
    """Of as many sequences and bytes: the .bin alone does not show it."""
    fields: dict[str, Field] = {"tokens": Tokens("tokens")}
    tokens = np.arange(8, dtype="<u2")

    def write(first: int) -> str:
        return write_megatron(tmp_path / "x", [tokens[:first], tokens[first:]], [0, 2])

    def lengths(source: Source) -> list[int]:
        return [len(data) // 4 for _, (data,) in read_all(source, fields)]

    name, kept = write(3), tmp_path / "kept"
    source = open_source(name, index_cache=kept)
    assert lengths(source) == [3, 5]
    mtime_ns = Path(f"{name}.bin").stat().st_mtime_ns
    write(6)
    os.utime(f"{name}.bin", ns=(mtime_ns, mtime_ns))
    os.utime(f"{name}.idx", ns=(1, 1))
    with pytest.raises(DataioError, match=r"x\.idx: was written to at .*when surveyed"):
        lengths(source)
    changed = open_source(name, index_cache=kept)
    assert lengths(changed) == [6, 2]
    assert changed.fingerprint != source.fingerprint
    write_megatron(tmp_path / "x", [tokens[:2], tokens[2:4], tokens[4:]], [0, 3])
    os.utime(f"{name}.bin", ns=(mtime_ns, mtime_ns))
    assert lengths(open_source(name, index_cache=kept)) == [2, 2, 4]


def test_another_index_of_chunks_is_noticed(tmp_path: Path) -> None:
    spec = copied("litdata")(tmp_path)
    source = open_source(spec)
    (index,) = tmp_path.rglob("index.json")
    os.utime(index, ns=(1, 1))
    assert open_source(spec).fingerprint != source.fingerprint
    with pytest.raises(DataioError, match=r"index\.json: was written to at .*when surveyed"):
        read_all(source, LIT_FIELDS)


def test_a_directory_of_megatron_datasets_is_opened(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_megatron(tmp_path / name, [np.arange(3, dtype="<u2")], [0, 1])
    np.save(tmp_path / "counts.npy", np.arange(3))
    (tmp_path / "alone.bin").write_bytes(b"no dataset")
    source = open_source(tmp_path)
    assert source.num_samples == 2
    assert place_of(source, 0).startswith(f"{tmp_path}/a.bin")


def test_a_bin_without_its_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"x" * 10)
    with pytest.raises(DataioError, match=r"x\.bin: there is no .*x\.idx beside it"):
        open_source(str(tmp_path / "x.bin"))


@pytest.mark.parametrize("case", RECORDS, ids=lambda case: case.name)
def test_a_shard_that_lost_samples_is_noticed(case: Any, tmp_path: Path) -> None:
    """It was counted, then replaced by one of another name's bytes: never other rows."""
    source = open_source(case.write(tmp_path))
    for path in tmp_path.iterdir():
        if path.name != "index.json":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    forget_survey(source)
    with pytest.raises(DataioError):
        read_all(source, case.fields)


def test_the_library_that_checks_records_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(DataioError, match=r"TFRecord: google-crc32c .*pip install .*\[tfrecord\]'"):
        open_source(copied("train.tfrecord-00000-of-00001")(tmp_path))
