"""A node that stages half of the samples reads half of the bytes, and each chunk once."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest

from dataio import Array, ArrayFiles, NodeCache, QuotaError, Staging
from dataio.world import World, run_threads, single_world, thread_worlds
from tests.cases import diagonal
from tests.dataio.loaders import make

zarr = pytest.importorskip("zarr", minversion="3", reason="needs Python 3.11: tonari[zarr]")

SHAPE = (48, 256, 256)
DIMS = ("time", "lat", "lon")
TILES: dict[str | int, int] = {"lat": 64, "lon": 64}
FIELDS = {"tile": Array("x", (64, 64), "float32")}
Chunks = tuple[int, int, int]


def numbers() -> np.ndarray:
    """Random, so that they take as many bytes packed as unpacked."""
    return np.random.default_rng(0).random(SHAPE, np.float32)


def hdf5(path: Path, chunks: Chunks | None = (12, 64, 64)) -> None:
    with h5py.File(path, "w") as file:
        packed: dict[str, Any] = {"compression": "gzip", "compression_opts": 1} if chunks else {}
        file.create_dataset("x", data=numbers(), chunks=chunks, **packed)


def netcdf(path: Path, kind: Any) -> None:
    with netCDF4.Dataset(path, "w", format=kind) as file:
        for name, length in zip(DIMS, (None, *SHAPE[1:]), strict=True):
            file.createDimension(name, length)
        file.createVariable("step", "f8", ("time",))[:] = np.arange(SHAPE[0])
        file.createVariable("x", "f4", DIMS)[:] = numbers()


def zarr_store(path: Path) -> None:
    group = zarr.open_group(path, mode="w")
    group.create_array("x", data=numbers(), chunks=(12, 64, 64))


def npz(path: Path) -> None:
    np.savez(path, x=numbers())


CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "hdf5": ("a.h5", hdf5),
    "hdf5, chunks of many tiles": ("a.h5", lambda path: hdf5(path, (5, 128, 256))),
    "hdf5, chunks smaller than a tile": ("a.h5", lambda path: hdf5(path, (4, 16, 32))),
    "hdf5, contiguous": ("a.h5", lambda path: hdf5(path, None)),
    "netcdf4": ("a.nc", lambda path: netcdf(path, "NETCDF4")),
    "netcdf3, records": ("a.nc", lambda path: netcdf(path, "NETCDF3_64BIT_OFFSET")),
    "zarr": ("a.zarr", zarr_store),
    "npz": ("a.npz", npz),
}


def bytes_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


@pytest.mark.parametrize("case", CASES)
def test_each_of_two_nodes_reads_its_half(tmp_path: Path, case: str) -> None:
    name, write = CASES[case]
    path = tmp_path / name
    write(path)
    source = ArrayFiles(path, axis="time", tiles=TILES, dims={"x": DIMS})

    def work(world: World) -> int:
        staging = Staging(readers=2)
        with make(
            world, tmp_path / "cache", source=source, fields=FIELDS, staging=staging
        ) as loader:
            for _ in loader.epochs(1):
                list(loader)
            return int(loader.stats()["source_bytes"])

    nodes = run_threads(thread_worlds([1, 1]), work)
    share = [node / bytes_of(path) for node in nodes]
    # Readers' parts may begin inside a large chunk; of many small chunks, h5py reads a long index
    # each time it opens the file.
    most = 0.65 if "chunks" in case else 0.51
    assert max(share) < most, share
    assert sum(share) < 2 * most, share


def test_overlapping_windows_read_what_they_share_about_once(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((33, 512, 1024), np.float32))  # 2 MiB a time
    declared = ArrayFiles(tmp_path / "a.npy", axis=None, tiles={0: 2}, strides={0: 1})
    source = declared.open()
    before = source.bytes_read
    fields = {"x": Array("arr_0", (2, 512, 1024), "float32")}
    assert sum(len(b) for b in source.read(np.arange(source.num_samples), fields)) == 32
    assert source.bytes_read - before < 1.2 * (33 * 2 << 20)


def test_far_samples_cost_their_own_chunks(tmp_path: Path) -> None:
    hdf5(tmp_path / "a.h5", (1, 256, 256))
    source = ArrayFiles(tmp_path / "a.h5").open()
    before = source.bytes_read
    fields = {"x": Array("x", SHAPE[1:], "float32")}
    # All in one cell of 4 MiB.
    rows = sum(len(rows) for rows in source.read(np.array([0, 7, 14]), fields))
    assert rows == 3
    assert source.bytes_read - before < 4 * 256 * 256 * 4


def test_readers_are_offered_cuts_between_cells_of_enough_bytes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=numbers())
    np.savez(tmp_path / "b.npz", x=numbers())
    source = ArrayFiles(tmp_path / "*.npz").open()
    starts = source.shard_starts
    assert starts[0] == 0
    assert 3 <= len(starts) <= 5
    assert (np.diff(starts) * 256 * 256 * 4 >= 4 << 20).all()


def test_one_read_opens_each_chunk_once(tmp_path: Path) -> None:
    hdf5(tmp_path / "a.h5")
    source = ArrayFiles(tmp_path / "a.h5", axis=0, tiles={1: 64, 2: 64}).open()
    before = source.bytes_read
    blocks = [len(rows) for rows in source.read(np.arange(source.num_samples), FIELDS)]
    assert source.bytes_read - before < 1.02 * bytes_of(tmp_path / "a.h5")
    assert max(blocks) * 64 * 64 * 4 <= 16 << 20
    before = source.bytes_read
    (rows,) = source.read(np.arange(12), FIELDS)
    assert len(rows) == 12
    # Twelve times of one tile are one chunk.
    assert source.bytes_read - before < 2 * rows.fixed[0].nbytes


SAID = re.compile(r"(?:windows, about |to )([\d.]+) ([kKMG])B(?:,| at| once| more from)")
UNITS = {"k": 1e3, "K": 1e3, "M": 1e6}


@pytest.mark.thorough
@diagonal(quota=["4 MB", "7 MB"], case=["hdf5", "zarr", "netcdf3, records"])
def test_a_quota_says_what_an_epoch_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, quota: str
) -> None:
    name, write = CASES[case]
    write(tmp_path / name)

    told: list[int] = []

    def work(world: World) -> list[int]:
        source = ArrayFiles(tmp_path / name, axis="time", tiles=TILES, dims={"x": DIMS})
        cache, read = NodeCache(tmp_path / "cache", quota=quota), list[int]()
        with make(world, cache, source=source, fields=FIELDS, exchange=0.1) as loader:
            told.append(len(caplog.records))
            for _ in loader.epochs(3):
                read.append(int(loader.stats()["source_bytes"]))
                list(loader)
        return read

    first, *_, last = np.diff(np.array(run_threads(thread_worlds([1, 1]), work)).sum(axis=0))
    messages = [record.getMessage() for record in caplog.records]
    said = [[float(a) * UNITS[b] for a, b in SAID.findall(message)] for message in messages]
    (end,) = said.pop()
    assert "so that none are exchanged: the end of an epoch reads up to" in messages[-1]
    assert len(messages) == max(told) == len(said) + 1, "before anything is trained"
    now, later = (2 * said[0])[:2] if said else (0.0, 0.0)
    assert bool(said) == (quota != "7 MB"), "where all rows stay, only an epoch's end reads"
    assert 0.9 * now < first < 1.1 * (now + end) < 8 * first
    assert last <= 1.1 * (later + end)


def test_a_quota_says_which_one_holds_all_rows_and_that_none_are_exchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((100, 128, 128), np.float32))

    def messages(quota: str) -> tuple[list[str], float]:
        caplog.clear()

        def work(world: World) -> float:
            source = ArrayFiles(tmp_path / "a.npy")
            fields = {"x": Array("arr_0", (128, 128), "float32")}
            cache = NodeCache(tmp_path / quota.replace(" ", ""), quota=quota)
            with make(world, cache, source=source, fields=fields, exchange=0.2) as loader:
                for _ in loader.epochs(2):
                    list(loader)
                return float(loader.stats()["exchanged_rows"])

        exchanged, _ = run_threads(thread_worlds([1, 1]), work)
        return [record.getMessage() for record in caplog.records], exchanged

    [none, *_], exchanged = messages("1 MB")
    assert "0 of 100 rows (0 %) stay in the caches of all nodes" in none
    assert "for rows on their way, and none are exchanged" in none
    assert not exchanged
    [some, *_], _ = messages("3 MB")
    assert "none are exchanged" not in some
    for message in (none, some):
        found = re.search(r"and one of ([\d.]+ MB) a node holds all rows$", message)
        assert found
        said, exchanged = messages(found[1])
        assert not said
        assert exchanged


def test_a_quota_that_is_too_small_for_chunks_is_not_of_shards(tmp_path: Path) -> None:
    zarr_store(tmp_path / "a.zarr")
    source = ArrayFiles(tmp_path / "a.zarr", axis=0, tiles={1: 64, 2: 64})
    with pytest.raises(QuotaError, match=r"room for two batches .* or lower batch_size"):
        make(
            single_world(),
            NodeCache(tmp_path / "cache", quota="100 KB"),
            source=source,
            fields=FIELDS,
        )
