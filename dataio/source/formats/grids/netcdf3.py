"""Classic NetCDF files: their header is read here, their data by ranges.

The format: "The NetCDF Classic Format Specification", Unidata; versions 1 (classic), 2 (64-bit
offsets) and 5 (64-bit data).
"""

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.tiles import Box
from dataio.source.formats.grids.variables import PlainFormat, Variable
from dataio.source.formats.raw import RawArray
from dataio.source.storage.file_object import PagedFileObject
from dataio.source.storage.files import Storage, StorageFile

DTYPES = {
    1: ">i1", 2: "|S1", 3: ">i2", 4: ">i4", 5: ">f4", 6: ">f8",
    7: ">u1", 8: ">u2", 9: ">u4", 10: ">i8", 11: ">u8",
}  # fmt: skip
"""By the number of the type in the file."""
ANOTHER, SEARCHED_BYTES = re.compile(rb"\0*CDF[\1\2\5]"), 64 << 10
"""What files that were joined begin with, and how far behind the end it is looked for."""
DIMENSIONS, VARIABLES, ATTRIBUTES = 10, 11, 12


@dataclass(frozen=True)
class NetCdf3Format(PlainFormat):
    """Dimensions and variables have the names that the file gives."""

    @contextmanager
    def opened(self, storage: Storage, path: str) -> Iterator["NetCdf3File"]:
        with storage.open(path) as file:
            try:
                found = _NetCdfHeader(PagedFileObject(file))
                if ANOTHER.match(file.read_at(found.end, SEARCHED_BYTES)):
                    raise struct.error(f"another file begins behind its end at byte {found.end}")
            except (struct.error, KeyError, UnicodeDecodeError, IndexError) as error:
                raise SourceError(
                    f"{path}: its header cannot be read ({error}), expected a classic NetCDF file; "
                    "it is truncated or damaged: copy or write it again"
                ) from error
            yield NetCdf3File(file, found)


class NetCdf3File:
    """An open file."""

    def __init__(self, file: StorageFile, header: "_NetCdfHeader") -> None:
        self._arrays = {
            name: RawArray(
                file, v.begin, v.shape, v.dtype, header.record_bytes if v.is_record else 0
            )
            for name, v in header.variables.items()
        }
        self._header = header

    @property
    def variables(self) -> Mapping[str, Variable]:
        return {
            name: Variable.of(v.dims, v.shape, v.dtype, None, v.attributes)
            for name, v in self._header.variables.items()
        }

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        return self._arrays[name].read(box)


class _Stored(NamedTuple):
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    begin: int
    is_record: bool
    num_bytes: int
    """Of one record, or of all."""
    attributes: Mapping[str, object]


class _NetCdfHeader:
    """What the file holds, and where.

    Attributes:
        variables: By name.
        record_bytes: From one index of the record dimension to the next.
    """

    def __init__(self, file: PagedFileObject) -> None:
        self._file = file
        version = self._take(4)[3]
        self._size = ">q" if version == 5 else ">i"
        self._offset = ">i" if version == 1 else ">q"
        num_records = max(self._number(self._size), 0)
        dims = [(self._name(), self._number(self._size)) for _ in self._list(DIMENSIONS)]
        self._attributes()
        self.variables: dict[str, _Stored] = {}
        for _ in self._list(VARIABLES):
            name = self._name()
            own = [dims[self._number(self._size)] for _ in range(self._number(self._size))]
            attributes = self._attributes()
            dtype = np.dtype(DTYPES[self._number(">i")])
            # Its own count of bytes does not fit where variables are large.
            self._number(self._size)
            begin = self._number(self._offset)
            is_record = bool(own) and own[0][1] == 0
            inner = tuple(length for _, length in own[is_record:])
            shape = (num_records, *inner) if is_record else inner
            names = tuple(name for name, _ in own)
            num_bytes = dtype.itemsize * prod(inner)
            self.variables[name] = _Stored(
                names, shape, dtype, begin, is_record, num_bytes, attributes
            )
        records = [v.num_bytes for v in self.variables.values() if v.is_record]
        # A record variable that is alone is not padded.
        padded = records if len(records) == 1 else [-(-length // 4) * 4 for length in records]
        self.record_bytes = sum(padded)

    @property
    def end(self) -> int:
        """Behind the last byte of all variables, padded to 4."""
        ends = [
            v.begin + v.num_bytes + (self.record_bytes * (v.shape[0] - 1) if v.is_record else 0)
            for v in self.variables.values()
        ]
        return -(-max(ends, default=0) // 4) * 4

    def _attributes(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for _ in self._list(ATTRIBUTES):
            name, dtype = self._name(), np.dtype(DTYPES[self._number(">i")])
            num_bytes = dtype.itemsize * self._number(self._size)
            data = self._take(-(-num_bytes // 4) * 4)[:num_bytes]
            found[name] = data if dtype.kind == "S" else np.frombuffer(data, dtype)
        return found

    def _list(self, tag: int) -> range:
        found, length = self._number(">i"), self._number(self._size)
        if found not in (0, tag):
            raise struct.error(f"found the tag {found}, expected {tag}")
        return range(length)

    def _name(self) -> str:
        length = self._number(self._size)
        return self._take(-(-length // 4) * 4)[:length].decode()

    def _number(self, form: str) -> int:
        (number,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(number)

    def _take(self, length: int) -> bytes:
        data = self._file.read(length)
        if data is None or len(data) < length:
            raise struct.error("it ends in its header")
        return data
