"""Files of NumPy: ``.npz`` and ``.npy``."""

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.tiles import Box
from dataio.source.formats.grids.variables import PlainFormat, Variable
from dataio.source.formats.npy import HEADER_BYTES, read_header
from dataio.source.formats.raw import RawArray
from dataio.source.storage.file_object import PagedFileObject
from dataio.source.storage.files import Storage, StorageFile

ONE_ARRAY = "arr_0"
"""The key of the array of an ``.npy``; `numpy.savez` names an array so that it is given alone."""
LOCAL_HEADER_BYTES = 30
END_MAGIC, END_BYTES = b"PK\5\6", 22
"""What an archive ends with, but for its comment."""


@dataclass(frozen=True)
class NpyFormat(PlainFormat):
    """One array, "arr_0"."""

    @contextmanager
    def opened(self, storage: Storage, path: str) -> Iterator["NumpyFile"]:
        with storage.open(path) as file:
            head = file.read_at(0, HEADER_BYTES)
            yield NumpyFile({ONE_ARRAY: _raw(file, path, head, 0, file.size)})


@dataclass(frozen=True)
class NpzFormat(PlainFormat):
    """Arrays by their names; those that are compressed are read whole."""

    @contextmanager
    def opened(self, storage: Storage, path: str) -> Iterator["NumpyFile"]:
        with storage.open(path) as file:
            with _explained(path):
                archive = zipfile.ZipFile(PagedFileObject(file))
                _check_whole(file, archive)
                found = NumpyFile(
                    {
                        member.filename.removesuffix(".npy"): _member(file, archive, member)
                        for member in archive.infolist()
                        if member.filename.endswith(".npy")
                    }
                )
            with archive:
                yield found


def _check_whole(file: StorageFile, archive: zipfile.ZipFile) -> None:
    """Refuse an archive that bytes were joined to, or that has two members of one name.

    Raises:
        zipfile.BadZipFile: If it is one.
    """
    members = archive.infolist()
    end = file.size - len(archive.comment) - END_BYTES
    if file.read_at(end, len(END_MAGIC)) != END_MAGIC:
        raise zipfile.BadZipFile(f"other bytes behind its directory, at byte {end} or before")
    if members and (first := min(member.header_offset for member in members)):
        raise zipfile.BadZipFile(f"other bytes before its first member, at byte {first}")
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise zipfile.BadZipFile(f"two members of the name {twice!r}")


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Name the file where unpacking fails; errors of the storage stay as they are."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise SourceError(
            f"{path}: cannot be read as an .npz ({error}), expected what numpy.savez writes; it is "
            "truncated or damaged: copy or write it again"
        ) from error


class NumpyFile:
    """The arrays of an open file."""

    def __init__(self, arrays: Mapping[str, "RawArray | PackedArray"]) -> None:
        self._arrays = arrays
        self.variables = {name: _variable(array) for name, array in arrays.items()}

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        return self._arrays[name].read(box)


class PackedArray:
    """A compressed member: it is unpacked from its beginning to its end, once while it is open."""

    def __init__(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str) -> None:
        self._archive, self._member, self._path = archive, member, path
        self._where = f"{path}: {member.filename}"
        self._values: NDArray[np.generic] | None = None
        with archive.open(member) as file:
            head = file.read(HEADER_BYTES)
        self.shape, self.dtype, self._start = read_header(self._where, head, member.file_size)

    def read(self, box: Box) -> NDArray[np.generic]:
        """Cut out a region."""
        if self._values is None:
            with _explained(self._path):
                data = self._archive.read(self._member)
            values = np.frombuffer(data, self.dtype, offset=self._start)
            self._values = values[: int(np.prod(self.shape))].reshape(self.shape)
        return np.asarray(self._values[box])


def _member(
    file: StorageFile, archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> "RawArray | PackedArray":
    if member.compress_type != zipfile.ZIP_STORED:
        return PackedArray(archive, member, file.path)
    local = file.read_at(member.header_offset, LOCAL_HEADER_BYTES)
    names_bytes = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    start = member.header_offset + LOCAL_HEADER_BYTES + names_bytes
    head = file.read_at(start, min(HEADER_BYTES, member.file_size))
    return _raw(file, f"{file.path}: {member.filename}", head, start, member.file_size)


def _raw(file: StorageFile, where: str, head: bytes, start: int, length: int) -> RawArray:
    shape, dtype, header_bytes = read_header(where, head, length)
    return RawArray(file, start + header_bytes, shape, dtype)


def _variable(array: "RawArray | PackedArray") -> Variable:
    chunks = array.shape if isinstance(array, PackedArray) else None
    return Variable.of(("",) * len(array.shape), array.shape, array.dtype, chunks, {})
