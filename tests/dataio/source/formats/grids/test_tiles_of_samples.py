"""A tile of a sample is read alone, of each format: its numbers, and at most its part of bytes."""

import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dataio import Array, ArrayFiles, FieldError, Float, NumpySource, Tiles
from dataio.tiling import TileRanks
from dataio.world import single_world
from tests.dataio.source.formats.grids.written import DIMS, LATS, LONS, TIMES, VALUES, WRITTEN

zarr = pytest.importorskip("zarr", minversion="3", reason="needs Python 3.11: tonari[zarr]")


def values_of(source: Any, fields: Any) -> dict[str, np.ndarray]:
    """Read all samples of a source: by field, dtype[num_samples, ...]."""
    blocks = list(source.read(np.arange(source.num_samples), fields))
    found = {}
    for at, column in enumerate(blocks[0].schema.fixed):
        parts = [np.ascontiguousarray(block.fixed[at]).view(column.dtype) for block in blocks]
        found[column.name] = np.concatenate(parts).reshape(-1, *column.shape)
    return found


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_the_tiles_of_a_row_are_the_row(tmp_path: Path, written: Any) -> None:
    """Also where a field of the same variable is whole."""
    written.make(tmp_path)
    source = written.declared(tmp_path, axis="time", tiles={}).open()
    for index in range(6):
        tiles = Tiles((-2, -1), (2, 3), 2, index)
        tile = Array(written.key, (LATS, LONS), "float32", tiles)
        found = values_of(
            source, {"tile": tile, "all": Array(written.key, (LATS, LONS), "float32")}
        )
        expected = VALUES[(slice(None), *tiles.box((LATS, LONS)))]
        np.testing.assert_array_equal(found["tile"], expected)
        np.testing.assert_array_equal(found["all"], VALUES)


@pytest.mark.parametrize(
    ("axes", "shape", "cut"),
    [
        ({"axis": "time", "tiles": {"lat": 8}}, (8, 24), Tiles((0, 1), (2, 2), 1, 3)),
        ({"axis": None, "tiles": {"time": 2}}, (2, 16, 24), Tiles((2,), (3,), 2, 1)),
        ({"axis": None}, (40, 16, 24), Tiles((0, 1), (3, 2), 1, 4)),
    ],
)  # fmt: skip
def test_a_tile_of_a_window_or_of_a_file_is_that_part_of_it(tmp_path, axes, shape, cut) -> None:
    WRITTEN["zarr3"].make(tmp_path)
    source = ArrayFiles(tmp_path / "a.zarr", **axes).open()
    whole = values_of(source, {"x": Array("t2m", shape, "float32")})["x"]
    found = values_of(source, {"x": Array("t2m", shape, "float32", cut)})["x"]
    np.testing.assert_array_equal(found, whole[(slice(None), *cut.box(shape))])


SHAPE = (24, 256, 256)
NUMBERS = np.random.default_rng(0).random(SHAPE, np.float32)
"""Random, so that they take about as many bytes packed as unpacked."""


def made(path: Path, chunks: tuple[int, ...] | None) -> Any:
    """Write an array by the format of the path's suffix, and open it."""
    if path.suffix == ".npy":
        np.save(path, NUMBERS)
        return NumpySource({"x": path})
    if path.suffix == ".zarr":
        zarr.open_group(path, mode="w").create_array("x", data=NUMBERS, chunks=chunks)
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=NUMBERS, chunks=chunks)
    return ArrayFiles(path, dims={"x": DIMS}).open()


@pytest.mark.usefixtures("zarr_reader")
@pytest.mark.parametrize(
    ("name", "chunks", "parts", "halo", "most"),
    [
        ("x.npy", None, (4, 1), 0, 1.1),
        ("x.npy", None, (4, 1), 4, 1.15),
        ("x.h5", None, (4, 1), 0, 1.1),
        ("x.h5", (1, 128, 128), (2, 2), 0, 1.1),
        ("x.zarr", (1, 128, 128), (2, 2), 0, 1.1),
        ("x.zarr", (6, 64, 256), (4, 1), 0, 1.1),
        ("x.zarr", (24, 16, 16), (2, 2), 2, 1.3),
        ("x.zarr", (1, 256, 256), (2, 2), 0, 4.1),
        ("x.npy", None, (1, 2), 0, 2.1),
    ],
)
def test_a_rank_reads_its_part_of_the_bytes_or_is_told_what_it_reads(
    tmp_path, caplog, name, chunks, parts, halo, most
) -> None:
    caplog.set_level(logging.WARNING)
    source, num_tiles = made(tmp_path / name, chunks), parts[0] * parts[1]
    for index in range(num_tiles):
        before = source.bytes_read
        tiles = Tiles((-2, -1), parts, halo, index)
        fields = {"x": Array("x", SHAPE[1:], "float32", tiles)}
        found = values_of(source, fields)["x"]
        np.testing.assert_array_equal(found, NUMBERS[(slice(None), *tiles.box(SHAPE[1:]))])
        part = (source.bytes_read - before) / NUMBERS.nbytes * num_tiles
        assert 0.8 * most < part <= most
        # What is said of it is what is read.
        tile_bytes, _ = source.tile_bytes(fields["x"], tiles)
        assert tile_bytes * SHAPE[0] * num_tiles / NUMBERS.nbytes == pytest.approx(part, rel=0.15)
        with single_world() as world:
            TileRanks(world, world, index, num_tiles).warn_of_reading(source, fields)
    assert len(caplog.records) == (num_tiles if most > 2 else 0)


def test_the_warning_names_bytes_and_the_chunks_that_would_do(tmp_path, caplog) -> None:
    source = made(tmp_path / "x.zarr", (1, 256, 256))
    for halo, fitting in ((0, "[1, 128, 64]"), (3, "[1, 12, 6]")):
        tiles = Tiles((-2, -1), (2, 4), halo, 0)
        with single_world() as world:
            fields = {"x": Array("x", SHAPE[1:], "float32", tiles)}
            TileRanks(world, world, 0, 8).warn_of_reading(source, fields)
        said = caplog.messages[-1]
        assert "each sample's 'x' a rank keeps a tile of 3" in said
        assert "has to read about 262 KB of 262 KB, as it lies in" in said
        assert said.endswith(f"write it as Zarr or HDF5 in chunks of at most {fitting}")


def test_a_wrong_shape_and_a_narrower_dtype_are_refused_by_the_field(tmp_path) -> None:
    tiles = Tiles((0,), (2,), 0, 0)
    source = NumpySource({"x": NUMBERS, "y": NUMBERS[:, 0, 0]})
    with pytest.raises(FieldError, match=r"array 'x' is \[256, 256\], expected \[8\] for field"):
        values_of(source, {"x": Array("x", (8,), "float32", tiles)})
    with pytest.raises(FieldError, match=r"found float32\[128, 256\], expected float16\[128"):
        values_of(source, {"x": Array("x", SHAPE[1:], "float16", tiles)})
    assert len(values_of(NumpySource({"t": np.arange(40.0)}), {"t": Float("t")})["t"]) == TIMES
