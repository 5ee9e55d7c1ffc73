"""Every format x (stages, resumes, is read in part, refuses wrong input)."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from dataio import (
    Array,
    ArrayFiles,
    Bytes,
    FieldError,
    NodeCache,
    SourceError,
    Staging,
    Text,
    Tokens,
)
from dataio.base.errors import OtherDatasetError
from dataio.world import World, run_threads, single_world, thread_worlds
from tests.dataio.loaders import make, train
from tests.dataio.source.formats.grids.written import (
    NUM_SAMPLES,
    OTHERS,
    TILE,
    TIMES,
    VALUES,
    WRITTEN,
    Written,
    tiles_of,
)
from tests.dataio.source.shards import ids, read_all, rows_of

EACH = pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
FEW = pytest.mark.parametrize("kind", ["hdf5", "netcdf3", "zarr3", "npz"])


@pytest.fixture(autouse=True)
def _reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tensorstore Zarr is read by zarr-python in all of them."""
    if "by zarr-python" in request.node.name:
        monkeypatch.setitem(sys.modules, "tensorstore", None)


@EACH
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_loader_delivers_what_was_written(
    tmp_path: Path, written: Written, num_nodes: int
) -> None:
    written.make(tmp_path)

    def work(world: World) -> list[tuple[bytes, float]]:
        found = []
        with make(
            world, tmp_path / "cache", source=written.declared(tmp_path), fields=written.fields
        ) as loader:
            for _ in loader.epochs(1):
                for batch in loader:
                    tiles = batch["tile"]
                    assert tiles.dtype == torch.float32
                    times = batch.get("time", torch.full((len(tiles),), -1.0))
                    found += [
                        (tile.numpy().tobytes(), float(time))
                        for tile, time in zip(tiles, times, strict=True)
                    ]
        return found

    seen = [s for rank in run_threads(thread_worlds([1] * num_nodes), work) for s in rank]
    assert len(seen) == NUM_SAMPLES
    assert {tile for tile, _ in seen} == tiles_of(VALUES)
    if written.others:
        step = float(VALUES[1, 0, 0])
        assert all(np.frombuffer(tile, "f4")[0] // step == time for tile, time in seen)


@EACH
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path, written: Written) -> None:
    written.make(tmp_path)

    def again(root: str, *, restore: bool = False, **options: Any) -> Any:
        source = written.declared(tmp_path)
        with make(single_world(), tmp_path / root, source=source, fields=written.fields) as loader:
            if restore:
                loader.restore(tmp_path / "save")
            return train(loader, 2, **options)

    whole = again("whole")
    before = again("cache", save_at=(0, 20), path=tmp_path / "save")
    after = again("cache", restore=True)
    assert before + after == whole


@EACH
@pytest.mark.parametrize("chosen", [[0], [3, 200], [0, 1, 59, 60, 61, 239]])
def test_any_samples_are_those_of_a_full_read(
    tmp_path: Path, written: Written, chosen: list[int]
) -> None:
    source = written.make(tmp_path).declared(tmp_path).open()
    every = read_all(source, written.fields)
    assert [sample_id for sample_id, _ in every] == list(range(NUM_SAMPLES))
    some = rows_of(source.read(ids(*chosen), written.fields))
    assert some == [every[i] for i in chosen]


@FEW
def test_the_place_of_a_sample_is_its_file_and_region(tmp_path: Path, kind: str) -> None:
    written = WRITTEN[kind].make(tmp_path)
    source = written.declared(tmp_path).open()
    for sample_id, (tile, *_) in read_all(source, written.fields):
        time, row, column = np.unravel_index(int(np.frombuffer(tile, "f4")[0]), VALUES.shape)
        place = f"[time {time}, lat {row}:{row + TILE}, lon {column}:{column + TILE}]"
        assert source.place_of(sample_id) == f"{tmp_path / written.name}{place}"
    whole = written.declared(tmp_path, axis=None, tiles={}).open()
    assert whole.place_of(0) == str(tmp_path / written.name)


@FEW
@pytest.mark.parametrize("when", ["overlap", "quota"])
def test_rows_are_read_beside_training_too(tmp_path: Path, kind: str, when: str) -> None:
    written = WRITTEN[kind].make(tmp_path)
    quota = when == "quota"
    cache = NodeCache(tmp_path / "cache", quota="200KiB") if quota else tmp_path / "cache"
    seen = []
    with make(
        single_world(), cache, source=written.declared(tmp_path), fields=written.fields,
        exchange=0.0 if quota else 0.3, staging=Staging(when="before" if quota else "overlap"),
    ) as loader:  # fmt: skip
        for _ in loader.epochs(2):
            for batch in loader:
                seen += [tile.numpy().tobytes() for tile in batch["tile"]]
    assert len(seen) == 2 * NUM_SAMPLES
    assert set(seen) == tiles_of(VALUES)


@EACH
def test_what_is_missing_is_named_with_what_there_is(tmp_path: Path, written: Written) -> None:
    written.make(tmp_path)
    with pytest.raises(SourceError, match=rf"{written.name}: no variable has the axis 'height'"):
        written.declared(tmp_path, axis="height").open()
    source = written.declared(tmp_path).open()
    with pytest.raises(FieldError, match=rf"{written.name}: holds .*{written.key}\[time 40, lat 1"):
        source.read(ids(0), {"x": Array("no/such", (TILE, TILE), "float32")})
    with pytest.raises(FieldError, match=r"is float32\[8, 8\], expected float64\[8, 8\] for field"):
        source.read(ids(0), {"x": Array(written.key, (TILE, TILE), "float64")})
    with pytest.raises(FieldError, match=r"is float32\[8, 8\], expected float32\[9\] for field"):
        source.read(ids(0), {"x": Array(written.key, (9,), "float32")})


@EACH
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, written: Written) -> None:
    written.make(tmp_path)
    path = tmp_path / written.name
    if path.is_dir():
        (root,) = (p for name in ("zarr.json", ".zgroup") if (p := path / name).exists())
        root.write_text("{")
    else:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        SourceError, match=rf"{written.name}.*(truncated|damaged|write it|save the)"
    ):
        read_all(written.declared(tmp_path).open(), written.fields)


@EACH
def test_a_changed_file_is_another_dataset(tmp_path: Path, written: Written) -> None:
    source = written.make(tmp_path).declared(tmp_path).open()
    assert written.declared(tmp_path).open().fingerprint == source.fingerprint
    others = {written.declared(tmp_path, tiles={"lat": 4, "lon": 8}).open().fingerprint}
    written.make(tmp_path)
    others.add(written.declared(tmp_path).open().fingerprint)
    assert len(others | {source.fingerprint}) == 3


def test_a_cache_of_other_tiles_is_not_taken_for_this_one(tmp_path: Path) -> None:
    written = WRITTEN["hdf5"].make(tmp_path)
    fields = {"time": written.fields["time"]}
    make(single_world(), tmp_path / "c", source=written.declared(tmp_path), fields=fields).close()
    other = written.declared(tmp_path, tiles={"lat": 16, "lon": 24})
    with pytest.raises(OtherDatasetError):
        make(single_world(), tmp_path / "c", source=other, fields=fields)


@FEW
def test_a_variable_is_given_by_the_axes_that_it_has(tmp_path: Path, kind: str) -> None:
    written = WRITTEN[kind].make(tmp_path)
    fields = {
        "tile": written.fields["tile"],
        "mask": Array("mask", (TILE, TILE), "int8"),
        "lat": Array("lat", (TILE,), "float32"),
    }
    for _, (tile, part, lat) in read_all(written.declared(tmp_path).open(), fields):
        first = int(np.frombuffer(tile, "f4")[0])
        row, column = np.unravel_index(first, VALUES.shape)[1:]
        true = OTHERS["mask"][1][row : row + TILE, column : column + TILE]
        assert part == true.tobytes()
        assert lat == OTHERS["lat"][1][row : row + TILE].tobytes()
    whole = {"mask": Array("mask", (16, 24), "int8"), "time": written.fields["time"]}
    rows = read_all(written.declared(tmp_path, tiles={}).open(), whole)
    assert {mask for _, (mask, _) in rows} == {OTHERS["mask"][1].tobytes()}
    assert [time for _, (_, time) in rows] == [np.float32(i).tobytes() for i in range(TIMES)]


@FEW
def test_a_sample_may_be_a_whole_file_or_a_window_in_time(tmp_path: Path, kind: str) -> None:
    written = WRITTEN[kind].make(tmp_path)
    whole = read_all(
        written.declared(tmp_path, axis=None, tiles={}).open(),
        {"x": Array("t2m", VALUES.shape, "float32")},
    )
    assert whole == [(0, [VALUES.tobytes()])]
    windows = read_all(
        written.declared(tmp_path, axis=None, tiles={"time": 5}).open(),
        {"x": Array("t2m", (5, *VALUES.shape[1:]), "float32")},
    )
    assert windows == [(i, [VALUES[5 * i : 5 * i + 5].tobytes()]) for i in range(TIMES // 5)]
    overlapping = written.declared(tmp_path, axis=None, tiles={"time": 2}, strides={"time": 1})
    pairs = read_all(overlapping.open(), {"x": Array("t2m", (2, *VALUES.shape[1:]), "float32")})
    assert pairs == [(i, [VALUES[i : i + 2].tobytes()]) for i in range(TIMES - 1)]
    assert overlapping.open().place_of(7).endswith("[time 7:9]")
    by_place = read_all(
        ArrayFiles(tmp_path / written.name, axis=None, tiles={-1: 12}).open(),
        {"x": Array("t2m", (*VALUES.shape[:2], 12), "float32")},
    )
    assert by_place == [
        (i, [np.ascontiguousarray(VALUES[..., 12 * i : 12 * i + 12]).tobytes()]) for i in range(2)
    ]


@FEW
def test_an_edge_where_no_tile_fits_is_refused_or_dropped(tmp_path: Path, kind: str) -> None:
    written = WRITTEN[kind].make(tmp_path)
    message = r"'lat' is 16 long, expected a multiple of the tile length 5; give edge=\"drop\""
    with pytest.raises(SourceError, match=message):
        written.declared(tmp_path, tiles={"lat": 5}).open()
    with pytest.raises(SourceError, match=r"16 long, expected a multiple of .* 17; give smaller"):
        written.declared(tmp_path, tiles={"lat": 17}, edge="drop").open()
    rows = read_all(
        written.declared(tmp_path, tiles={"lat": 5}, edge="drop").open(),
        {"x": Array("t2m", (5, 24), "float32")},
    )
    true = {VALUES[t, r : r + 5].tobytes() for t in range(TIMES) for r in (0, 5, 10)}
    assert {tile for _, (tile,) in rows} == true
    assert len(rows) == len(true)


@FEW
def test_files_share_one_numbering_and_must_share_shapes(tmp_path: Path, kind: str) -> None:
    names = [f"{part}-{WRITTEN[kind].name}" for part in (0, 1)]
    several = [dataclasses.replace(WRITTEN[kind], name=name).make(tmp_path) for name in names]
    declared = several[0].declared(tmp_path)
    both = dataclasses.replace(declared, names=tmp_path / f"*-{WRITTEN[kind].name}").open()
    one = declared.open()
    assert both.num_samples == 2 * NUM_SAMPLES
    once = [row for _, row in read_all(one, several[0].fields)]
    assert [row for _, row in read_all(both, several[0].fields)] == once + once
    np.savez(tmp_path / "other.npz", t2m=VALUES[:, :, :8].astype("f8"), time=np.arange(40.0))
    paths = [tmp_path / names[0], tmp_path / "other.npz"]
    dims = {"t2m": ("time", "lat", "lon"), "time": ("time",)}
    dims |= {"lat": ("lat",), "mask": ("lat", "lon")} if kind == "npz" else {}
    mixed = ArrayFiles(paths, axis="time", dims=dims).open()
    with pytest.raises(
        FieldError, match=r"other.npz: a sample of the variable 't2m' is float64\[1"
    ):
        mixed.read(ids(0), {"x": Array("t2m", (16, 24), "float32")})


def test_text_of_hdf5_is_no_array_of_letter_codes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("long", data=["abcd", "é"], dtype=h5py.string_dtype())
        file.create_dataset("short", data=np.array([b"abcd", b"efgh"]))
    source = ArrayFiles(tmp_path / "a.h5").open()
    rows = read_all(source, {"long": Text("long"), "short": Bytes("short")})
    assert [row for _, row in rows] == [[b"abcd", b"abcd"], ["é".encode(), b"efgh"]]
    for key in ("long", "short"):
        with pytest.raises(
            FieldError, match=rf"field 'x', array '{key}'.*(text|'abcd').*declare T"
        ):
            read_all(source, {"x": Tokens(key)})
