"""Parquet shards: a row is a sample, read one row group at a time."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Array, Bytes, Field, Float, Image, Int
from dataio.rows.rows import FixedColumn
from dataio.source import open_source
from dataio.source.base import ShardedSource
from dataio.source.formats import columns
from dataio.source.formats.parquet import FOOTER_GROWTH, ParquetFormat
from dataio.source.storage.files import Storage
from dataio.source.storage.metadata_cache import MetadataCache
from tests.dataio.source.shards import damage, ids, read_all, rows_of

FIELDS: dict[str, Field] = {
    "label": Int("cls"),
    "value": Float("value"),
    "matrix": Array("matrix", (2, 3), "int16"),
    "data": Bytes("bin"),
    "text": Bytes("txt"),
}


def table(num_rows: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + num_rows)
    return pa.table(
        {
            "cls": pa.array(numbers, pa.int32()),
            "value": pa.array([i / 2 for i in numbers], pa.float64()),
            "matrix": pa.array([[i + j for j in range(6)] for i in numbers], pa.list_(pa.int64())),
            "bin": pa.array([b"%d" % i * (i % 5) for i in numbers], pa.large_binary()),
            "txt": pa.array([f"é{i}" for i in numbers], pa.string()).dictionary_encode(),
        }
    )


def expected(number: int) -> tuple[int, list[bytes]]:
    return number, [
        np.int64(number).tobytes(),
        np.float32(number / 2).tobytes(),
        np.arange(number, number + 6, dtype=np.int16).tobytes(),
        b"%d" % number * (number % 5),
        f"é{number}".encode(),
    ]


def write(path: Path, *tables: pa.Table | dict[str, pa.Array], rows: int = 7) -> str:
    for part in tables:
        held = part if isinstance(part, pa.Table) else pa.table(part)
        pq.write_table(held, path, row_group_size=rows)
    return str(path)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=3), chosen=st.sets(st.integers(0, 59))
)
def test_any_subset_reads_the_same_rows_as_the_whole(
    tmp_path: Path, sizes: list[int], chosen: set[int]
) -> None:
    firsts = np.cumsum([0, *sizes]).tolist()
    paths = [write(tmp_path / f"{i}.parquet", table(n, firsts[i])) for i, n in enumerate(sizes)]
    source = open_source(paths)
    assert source.num_samples == sum(sizes)
    assert read_all(source, FIELDS) == [expected(i) for i in range(sum(sizes))]
    wanted = sorted(i for i in chosen if i < sum(sizes))
    assert rows_of(source.read(np.array(wanted, np.int64), FIELDS)) == [expected(i) for i in wanted]


def test_only_the_row_groups_and_columns_needed_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blobs = pa.array([rng.bytes(10_000) for _ in range(80)], pa.binary())
    numbers = pa.array(range(80))
    path = write(tmp_path / "a.parquet", {"a": blobs, "b": blobs, "cls": numbers}, rows=20)
    source = open_source(path)
    assert isinstance(source, ShardedSource)
    before, opens = source.bytes_read, source.storage.num_opens
    list(source.read(ids(20, 39), {"data": Bytes("a"), "label": Int("cls")}))
    assert 200_000 < source.bytes_read - before < 270_000
    assert source.storage.num_opens == opens + 1


def write_groups(path: Path, num_groups: int) -> ShardedSource:
    """Open a shard of so many row groups of 64 bytes, whose footer is longer than Arrow's guess."""
    texts = pa.array([bytes(64)] * num_groups, pa.binary())
    source = open_source(write(path, {f"column{i:02d}": texts for i in range(8)}, rows=1))
    assert isinstance(source, ShardedSource)
    return source


def test_a_footer_is_read_once_however_often_a_shard_is_opened(tmp_path: Path) -> None:
    source = write_groups(tmp_path / "a.parquet", 200)
    footer_bytes = pq.read_metadata(tmp_path / "a.parquet").serialized_size
    assert footer_bytes > 64 << 10
    before, opens = source.bytes_read, source.storage.num_opens
    for number in range(200):
        list(source.read(ids(number), {"data": Bytes("column03")}))
    assert source.storage.num_opens == opens + 200
    assert source.bytes_read - before < 200 * 200, "values and their headers"


def test_many_threads_read_one_shard_by_one_footer(tmp_path: Path) -> None:
    source = write_groups(tmp_path / "a.parquet", 60)
    before = source.bytes_read

    def read(number: int) -> int:
        return sum(len(rows) for rows in source.read(ids(number), {"data": Bytes("column03")}))

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(read, range(60))) == 60
    assert source.bytes_read - before < 60 * 200


def test_of_many_shards_the_footers_last_used_are_kept_and_no_more(tmp_path: Path) -> None:
    sources = [write_groups(tmp_path / f"{number}.parquet", 20) for number in range(3)]
    storage = Storage()
    (one,) = {int(pq.read_metadata(path).serialized_size) for path in tmp_path.iterdir()}
    storage.metadata = MetadataCache(2 * one * FOOTER_GROWTH)

    def read(number: int) -> int:
        before, shard = storage.bytes_read, sources[number].shards[0]
        list(ParquetFormat().read(storage, shard, np.zeros(1, np.int64), {"d": Bytes("column00")}))
        return storage.bytes_read - before

    read_bytes = [read(number) for number in (0, 1, 0, 2, 0, 1)]
    assert [num_bytes > one for num_bytes in read_bytes] == [True, True, False, True, False, True]
    assert storage.metadata.num_bytes == 2 * one * FOOTER_GROWTH


def test_a_footer_of_a_shard_that_was_written_again_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    storage, fields = Storage(), {"data": Bytes("column00")}
    for num_groups in (20, 30):
        shard = write_groups(path, num_groups).shards[0]
        rows = ParquetFormat().read(storage, shard, np.arange(num_groups), fields)
        assert sum(len(block) for block in rows) == num_groups


def test_blocks_are_of_about_eight_mebibytes(tmp_path: Path) -> None:
    blobs = pa.array([bytes(1 << 20)] * 40, pa.binary())
    source = open_source(write(tmp_path / "a.parquet", {"a": blobs}, rows=30))
    blocks = [len(rows) for rows in source.read(np.arange(40), {"data": Bytes("a")})]
    assert sum(blocks) == 40
    assert max(blocks) <= 8


def test_other_column_types_read_the_same(tmp_path: Path) -> None:
    files = pa.array([{"bytes": b"one", "path": "1"}, {"bytes": b"two", "path": "2"}])
    nested = pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.uint8(), 2)))
    raw = pa.array([np.arange(4, dtype="<f4").tobytes()] * 2, pa.binary(16))
    held = {
        "image": files,
        "nested": nested,
        "raw": raw,
        "digits": pa.array(["12", " 7\n"]),
        "flag": pa.array([True, False]),
        "wide": pa.array([b"x", b""], pa.large_binary()),
    }
    fields: dict[str, Field] = {
        "image": Image("image"),
        "nested": Array("nested", (2, 2), "float64"),
        "raw": Array("raw", (4,), "float32"),
        "digits": Int("digits"),
        "flag": Int("flag"),
        "wide": Bytes("wide"),
    }
    rows = read_all(open_source(write(tmp_path / "a.parquet", held)), fields)
    nested_row, raw_row, digits, flag, image, wide = rows[0][1]
    assert np.frombuffer(nested_row).tolist() == [1, 2, 3, 4]
    assert np.frombuffer(raw_row, np.float32).tolist() == [0, 1, 2, 3]
    assert np.frombuffer(digits + flag, np.int64).tolist() == [12, 1]
    assert (image, wide) == (b"one", b"x")
    assert np.frombuffer(rows[1][1][2], np.int64)[0] == 7


@pytest.mark.parametrize(
    ("values", "field", "found"),
    [
        (pa.array([1, None, 3]), Int("x"), "column 'x', sample 1: found null, expected a value"),
        (
            pa.array([1.0, 2.5, 3.0]),
            Int("x"),
            "column 'x', sample 1: found double .*what fits in int64",
        ),
        (pa.array(["1", "2", "c"]), Int("x"), "column 'x', sample 2: found b'c'"),
        (
            pa.array([[1], [1, 2], [3]]),
            Array("x", (1,), "int8"),
            "sample 1: found lists of 1 and 2",
        ),
        (
            pa.array([[1], [2], [3]]),
            Array("x", (2,), "int8"),
            r"found the shape \[1\], expected \[2\]",
        ),
        (pa.array([[1], [300], [3]]), Array("x", (1,), "int8"), "what fits in int8; declare"),
        (pa.array([[1], [None], [3]]), Array("x", (1,), "int8"), "sample 1: found null in a list"),
        (pa.array([1, 2, 3]), Bytes("x"), "found the type int64, expected bytes or text"),
        (
            pa.array([1, 2, 3]),
            Int("y"),
            "found the columns x, expected 'y' for field 'field'; name",
        ),
        (pa.array([b"ab"] * 3), Array("x", (3,), "int8"), r"found b'ab' \(2 bytes\), expected the"),
    ],
)
def test_a_column_that_is_not_what_was_declared_is_refused(
    tmp_path: Path, values: pa.Array, field: Field, found: str
) -> None:
    source = open_source(write(tmp_path / "a.parquet", {"x": values}))
    with pytest.raises(FieldError, match=found):
        read_all(source, {"field": field})


def test_two_columns_of_one_name_are_refused_where_they_are_asked_for(tmp_path: Path) -> None:
    held = pa.Table.from_arrays(
        [pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])], ["a", "b", "b"]
    )
    source = open_source(write(tmp_path / "a.parquet", held))
    with pytest.raises(
        FieldError, match=r"a\.parquet: found several columns 'b', .* field 'label'"
    ):
        read_all(source, {"label": Int("b")})
    rows = read_all(source, {"label": Int("a")})
    assert [row for _, (row,) in rows] == [np.int64(i).tobytes() for i in (1, 2)]


@pytest.mark.parametrize(
    ("values", "whole"),
    [
        (pa.array([1_714_521_600_123], pa.timestamp("ms", "UTC")), 1_714_521_600_123),
        (pa.array([19844], pa.date32()), 19844),
        (pa.array([3_600_000], pa.time32("ms")), 3_600_000),
        (pa.array([-5], pa.duration("us")), -5),
    ],
)
def test_times_are_whole_numbers_of_the_unit_of_their_column(
    tmp_path: Path, values: pa.Array, whole: int
) -> None:
    source = open_source(write(tmp_path / "a.parquet", {"x": values}))
    assert read_all(source, {"x": Int("x")}) == [(0, [np.int64(whole).tobytes()])]
    if whole > 2**24:
        with pytest.raises(FieldError, match=r"sample 0: found timestamp.*; declare Int or Array"):
            read_all(source, {"x": Float("x")})


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        (pa.timestamp("ms"), pa.timestamp("us"), r"timestamp\[us\], and timestamp\[ms\] in"),
        (pa.list_(pa.timestamp("ms")), pa.list_(pa.timestamp("ns")), r"\[ns\]>, and list"),
        (pa.date32(), pa.timestamp("s"), r"timestamp\[.*\], and date32"),
        (pa.duration("s"), pa.duration("ms"), r"duration\[ms\], and duration\[s\]"),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), ""),
    ],
)
def test_shards_whose_times_have_several_units_are_refused(
    tmp_path: Path, form: str, one: pa.DataType, other: pa.DataType, found: str
) -> None:
    is_list = pa.types.is_list(one)
    for name, kind in (("a", one), ("b", one), ("c", other)):
        number = 7 if pa.types.is_date(kind) else 7_000_000
        plain = pa.int32() if pa.types.is_date32(kind) else pa.int64()
        times = pa.array([number], plain)
        leaf = kind.value_type if is_list else kind
        times = times.cast(leaf)
        if is_list:
            times = pa.ListArray.from_arrays([0, 1], times)
        table = pa.table({"t": times, "n": [1]})
        if form == "parquet":
            pq.write_table(table, tmp_path / f"{name}.parquet")
        else:
            feather.write_feather(table, str(tmp_path / f"{name}.arrow"), "uncompressed")
    field = Array("t", (1,), "int64") if is_list else Int("t")
    source = open_source(str(tmp_path))
    assert len(read_all(source, {"n": Int("n")})) == 3
    assert len(rows_of(source.read(ids(0, 1), {"t": field}))) == 2
    if not found:
        assert len(read_all(source, {"t": field})) == 3
        return
    # Whoever reads only the last shard finds it too.
    with pytest.raises(
        SourceError, match=rf"c\.{form}: column 't' holds .*{found}.*one unit in all"
    ):
        next(iter(source.read(ids(2), {"t": field, "n": Int("n")})))


def test_times_of_spark_that_nanoseconds_do_not_reach_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    near, far = 1_714_521_600_000_000, 253_402_214_400_000_000  # 2024-05-01, 9999-12-31
    early = -86_400_000_000  # 1969-12-31, a whole day: older pyarrow writes other times wrongly
    for times in ([near, early], [near, far]):
        held = pa.table({"t": pa.array(times, pa.timestamp("us")), "n": [1, 2]})
        pq.write_table(held, path, use_deprecated_int96_timestamps=True)
        source = open_source(str(path))
        assert len(read_all(source, {"n": Int("n")})) == 2
        if far in times:
            with pytest.raises(
                FieldError, match=r"column 't', sample 1: found a time of INT96 befo"
            ):
                read_all(source, {"t": Int("t")})
        else:
            rows = read_all(source, {"t": Int("t")})
            assert [row for _, (row,) in rows] == [np.int64(1000 * t).tobytes() for t in times]


@pytest.mark.parametrize(
    ("values", "field", "kept"),
    [
        (
            pa.array([Decimal("12.34"), Decimal("2.00")]),
            Float("x"),
            np.array([12.34, 2], np.float32),
        ),
        (pa.array([Decimal("12.00"), Decimal("2.00")]), Int("x"), np.array([12, 2])),
        (
            pa.array([Decimal("2.00"), Decimal("12.34")]),
            Int("x"),
            r"sample 1: found decimal.* 12\.34",
        ),
        (
            pa.array([Decimal(2), Decimal(2**53 + 1)]),
            Array("x", (), "float64"),
            "declare the dtype int",
        ),
        (pa.array([Decimal(2), Decimal(1_700_000_001)]), Float("x"), "declare Int or Array"),
    ],
)
def test_decimals_arrive_by_the_rule_of_numbers(
    tmp_path: Path, values: pa.Array, field: Field, kept: Any
) -> None:
    source = open_source(write(tmp_path / "a.parquet", {"x": values}))
    if isinstance(kept, str):
        with pytest.raises(FieldError, match=kept):
            read_all(source, {"f": field})
    else:
        assert b"".join(row for _, (row,) in read_all(source, {"f": field})) == kept.tobytes()


def test_a_tensor_column_has_its_own_shape(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), (3, 2))
    storage = pa.array([list(range(6)), list(range(6, 12))], pa.list_(pa.int32(), 6))
    values = pa.ExtensionArray.from_storage(kind, storage)
    source = open_source(write(tmp_path / "a.parquet", {"x": values}))
    rows = read_all(source, {"x": Array("x", (3, 2), "int64")})
    assert b"".join(row for _, (row,) in rows) == np.arange(12).tobytes()
    with pytest.raises(FieldError, match=r"found the shape \[3, 2\], expected \[2, 3\]"):
        read_all(source, {"x": Array("x", (2, 3), "int64")})


@dataclass(frozen=True)
class Doubled:
    """A field of one's own, whose values are kept twice as large."""

    key: str

    def column(self, name: str) -> FixedColumn:
        return FixedColumn(name, "<i8", (2,))

    def encode(self, raw: Any, where: str) -> bytes:
        return (2 * np.asarray(raw, np.int64)).tobytes()


def test_a_field_of_ones_own_looks_at_every_value_of_a_column(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a.parquet", {"x": pa.array([[1, 2], [3, 4]])}))
    rows = read_all(source, {"x": Doubled("x")})
    assert [row for _, (row,) in rows] == [np.array(two).tobytes() for two in ([2, 4], [6, 8])]


def test_rows_far_apart_are_taken_chunk_by_chunk_and_large_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(columns, "MOST_BYTES", 8000)
    parts = [bytes([i]) * (3000 if i > 30 else 10) for i in range(40)]
    chunks = pa.chunked_array([parts[:7], parts[7:35], parts[35:]], pa.binary())
    table = pa.table({"x": chunks})
    for rows in (np.arange(40), np.array([0, 6, 7, 33, 39]), np.arange(0, 40, 3)):
        fields: dict[str, Field] = {"x": Bytes("x")}
        blocks = list(columns.table_rows(table, rows, fields, first=100, path="a"))
        assert rows_of(blocks) == [(100 + i, [parts[i]]) for i in rows.tolist()]
        assert max(block.lengths.sum() for block in blocks) <= 8000


def test_a_broken_shard_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, table(40))
    raw = path.read_bytes()
    source = open_source(str(path))
    for data in (b"x" * 100, b"", raw[: len(raw) // 2]):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=r"do not read as Parquet .*copy or write the shard"):
            open_source(str(path))
    path.write_bytes(raw)
    source = open_source(str(path))
    damage(path, raw[:4] + bytes(len(raw) // 2) + raw[4 + len(raw) // 2 :])
    with pytest.raises(SourceError, match=r"row group 0 does not read .*the shard is damaged"):
        read_all(source, FIELDS)
    write(path, table(41))
    with pytest.raises(SourceError, match="bytes long when surveyed; expected shards that stay"):
        read_all(source, FIELDS)
    write(path, table(0))
    with pytest.raises(SourceError, match="holds no samples"):
        open_source(str(path))
