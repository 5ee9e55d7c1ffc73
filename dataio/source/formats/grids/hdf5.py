"""HDF5 files, and NetCDF-4, which is HDF5, by h5py."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError, install_command
from dataio.rows.tiles import Box
from dataio.source.formats.grids.variables import PlainFormat, Variable
from dataio.source.formats.raw import RawArray
from dataio.source.storage.file_object import PagedFileObject
from dataio.source.storage.files import Storage, StorageFile

if TYPE_CHECKING:
    import h5py

CACHE_BYTES = 32 << 20
"""Of decoded chunks: where a region ends inside one, the next region finds it here."""
SEARCHED_BYTES = 64 << 10
SIGNATURE, SUPERBLOCK_BYTES = b"\x89HDF\r\n\x1a\n", 56
END_AT = {0: 40, 1: 44, 2: 28, 3: 28}
"""Where the address of a file's end stands, by the version of its superblock."""
ONLY_A_DIMENSION = b"This is a netCDF dimension but not a netCDF variable"


@dataclass(frozen=True)
class Hdf5Format(PlainFormat):
    """Variables are named by their path in the file, such as "group/temperature"."""

    @contextmanager
    def opened(self, storage: Storage, path: str) -> Iterator["Hdf5File"]:
        """Open a file; nothing of it stays open behind the context."""
        library = _h5py(path)
        with storage.open(path) as file:
            with _explained(path):
                opened = library.File(PagedFileObject(file), "r", rdcc_nbytes=CACHE_BYTES)
            with opened:
                with _explained(path):
                    _check_alone(file, opened.userblock_size)
                    found = Hdf5File(opened, file, library)
                yield found


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Name the file where h5py fails; errors of the storage stay as they are."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise SourceError(
            f"{path}: h5py cannot read it ({error}), expected a whole HDF5 or NetCDF-4 file; it is "
            "truncated, damaged or still being written: copy or write it again"
        ) from error


def _check_alone(file: StorageFile, start: int) -> None:
    """Refuse a file that others were joined to: of them nothing would be read.

    Raises:
        OSError: If another begins where it ends.
    """
    head = file.read_at(start, SUPERBLOCK_BYTES)
    # Where its end stands depends on the version of the superblock.
    at = END_AT.get(head[8], 0)
    end = int.from_bytes(head[at : at + 8], "little")
    behind = file.read_at(end, SEARCHED_BYTES) if at else b""
    if (begin := behind.find(SIGNATURE)) >= 0:
        raise OSError(f"another HDF5 file begins at byte {end + begin}, behind the end of this one")


class Hdf5File:
    """An open file."""

    def __init__(self, opened: "h5py.File", file: StorageFile, library: Any) -> None:
        self._library, self._file = library, file
        self._datasets: dict[str, h5py.Dataset] = {}
        opened.visititems(self._visit)
        self.variables: Mapping[str, Variable] = {
            name: self._variable(dataset) for name, dataset in self._datasets.items()
        }

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """Read a region; what is stored in one piece without a filter is read past h5py."""
        dataset = self._datasets[name]
        if dataset.is_virtual or dataset.external:
            raise SourceError(
                f"{self._file.path}: the dataset {name!r} lies in other files, expected its data "
                "in this one; name those files as the source"
            )
        start = None if dataset.chunks or dataset.compression else dataset.id.get_offset()
        if start is not None and dataset.dtype.kind in "iuf" and self._is_plain(dataset):
            return RawArray(self._file, start, dataset.shape, dataset.dtype).read(box)
        with _explained(self._file.path):
            values = np.asarray(dataset[box])
        if self._library.check_vlen_dtype(dataset.dtype) == np.uint8:
            # Bytes of any length, such as a compressed image.
            whole = np.empty(values.shape, object)
            for place, value in np.ndenumerate(values):
                whole[place] = value.tobytes()
            return whole
        if values.dtype == object and self._library.check_string_dtype(dataset.dtype):
            for place, value in np.ndenumerate(values):
                values[place] = _text(value)
        return values

    def _is_plain(self, dataset: "h5py.Dataset") -> bool:
        """Whether the numbers lie in the file as NumPy has them."""
        return bool(dataset.id.get_type() == self._library.h5t.py_create(dataset.dtype))

    def _visit(self, name: str, found: object) -> None:
        if isinstance(found, self._library.Dataset) and found.shape is not None:
            title = found.attrs.get("NAME", b"") if found.is_scale else b""
            if not (isinstance(title, bytes) and title.startswith(ONLY_A_DIMENSION)):
                self._datasets[name] = found

    def _variable(self, found: "h5py.Dataset") -> Variable:
        return Variable.of(_dims(found), found.shape, found.dtype, found.chunks, found.attrs)


def _dims(dataset: "h5py.Dataset") -> tuple[str, ...]:
    """Name dimensions by the scales that are attached to them, else by their labels."""
    if dataset.is_scale and dataset.ndim == 1:
        return (_last(dataset.name),)
    return tuple(_last(dim[0].name) if len(dim) else str(dim.label) for dim in dataset.dims)


def _text(value: bytes) -> str | bytes:
    """Text as such, so that no field takes its letters for numbers; as bytes if it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _h5py(path: str) -> Any:
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise SourceError(
            f"{path}: is an HDF5 or NetCDF-4 file, and h5py, which reads it, is not installed; run "
            f"`{install_command('hdf5')}` on every node"
        ) from error
    return h5py
