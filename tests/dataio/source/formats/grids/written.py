"""The same numbers in files of every format, each by the format's own writer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
from numpy.typing import NDArray

from dataio import Array, ArrayFiles, Field, Float

TIMES, LATS, LONS, TILE = 40, 16, 24, 8
NUM_SAMPLES = TIMES * (LATS // TILE) * (LONS // TILE)
DIMS = ("time", "lat", "lon")
VALUES = np.arange(TIMES * LATS * LONS, dtype=np.float32).reshape(TIMES, LATS, LONS)
"""Each number once, so that a tile says where it comes from."""

OTHERS: dict[str, tuple[tuple[str, ...], NDArray[Any]]] = {
    "time": (("time",), np.arange(TIMES, dtype=np.float64)),
    "lat": (("lat",), np.arange(LATS, dtype=np.float32)),
    "mask": (("lat", "lon"), (np.arange(LATS * LONS) % 3).astype(np.int8).reshape(LATS, LONS)),
}
CHUNKS = {"t2m": (10, 8, 8), "time": (10,), "lat": (16,), "mask": (16, 24)}


def write_hdf5(path: Path, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        for name, (dims, values) in OTHERS.items():
            file[name] = values
            if dims == (name,):
                file[name].make_scale(name)
        made = options or {"chunks": CHUNKS["t2m"], "compression": "gzip", "shuffle": True}
        file.create_dataset("t2m", data=VALUES, **made)
        # A dimension may have a label alone.
        file["t2m"].dims[2].label = file["mask"].dims[1].label = "lon"
        for i in range(2):
            file["t2m"].dims[i].attach_scale(file[DIMS[i]])
        file["mask"].dims[0].attach_scale(file["lat"])


def write_netcdf(path: Path, kind: Any) -> None:
    with netCDF4.Dataset(path, "w", format=kind) as file:
        for name, length in zip(DIMS, (None, LATS, LONS), strict=True):
            file.createDimension(name, length)
        file.title = "seven letters and more"
        packed: Any = {"zlib": True, "chunksizes": CHUNKS["t2m"]} if kind == "NETCDF4" else {}
        file.createVariable("t2m", "f4", DIMS, **packed)[:] = VALUES
        for name, (dims, values) in OTHERS.items():
            file.createVariable(name, values.dtype, dims)[:] = values


def write_zarr(path: Path, version: int) -> None:
    zarr = pytest.importorskip("zarr", minversion="3", reason="needs Python 3.11: tonari[zarr]")
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, (dims, values) in (OTHERS | {"t2m": (DIMS, VALUES)}).items():
        named: Any = {"dimension_names": dims} if version == 3 else {}
        shards: Any = {"shards": (20, 16, 8)} if version == 3 and name == "t2m" else {}
        array = group.create_array(
            name, shape=values.shape, dtype=values.dtype, chunks=CHUNKS[name], **named, **shards
        )
        array[...] = values
        if version == 2:
            array.attrs["_ARRAY_DIMENSIONS"] = list(dims)


def arrays() -> dict[str, NDArray[Any]]:
    return {"t2m": VALUES, **{name: values for name, (_, values) in OTHERS.items()}}


@dataclass(frozen=True)
class Written:
    """How a format is written, and named.

    Attributes:
        name: Of the file or store.
        write: Writes it.
        key: Of the variable.
        named: Whether the file names dimensions.
        others: Whether it holds the other variables.
    """

    name: str
    write: Callable[[Path], None]
    key: str = "t2m"
    named: bool = True
    others: bool = True
    fields: dict[str, Field] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.fields["tile"] = Array(self.key, (TILE, TILE), "float32")
        if self.others:
            self.fields["time"] = Float("time")

    def make(self, directory: Path) -> "Written":
        """Write it."""
        directory.mkdir(exist_ok=True)
        self.write(directory / self.name)
        return self

    def declared(self, directory: Path, **changes: Any) -> ArrayFiles:
        """Declare rows in time, cut into tiles."""
        dims = {} if self.named else {name: dims for name, (dims, _) in OTHERS.items()}
        chosen: dict[str, Any] = {
            "axis": "time",
            "tiles": {"lat": TILE, "lon": TILE},
            "dims": dims if self.named else {**dims, self.key: DIMS},
        }
        return ArrayFiles(directory / self.name, **(chosen | changes))


WRITTEN = {
    "hdf5": Written("a.h5", write_hdf5),
    "hdf5-contiguous": Written("a.h5", lambda path: write_hdf5(path, chunks=None)),
    "netcdf4": Written("a.nc", lambda path: write_netcdf(path, "NETCDF4")),
    "netcdf3": Written("a.nc", lambda path: write_netcdf(path, "NETCDF3_CLASSIC")),
    "netcdf3-64": Written("a.nc", lambda path: write_netcdf(path, "NETCDF3_64BIT_OFFSET")),
    "netcdf5": Written("a.nc", lambda path: write_netcdf(path, "NETCDF3_64BIT_DATA")),
    "zarr2": Written("a.zarr", lambda path: write_zarr(path, 2)),
    "zarr3": Written("a.zarr", lambda path: write_zarr(path, 3)),
    "zarr2 by zarr-python": Written("a.zarr", lambda path: write_zarr(path, 2)),
    "zarr3 by zarr-python": Written("a.zarr", lambda path: write_zarr(path, 3)),
    "npz": Written("a.npz", lambda path: np.savez(path, **arrays()), named=False),  # type: ignore[arg-type]
    "npz-packed": Written(
        "a.npz", lambda path: np.savez_compressed(path, **arrays()), named=False  # type: ignore[arg-type]
    ),
    "npy": Written(
        "a.npy", lambda path: np.save(path, VALUES), "arr_0", named=False, others=False
    ),
}  # fmt: skip


def tiles_of(values: NDArray[Any]) -> set[bytes]:
    """All tiles of all times, each as its bytes."""
    cut = values.reshape(TIMES, LATS // TILE, TILE, LONS // TILE, TILE).swapaxes(2, 3)
    # [times * tiles, TILE, TILE]
    return {tile.tobytes() for tile in cut.reshape(-1, TILE, TILE)}
