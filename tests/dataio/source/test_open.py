"""A pattern opens as the same source on every rank."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from dataio.base.errors import SourceError
from dataio.rows.fields import Bytes, Field, Int
from dataio.source import Source, open_source, write_index
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import numbered, read_all, write_tar

FIELDS: dict[str, Field] = {"label": Int("cls")}


def shards(directory: Path) -> list[Path]:
    return [
        write_tar(directory / f"{i}.tar", numbered(3 + i, num_bytes=8, first=10 * i))
        for i in range(5)
    ]


def test_samples_are_numbered_in_the_order_of_the_shards(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    source = open_source([str(paths[3]), str(paths[0])])
    labels = [int.from_bytes(row[1][0], "little") for row in read_all(source, FIELDS)]
    assert labels == [30, 31, 32, 33, 34, 35, 0, 1, 2]


def test_a_shard_whose_name_ends_in_capitals_is_not_passed_over(tmp_path: Path) -> None:
    shards(tmp_path)[4].rename(tmp_path / "4.TAR")
    with pytest.raises(SourceError, match=r"4.TAR: ends in capitals, .*; rename it, or name"):
        open_source(str(tmp_path))


def test_counts_are_the_same_by_every_index(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    scanned = open_source(str(tmp_path))
    assert scanned.num_samples == 25
    for path in paths:
        write_index(path)
    indexed = open_source(str(tmp_path))
    entries = [{"url": path.name, "nsamples": 3 + i} for i, path in enumerate(paths)]
    (tmp_path / "index.json").write_text(json.dumps({"shardlist": entries}))
    listed = open_source(str(tmp_path))
    assert indexed.num_samples == listed.num_samples == 25
    assert scanned.fingerprint == indexed.fingerprint == listed.fingerprint
    assert scanned.bytes_read > indexed.bytes_read
    # An index that lacks a shard is of no use.
    (tmp_path / "index.json").write_text(json.dumps({"shardlist": entries[:-1]}))
    assert open_source(str(tmp_path)).num_samples == 25


def test_the_fingerprint_tells_changed_shards(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    before = open_source(str(tmp_path)).fingerprint
    assert open_source([str(path) for path in paths]).fingerprint == before
    os.utime(paths[2], ns=(1, 1))
    assert open_source(str(tmp_path)).fingerprint != before


def test_ranks_share_the_counting(tmp_path: Path) -> None:
    shards(tmp_path)
    alone = open_source(str(tmp_path))

    def work(world: World) -> Source:
        return open_source(str(tmp_path), world=world)

    sources = run_threads(thread_worlds([2, 1]), work)
    assert {source.num_samples for source in sources} == {25}
    assert {source.fingerprint for source in sources} == {alone.fingerprint}
    assert sum(source.bytes_read for source in sources) == alone.bytes_read
    assert all(source.bytes_read < alone.bytes_read for source in sources)


def test_an_error_of_one_rank_is_raised_by_all(tmp_path: Path) -> None:
    shards(tmp_path)[4].write_bytes(b"x" * 600)

    def work(world: World) -> str:
        with pytest.raises(SourceError, match=r"4\.tar: .*it is not a tar file") as error:
            open_source(str(tmp_path), world=world)
        return str(error.value)

    assert len(set(run_threads(thread_worlds([2, 1]), work))) == 1


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a.tar.zst"], r"a\.tar\.zst: shards compressed with \.zst are not supported.*decompress"),
        (["a.zip"], r"found the suffix '\.zip', expected one of \.tar, .*; unpack it, and give"),
        (["a.csv"], r"suffix '\.csv'.* table = pyarrow\.csv\.read_csv\('.*a\.csv'\); pyarrow\.pa"),
        (["a.h5", "b.tar"], r"suffix '\.h5'.* give dataio\.ArrayFiles\('.*a\.h5', axis=0\), where"),
        (["a.lance"], r"suffix '\.lance'.*`pip install pylance`, then .* lance\.dataset\('.*a\.la"),
        (
            ["a.vortex"],
            r"suffix '\.vortex'.*`pip install vortex-data`, .* vortex\.open\('.*a\.vort",
        ),
        (["a.v1.other"], r"suffix '\.other'.* write a class with __len__ and __getitem__ that"),
        (["a.tar", "b.parquet"], r"found together with .*a\.tar, expected shards of one format"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, names: list[str], found: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(SourceError, match=found):
        open_source([str(tmp_path / name) for name in names])


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "Delta"), (".hoodie/hoodie.properties", "Hudi"),
        ("metadata/v1.metadata.json", "Iceberg"), ("_spark_metadata/0", "Spark"),
    ],
)  # fmt: skip
def test_a_table_with_a_log_is_refused_unless_files_are_named(
    tmp_path: Path, log: str, kind: str
) -> None:
    table = tmp_path / "table"
    for place in ("", "year=2020", "data/year=2020"):
        (table / place).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"cls": [1, 2]}), table / place / "part-0.parquet")
    spelled = [
        "table", "table/", "table/*.parquet", "table/year=2020", "table/*/*.parquet",
        "table/**/*.parquet", "table/data/year=2020", "t*/year=2020/part-?.parquet",
    ]  # fmt: skip
    assert all(open_source(f"{tmp_path}/{name}").num_samples for name in spelled)
    (table / log).parent.mkdir()
    (table / log).write_text("{}")
    for name in spelled:
        with pytest.raises(SourceError, match=rf"table: is a table of {kind}.*write it as Parq"):
            open_source(f"{tmp_path}/{name}")
    named = [f"{table}/part-0.parquet", f"{table}/year=2020/part-{{0..0}}.parquet"]
    assert open_source(named).num_samples == 4


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a/0.png"], "a folder of images"),
        (["a.npz"], "files of arrays"),
        (["a.bin", "a.idx"], r"shards that end in \.bin"),
    ],
)
def test_what_is_not_known_shard_by_shard_does_not_grow(
    tmp_path: Path, names: list[str], found: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(SourceError, match=f"cannot grow, found {found}, expected shards that end"):
        open_source(str(tmp_path), grows=True)


def test_suffixes_of_one_format_go_together(tmp_path: Path) -> None:
    table = pa.table({"cls": pa.array(range(5))})
    for name in ("a.arrow", "b.feather"):
        feather.write_feather(table, tmp_path / name)
    source = open_source(str(tmp_path))
    assert [row for row, _ in read_all(source, FIELDS)] == list(range(10))
    write_tar(tmp_path / "c.tar", numbered(2))
    with pytest.raises(SourceError, match=r"c\.tar: found together with .*a\.arrow, expected"):
        open_source(str(tmp_path))


def test_sources_say_where_they_are_cut_best(tmp_path: Path) -> None:
    shards(tmp_path)
    assert open_source(str(tmp_path)).shard_starts.tolist() == [0, 3, 7, 12, 18]
    paths = [str(tmp_path / name) for name in ("a.parquet", "b.parquet")]
    for path in paths:
        pq.write_table(pa.table({"cls": pa.array(range(10))}), path, row_group_size=4)

    def work(world: World) -> list[int]:
        return list(open_source(paths, world=world).shard_starts.tolist())

    assert run_threads(thread_worlds([2, 1]), work) == [[0, 4, 8, 10, 14, 18]] * 3


def test_readers_that_meet_at_a_cut_share_no_bytes(tmp_path: Path) -> None:
    blobs = pa.array([np.random.default_rng(0).bytes(50_000)] * 40, pa.binary())
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"cls": range(40), "x": blobs}), path, row_group_size=10,
                   use_dictionary=False, compression="none")  # fmt: skip
    fields: dict[str, Field] = {"x": Bytes("x")}

    def read_bytes(cut: int) -> int:
        total = 0
        for part in (np.arange(cut), np.arange(cut, 40)):
            source = open_source(path)
            before = source.bytes_read
            list(source.read(part, fields))
            total += source.bytes_read - before
        return total

    at = int(open_source(path).shard_starts[2])
    assert read_bytes(at) < 1.1 * 40 * 50_000
    assert read_bytes(at - 5) > 1.2 * 40 * 50_000
