"""Marks: a part of a tar shard without index is read from near by, and is what it was."""

import io
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataio import Loader, Reports, Staging, Workers
from dataio.base.errors import SourceError
from dataio.rows.fields import Bytes, Field, Int
from dataio.source import open_source
from dataio.source.base import ShardedSource
from dataio.source.formats import seek_points
from dataio.world import World, run_threads, thread_worlds
from tests.dataio.source.shards import (
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
FORMS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
STRETCH = 4096


def opened(path: Path, **kwargs: object) -> ShardedSource:
    source = open_source(str(path), **kwargs)  # type: ignore[arg-type]
    assert isinstance(source, ShardedSource)
    return source


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark every few samples, so that shards may be small."""
    monkeypatch.setattr(seek_points, "SPACING_BYTES", STRETCH)
    monkeypatch.setattr(seek_points, "SKIPPED_BYTES", STRETCH)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tar(tmp_path_factory.mktemp("shards") / "a.tar", numbered(1600, num_bytes=30_000))


@pytest.mark.parametrize(("num_nodes", "num_readers"), [(1, 2), (1, 3), (2, 2), (4, 2)])
def test_parts_of_a_counted_shard_cost_little_more_than_the_whole(
    tmp_path: Path, large: Path, num_nodes: int, num_readers: int
) -> None:
    shard_bytes = large.stat().st_size
    counted = opened(large, index_cache=tmp_path / "indexes")
    assert shard_bytes * 0.98 <= counted.bytes_read <= shard_bytes

    def stage(world: World) -> float:
        with Loader(
            str(large),
            world=world,
            fields=FIELDS,
            batch_size=100,
            cache=tmp_path,
            workers=Workers(threads=0),
            reports=Reports(progress=False),
            staging=Staging(readers=num_readers),
        ) as loader:
            return float(loader.stats()["source_bytes"])

    staged = sum(run_threads(thread_worlds([1] * num_nodes), stage))
    assert shard_bytes * 0.98 <= staged <= shard_bytes * 1.1


def test_counting_a_shard_is_no_part_of_staging_it(tmp_path: Path, large: Path) -> None:
    shard_bytes = large.stat().st_size
    with Loader(
        str(large), fields=FIELDS, batch_size=100, cache=tmp_path, workers=Workers(threads=0),
        reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        stats = loader.stats()
    assert shard_bytes * 0.98 <= stats["staging_bytes"] <= shard_bytes * 1.01
    assert stats["source_bytes"] >= 2 * shard_bytes * 0.98


def test_every_rank_is_told_what_one_of_them_counted(tmp_path: Path, large: Path) -> None:
    (tmp_path / "b.tar").symlink_to(large)
    write_tar(tmp_path / "a.tar", numbered(9))
    index_cache = tmp_path / "indexes"

    def marks(world: World) -> tuple[int, list[list[int]]]:
        source = opened(tmp_path, world=world, index_cache=index_cache)
        return source.bytes_read, [shard.seek_points.ravel().tolist() for shard in source.shards]

    (a_bytes, told), (b_bytes, same) = run_threads(thread_worlds([1, 1]), marks)
    assert a_bytes < 1e6 < b_bytes
    assert told == same
    assert [len(of) // 2 for of in told] == [2, seek_points.NUM_SEEK_POINTS - 1], (
        "the start is one too"
    )
    assert run_threads(thread_worlds([1]), marks) == [(0, told)], "kept on the node"


def test_many_shards_share_the_marks_that_may_be(
    tmp_path: Path, dense: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        write_tar(tmp_path / f"{i}.tar", numbered(100))
    whole = [len(shard.seek_points) for shard in opened(tmp_path).shards]
    monkeypatch.setattr("dataio.source.counts.MAX_SEEK_POINTS", 40)
    source = opened(tmp_path)
    assert min(whole) > 50
    assert [len(shard.seek_points) for shard in source.shards] == [10] * 4
    rows = read_all(source, FIELDS)
    assert rows_of(source.read(np.arange(150, 350, 7), FIELDS)) == rows[150:350:7]


@REUSE
@given(
    form=st.sampled_from(FORMS),
    sizes=st.lists(st.sampled_from([0, 1, 511, 513, 3000, 9000, 70_000]), min_size=1, max_size=40),
    long=st.sets(st.integers(0, 39)),
    others=st.sets(st.integers(0, 39)),
    chosen=st.sets(st.integers(0, 39)),
)
def test_any_subset_by_marks_is_that_of_the_whole(
    tmp_path: Path,
    dense: None,
    form: int,
    sizes: list[int],
    long: set[int],
    others: set[int],
    chosen: set[int],
) -> None:
    members = []
    for i, num_bytes in enumerate(sizes):
        key = f"{i:04d}" + "/long" * 25 * (i in long) + "/x" * (i in others)
        members += [("unnamed", b"z" * 5000)] * (i in others)
        members += [(f"{key}.bin", b"%d" % (i % 10) * num_bytes), (f"{key}.cls", b"%d" % i)]
    source = opened(write_tar(tmp_path / "a.tar", members, form=form))
    rows = read_all(source, FIELDS)
    assert [len(row[1][1]) for row in rows] == sizes
    wanted = sorted(i for i in chosen if i < len(sizes))
    assert rows_of(source.read(np.array(wanted, np.int64), FIELDS)) == [rows[i] for i in wanted]
    # From every mark on, a sample that lies across the next one included.
    for first in source.shards[0].seek_points[:, 0].tolist():
        assert rows_of(source.read(np.arange(first, len(rows)), FIELDS)) == rows[first:]


@pytest.mark.parametrize("num_bytes", [30_000, 200_000])
def test_what_lies_between_marks_is_not_read(
    tmp_path: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(24_000_000 // num_bytes, num_bytes=num_bytes))
    source = opened(path)
    counted = source.bytes_read
    wanted = np.linspace(0, source.num_samples - 1, 4).astype(np.int64)
    assert [row[0] for row in rows_of(source.read(wanted, FIELDS))] == wanted.tolist()
    assert source.bytes_read - counted < 0.25 * path.stat().st_size


def members_only(first: int, *, key_tail: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in numbered(20, first=first):
            info = tarfile.TarInfo(name.replace(".", f"{key_tail}."))
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        return buffer.getvalue()[: tar.offset]


def test_a_global_header_that_names_members_is_refused(tmp_path: Path, dense: None) -> None:
    path = tmp_path / "a.tar"
    for keyword in ("comment", "path", "size"):
        globally = tarfile.TarInfo.create_pax_global_header({keyword: "12"})
        # Names that the header has no room for have records of their own, which go before it.
        later = members_only(20, key_tail="y" * 120)
        path.write_bytes(members_only(0) + globally + later + bytes(1024))
        if keyword != "comment":
            with pytest.raises(SourceError, match=rf"found a global header with {keyword} at byte"):
                opened(path)
            continue
        source = opened(path)
        assert source.num_samples == 40
        assert len(source.shards[0].seek_points) > 20
        assert rows_of(source.read(ids(30, 39), FIELDS))[0] == read_all(source, FIELDS)[30]


def test_a_shard_that_changed_is_counted_and_marked_again(tmp_path: Path, dense: None) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(40))
    index_cache = tmp_path / "indexes"
    before = opened(path, index_cache=index_cache).shards[0].seek_points
    write_tar(path, numbered(60, num_bytes=2000))
    source = opened(path, index_cache=index_cache)
    assert source.num_samples == 60
    assert source.shards[0].seek_points.tolist() != before.tolist()
    assert rows_of(source.read(ids(30, 50), FIELDS))[1] == read_all(source, FIELDS)[50]


def test_a_damaged_table_of_marks_is_made_anew(tmp_path: Path, dense: None) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(40))
    index_cache = tmp_path / "indexes"
    marks = opened(path, index_cache=index_cache).shards[0].seek_points
    file = next(index_cache.iterdir())
    whole = file.read_bytes()
    offset = str(marks[3, 1]).encode()
    assert whole.count(offset) == 1
    file.write_bytes(whole.replace(offset, b"1" * len(offset)))
    source = opened(path, index_cache=index_cache)
    assert source.bytes_read > 0
    assert source.shards[0].seek_points.tolist() == marks.tolist()
    assert file.read_bytes() == whole


def test_a_shard_that_changes_after_it_was_marked_is_refused(tmp_path: Path, dense: None) -> None:
    path = write_tar(tmp_path / "a.tar", numbered(40))
    source = opened(path)
    whole, num_bytes = path.read_bytes(), path.stat().st_size
    write_tar(path, numbered(50, num_bytes=2000))
    with pytest.raises(SourceError, match="long when surveyed; expected shards that stay"):
        list(source.read(ids(30), FIELDS))
    # The same length, as another node sees it, to which no time was told.
    path.write_bytes(path.read_bytes()[:num_bytes].ljust(num_bytes, b"\0"))
    forget_survey(source)
    with pytest.raises(SourceError, match=r"found no header at byte \d+, expected one or the end"):
        list(source.read(ids(30), FIELDS))
    # Nothing but the end where a sample was.
    damage(path, whole[:20_480] + bytes(num_bytes - 20_480))
    with pytest.raises(SourceError, match=r"found \d+ zeros at byte \d+, expected 1024 to 10752"):
        list(source.read(ids(30), FIELDS))


@pytest.mark.parametrize("ranks", [1, 4])
def test_groups_of_a_small_set_are_staged_beside_training_for_little_more_than_its_bytes(
    tmp_path: Path, ranks: int
) -> None:
    for i in range(6):
        write_tar(tmp_path / f"{i}.tar", numbered(90, first=90 * i, num_bytes=1000))
    set_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))

    def stage(world: World) -> float:
        with Loader(
            str(tmp_path),
            world=world,
            fields=FIELDS,
            batch_size=4,
            cache=tmp_path / "cache",
            workers=Workers(threads=0),
            reports=Reports(progress=False),
            staging=Staging(when="overlap"),
        ) as loader:
            counted = loader.stats()["source_bytes"]
            for _ in loader.epochs(1):
                assert sum(len(batch["label"]) for batch in loader) >= 540 // ranks
            return float(loader.stats()["source_bytes"] - counted)

    staged = sum(run_threads(thread_worlds([ranks]), stage))
    assert set_bytes * 0.95 <= staged <= set_bytes * 2


@pytest.mark.parametrize("form", FORMS)
def test_a_first_start_passes_over_large_members_that_have_small_ones_beside_them(
    tmp_path: Path, form: int
) -> None:
    rng = np.random.default_rng(0)
    members = [
        part
        for number, num_bytes in enumerate(rng.integers(50_000, 150_000, 200).tolist())
        for part in [
            (f"{number}.bin", rng.bytes(num_bytes)),
            (f"{number}.json", bytes(300)),
            (f"{number}.cls", str(number).encode()),
        ]
    ]
    shard = write_tar(tmp_path / "a.tar", members, form=form)
    source = opened(shard)
    assert source.num_samples == 200
    assert source.bytes_read < 0.15 * shard.stat().st_size
    rows = rows_of(source.read(np.arange(200), FIELDS))
    assert len(rows) == 200
    assert source.bytes_read < 1.15 * shard.stat().st_size


@pytest.mark.parametrize(("num_bytes", "share"), [(100_000, (0.9, 1.0)), (2 << 20, (0.0, 0.02))])
def test_an_object_store_is_asked_for_headers_only_where_a_request_costs_less(
    tmp_path: Path, num_bytes: int, share: tuple[float, float]
) -> None:
    shard = write_tar(tmp_path / "a.tar", numbered(32, num_bytes=num_bytes))
    memory = fsspec.filesystem("memory")
    memory.pipe("/marks/a.tar", shard.read_bytes())
    try:
        source = open_source("memory://marks/a.tar")
        assert source.num_samples == 32
        least, most = (part * shard.stat().st_size for part in share)
        assert least <= source.bytes_read <= most
    finally:
        memory.rm("/marks", recursive=True)
