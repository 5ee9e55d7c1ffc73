"""Rows of an array in an ``.npy`` file."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from tokenize import TokenError
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.encoding import NPY_LOCK
from dataio.rows.tiles import Box
from dataio.source.formats.raw import MAX_GAP_BYTES, RawArray, span_bytes
from dataio.source.storage.files import Storage

HEADER_BYTES = 4096


class ReadRows(Protocol):
    """Reads a part of rows by number: int64[n], sorted -> dtype[n, ...]."""

    def __call__(self, numbers: NDArray[np.int64], /) -> NDArray[np.generic]: ...


class NpyFile:
    """An ``.npy`` file, read by ranges, never whole.

    Args:
        path: A path or URL.
        storage: Reads and counts.

    Raises:
        SourceError: If it is none, holds objects, or is shorter or longer than its array.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self._path = path = storage.name(path)
        self._storage = storage
        with storage.open(path) as file:
            head = file.read_at(0, HEADER_BYTES)
            self.shape, self.dtype, self._start = read_header(path, head, file.size)
            if not self.shape:
                found = f"{file.size} bytes for the shape []"
                raise _refused(path, found, "one row a sample, all of them there")
            self._marks = f"{file.size} {file.mtime_ns} {self.dtype.str} {self.shape}"
            self._row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])

    def fingerprint(self) -> str:
        """Hash size, time of change, and the first and last bytes."""
        with self._storage.open(self._path) as file:
            ends = file.read_at(0, HEADER_BYTES)
            ends += file.read_at(max(file.size - HEADER_BYTES, 0), HEADER_BYTES)
        return xxhash.xxh3_64_hexdigest(self._marks.encode() + ends)

    @contextmanager
    def opened(self, box: Box) -> Iterator[ReadRows]:
        """Offer a part of the rows for reading, as long as the file is open."""
        with self._storage.open(self._path) as file:
            array = RawArray(file, self._start, self.shape, self.dtype)
            yield lambda numbers: self._rows(array, numbers, box)

    def part_bytes(self, box: Box) -> int:
        """Count the bytes of a row that are read for a part of it."""
        return span_bytes(self.shape[1:], box, self.dtype.itemsize) if box else self._row_bytes

    def _rows(self, array: RawArray, numbers: NDArray[np.int64], box: Box) -> NDArray[np.generic]:
        out = np.empty((len(numbers), *(part.stop - part.start for part in box)), self.dtype)
        gap = max(MAX_GAP_BYTES // max(self._row_bytes, 1), 1)
        for part in np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(numbers) > gap) + 1):
            low, high = int(numbers[part[0]]), int(numbers[part[-1]]) + 1
            out[part] = array.read((slice(low, high), *box))[numbers[part] - low]
        return out


def read_header(
    where: str, data: bytes, num_bytes: int
) -> tuple[tuple[int, ...], np.dtype[np.generic], int]:
    """Find shape, dtype and where the data begins.

    Args:
        where: The file, for the message.
        data: Its first `HEADER_BYTES`, fewer if it is shorter.
        num_bytes: Length of the file.

    Raises:
        SourceError: If it is no ``.npy``, holds objects, or is shorter or longer than its array.
    """
    head = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(head)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        with NPY_LOCK:
            shape, in_columns, dtype = read(head)
    except (ValueError, EOFError, SyntaxError, TokenError, RecursionError) as error:
        raise _refused(where, f"no header of an .npy ({error})", "an .npy file") from error
    if dtype.hasobject or dtype.itemsize == 0:
        raise _refused(where, f"the dtype {dtype}", "numbers or bytes; objects are never unpickled")
    if in_columns and len(shape) > 1:
        raise _refused(where, "columns one by one", "rows; write np.ascontiguousarray of it")
    start = head.tell()
    expected = start + dtype.itemsize * math.prod(shape)
    if num_bytes != expected or min(shape, default=0) < 0:
        found = f"{num_bytes} bytes for the shape {list(shape)} of {dtype}"
        raise _refused(where, found, f"{expected}, one array, all of it there and no other behind")
    return shape, dtype, start


def _refused(where: str, found: str, expected: str) -> SourceError:
    return SourceError(
        f"{where}: found {found}, expected {expected}; check the path, or save the array again "
        "with numpy.save"
    )
