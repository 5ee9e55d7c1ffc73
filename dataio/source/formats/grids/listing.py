"""A pattern -> the array files that it names, and the format of each."""

from collections.abc import Sequence
from pathlib import Path

from dataio.base.errors import SourceError
from dataio.source.advice import ARRAY_SUFFIXES
from dataio.source.expand import MAGIC, local_glob, shards_among, spelled_out
from dataio.source.formats.grids.hdf5 import Hdf5Format
from dataio.source.formats.grids.netcdf3 import NetCdf3Format
from dataio.source.formats.grids.npz import NpyFormat, NpzFormat
from dataio.source.formats.grids.variables import Format
from dataio.source.formats.grids.zarr import ZarrFormat, is_store
from dataio.source.storage.files import Storage

FORMATS: dict[str, Format] = {
    "hdf5": Hdf5Format(),
    "netcdf3": NetCdf3Format(),
    "npy": NpyFormat(),
    "npz": NpzFormat(),
    "zarr": ZarrFormat(),
}
FIRST_BYTES = {b"\x89HDF": "hdf5", b"CDF": "netcdf3", b"\x93NUMPY": "npy", b"PK": "npz"}
USER_BLOCKS = (512, 1024, 2048, 4096)
"""Where HDF5 may begin behind bytes of the user's own."""


def list_files(names: Sequence[str], storage: Storage) -> list[str]:
    """List the files and stores that patterns name.

    Args:
        names: Paths, brace patterns, globs, directories, and URLs of single files.
        storage: Asks for what there is.

    Returns:
        Paths: patterns in their order, what one names sorted.

    Raises:
        SourceError: If a pattern names nothing.
    """
    return [
        path
        for name in names
        for part in spelled_out(name, storage)
        for path in _matches(part, storage)
    ]


def name_arrays(names: Sequence[str]) -> bool:
    """Whether all names are, by their suffixes, those of array files or stores.

    A directory is one if it holds array files, and no shards, or is a part of a Zarr store.
    """
    return bool(names) and all(
        name.rstrip("/").endswith(ARRAY_SUFFIXES) or _holds_arrays(name) for name in names
    )


def _holds_arrays(name: str) -> bool:
    path = Path(name).expanduser()
    if "://" in name or not path.is_dir():
        return False
    found = [str(child) for child in path.iterdir()]
    if is_store(Storage(), str(path)):
        return True
    return not shards_among(found) and any(child.endswith(ARRAY_SUFFIXES) for child in found)


def _matches(name: str, storage: Storage) -> list[str]:
    if "://" in name:
        url = storage.canonical(name).rstrip("/")
        found = [url] if MAGIC.isdisjoint(url) else storage.glob(url)
    else:
        found = storage.ask(name, lambda: _local(name), doing="listing it")
    if not found:
        raise SourceError(
            f"{name}: names no array file, expected files or directories ending in "
            f"{', '.join(ARRAY_SUFFIXES)}; check the path, and that this node sees it"
        )
    return sorted(found)


def _local(name: str) -> list[str]:
    path = Path(name).expanduser()
    if path.is_dir() and not is_store(Storage(), str(path)):
        # What is taken of a directory; a file that is named itself may have any name.
        return [str(child) for child in path.iterdir() if child.name.endswith(ARRAY_SUFFIXES)]
    if path.exists() or MAGIC.isdisjoint(name):
        return [str(path)] if path.exists() else []
    return local_glob(name)


def format_of(path: str, storage: Storage) -> str:
    """Find the format of a file by its first bytes.

    Raises:
        SourceError: If it is none that is known.
    """
    is_directory = path.rstrip("/").endswith(".zarr") if "://" in path else Path(path).is_dir()
    if is_directory:
        if is_store(storage, path):
            return "zarr"
        raise SourceError(
            f"{path}: the directory holds neither zarr.json nor .zgroup nor .zarray, expected a "
            "Zarr store or a file; name the store itself"
        )
    with storage.open(path) as file:
        first = file.read_at(0, 8)
        for begin, name in FIRST_BYTES.items():
            if first.startswith(begin):
                return name
        for start in USER_BLOCKS:
            if file.read_at(start, 4) == b"\x89HDF":
                return "hdf5"
    raise SourceError(
        f"{path}: begins with {first!r}, expected a file of HDF5, NetCDF, .npz or .npy, or a Zarr "
        "store; check that it is whole, or convert it to one of these"
    )
