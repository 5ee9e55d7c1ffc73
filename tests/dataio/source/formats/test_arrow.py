"""Arrow shards and Hugging Face datasets: rows of record batches, only what is needed read."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import feather

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Array, Bytes, Field, Image, Int, Text, Tokens
from dataio.source import Source, open_source
from dataio.source.base import ShardedSource
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import Row, forget_survey, ids, read_all, rows_of

FIELDS: dict[str, Field] = {
    "label": Int("label"),
    "matrix": Array("matrix", (2, 3), "float32"),
    "image": Bytes("image"),
    "text": Text("text"),
    "tokens": Tokens("tokens"),
}


def table(num_rows: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + num_rows)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.table(
        {
            "unused": pa.array([b"u" * 50 for _ in numbers]),
            "label": pa.array([i % 3 for i in numbers], pa.int64()).dictionary_encode(),
            "matrix": pa.array(
                [[[i + j for j in range(3)], [i, i, i]] for i in numbers],
                pa.list_(pa.list_(pa.float32(), 3)),
            ),
            "image": pa.array(
                [{"bytes": b"%d" % i * (i % 4), "path": None} for i in numbers], image
            ),
            "text": pa.array([f"é{i}" for i in numbers], pa.large_string()),
            "tokens": pa.array([range(i % 5) for i in numbers], pa.large_list(pa.int64())),
        }
    )


def expected(number: int) -> Row:
    matrix = [number, number + 1, number + 2, number, number, number]
    return number, [
        np.int64(number % 3).tobytes(),
        np.array(matrix, np.float32).tobytes(),
        b"%d" % number * (number % 4),
        f"é{number}".encode(),
        np.arange(number % 5, dtype="<i4").tobytes(),
    ]


def write_stream(path: Path, held: pa.Table, *, rows: int = 4) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, held.schema) as writer:
        writer.write_table(held, max_chunksize=rows)
    return path


def write_file(path: Path, held: pa.Table, *, rows: int = 4) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, held.schema) as writer:
        writer.write_table(held, max_chunksize=rows)
    return path


def write_feather(path: Path, held: pa.Table, *, rows: int = 4) -> Path:
    feather.write_feather(held, path, chunksize=rows, compression="lz4")
    return path


WRITERS = {".arrow": write_stream, ".ipc": write_file, ".feather": write_feather}


def write_dataset(directory: Path, sizes: list[int], **state: object) -> Path:
    """What ``save_to_disk`` of the datasets package leaves."""
    directory.mkdir(exist_ok=True)
    names = [f"data-{i:05d}-of-{len(sizes):05d}.arrow" for i in range(len(sizes))]
    first = 0
    for name, size in zip(names, sizes, strict=True):
        write_stream(directory / name, table(size, first))
        first += size
    (directory / "dataset_info.json").write_text('{"features": {}}')
    files = [{"filename": name} for name in names]
    (directory / "state.json").write_text(json.dumps({"_data_files": files, **state}))
    return directory


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    suffix=st.sampled_from(sorted(WRITERS)),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    chosen=st.sets(st.integers(0, 59)),
)
def test_any_subset_reads_the_same_rows_as_the_whole(
    tmp_path: Path, suffix: str, sizes: list[int], chosen: set[int]
) -> None:
    firsts = np.cumsum([0, *sizes]).tolist()
    paths = [
        str(WRITERS[suffix](tmp_path / f"{i}{suffix}", table(n, firsts[i])))
        for i, n in enumerate(sizes)
    ]
    source = open_source(paths)
    assert read_all(source, FIELDS) == [expected(i) for i in range(sum(sizes))]
    wanted = sorted(i for i in chosen if i < sum(sizes))
    assert rows_of(source.read(np.array(wanted, np.int64), FIELDS)) == [expected(i) for i in wanted]
    starts = [first + at for first, n in zip(firsts, sizes, strict=False) for at in range(0, n, 4)]
    assert source.shard_starts.tolist() == starts


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_hugging_face_directory_is_read_in_its_order(tmp_path: Path, num_ranks: int) -> None:
    write_dataset(tmp_path, [9, 12, 2])

    def work(world: World) -> tuple[str, list[Row]]:
        source = open_source(str(tmp_path), world=world)
        mine = np.arange(world.rank, source.num_samples, world.world_size)
        return source.fingerprint, rows_of(source.read(mine, FIELDS))

    ranks = run_threads(thread_worlds([num_ranks]), work)
    assert len({fingerprint for fingerprint, _ in ranks}) == 1
    assert sorted(row for _, rows in ranks for row in rows) == [expected(i) for i in range(23)]


@pytest.mark.parametrize("suffix", sorted(WRITERS))
def test_only_the_batches_and_columns_needed_are_read(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    blobs = pa.array([rng.bytes(100_000) for _ in range(40)], pa.binary())
    held = pa.table({"a": blobs, "label": pa.array(range(40)), "b": blobs})
    source = open_source(str(WRITERS[suffix](tmp_path / f"a{suffix}", held, rows=10)))
    assert isinstance(source, ShardedSource)
    assert source.bytes_read < 20_000
    before, opens = source.bytes_read, source.storage.num_opens
    list(source.read(ids(10, 29), {"data": Bytes("a"), "label": Int("label")}))
    assert 2_000_000 < source.bytes_read - before < 2_020_000
    assert source.storage.num_opens == opens + 1


def test_dictionaries_that_change_between_batches_are_followed(tmp_path: Path) -> None:
    parts = [pa.array(words).dictionary_encode() for words in (["a", "b"], ["c"], ["b", "c"])]
    schema = pa.schema({"text": parts[0].type})
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for part in parts:
            writer.write_batch(pa.record_batch([part], schema))
    source = open_source(str(path))
    fields: dict[str, Field] = {"text": Text("text")}
    rows = [row for _, (row,) in read_all(source, fields)]
    assert rows == [b"a", b"b", b"c", b"b", b"c"]
    assert [row for _, (row,) in rows_of(source.read(ids(0, 2, 4), fields))] == [b"a", b"c", b"c"]
    assert [row for _, (row,) in rows_of(source.read(ids(0, 4), fields))] == [b"a", b"c"]


def test_kinds_that_lay_out_buffers_in_another_way_are_read_whole(tmp_path: Path) -> None:
    held = pa.table(
        {
            "nothing": pa.nulls(5),
            "view": pa.array(["a long enough word, out of line"] * 5, pa.string_view()),
            "label": pa.array(range(5)),
        }
    )
    source = open_source(str(write_stream(tmp_path / "a.arrow", held)))
    rows = read_all(source, {"label": Int("label"), "text": Text("view")})
    assert rows[4][1] == [np.int64(4).tobytes(), b"a long enough word, out of line"]


def test_a_directory_of_splits_or_of_chosen_rows_is_refused(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "one", [5], _indices_data_files=[{"filename": "i.arrow"}])
    with pytest.raises(SourceError, match=r"chooses rows by an indices file.*flatten_indices"):
        open_source(str(root))
    root = write_dataset(tmp_path / "two", [])
    with pytest.raises(SourceError, match="names no data files, expected their names"):
        open_source(str(root))
    (root / "state.json").write_text("{")
    with pytest.raises(SourceError, match=r"state\.json: does not read as JSON"):
        open_source(str(root))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SourceError, match=r"holds a dataset of the splits train, test.*/<split>"):
        open_source(str(tmp_path))


def broken(source: Source, path: Path, data: bytes, found: str) -> None:
    path.write_bytes(data)
    with pytest.raises(SourceError, match=found):
        open_source(str(path))
    forget_survey(source)
    with pytest.raises(SourceError, match=found):
        read_all(source, FIELDS)


@pytest.mark.parametrize("suffix", [".arrow", ".ipc"])
def test_a_broken_shard_is_refused(tmp_path: Path, suffix: str) -> None:
    path = WRITERS[suffix](tmp_path / f"a{suffix}", table(40), rows=40)
    raw = path.read_bytes()
    source = open_source(str(path))
    broken(source, path, b"x" * 5000, "expected an Arrow message; it is damaged, or no Arrow file")
    truncated = "is truncated; copy or write the file again"
    broken(source, path, raw[: len(raw) * 2 // 3], truncated)
    broken(source, path, b"FEA1" + raw, "found Feather version 1 .* expected version 2")
    WRITERS[suffix](path, table(41))
    with pytest.raises(SourceError, match="found 41 rows, expected 40 as when it was opened"):
        read_all(source, FIELDS)
    path.write_bytes(b"")
    with pytest.raises(SourceError):
        open_source(str(path))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_changed_byte_is_an_error_of_ours_or_other_rows(
    tmp_path: Path, at: float, value: int
) -> None:
    path = write_stream(tmp_path / "a.arrow", table(6))
    raw = bytearray(path.read_bytes())
    raw[int(at * len(raw))] = value
    path.write_bytes(raw)
    with contextlib.suppress(SourceError, FieldError):
        read_all(open_source(str(path)), FIELDS)


@pytest.mark.parametrize(
    ("values", "field", "found"),
    [
        (pa.array([[1], None, [3]]), Tokens("x"), "sample 1: found null, expected a value"),
        (pa.array([[1], [2, None]]), Tokens("x"), "sample 1: found null in a list"),
        (pa.array([[1], [], [2**40]]), Tokens("x"), "sample 2: found int64 .*what fits in int32"),
        (pa.array([["a"]]), Tokens("x"), "found lists of string, expected lists of numbers"),
        (pa.array([1, 2]), Tokens("x"), "found the type int64, expected bytes or text"),
        (pa.array([b"1234", b"123"]), Tokens("x"), "sample 1: found b'123' .*numbers of int32"),
        (
            pa.array([b"a", b"\xff"]),
            Text("x"),
            "sample 1: found large_binary .*expected UTF-8 text",
        ),
        (
            pa.array([{"bytes": b"a", "path": "p"}, {"bytes": None, "path": "q"}]),
            Image("x"),
            "sample 1: found only the path 'q', expected the bytes of the file",
        ),
        (
            pa.array([[[1, 2], [3, 4]], [[5, 6], [7]]]),
            Array("x", (2, 2), "int8"),
            "sample 1: found lists of 2 and 1, expected one length",
        ),
        (
            pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 300]]]),
            Array("x", (2, 2), "uint8"),
            "sample 1: found int64 .*expected what fits in uint8",
        ),
        (
            pa.array([[[1, 2], [3, 4]], [[5, 6], [7, None]]]),
            Array("x", (2, 2), "uint8"),
            "sample 1: found null in a list",
        ),
    ],
)
def test_the_first_sample_that_differs_is_named(
    tmp_path: Path, values: pa.Array, field: Field, found: str
) -> None:
    source = open_source(str(write_stream(tmp_path / "a.arrow", pa.table({"x": values}))))
    with pytest.raises(FieldError, match=found):
        read_all(source, {"field": field})
