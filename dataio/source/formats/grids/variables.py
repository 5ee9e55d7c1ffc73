"""What an array file holds, and what reads one: the idea that all formats share."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dataio.rows.tiles import Box
from dataio.source.storage.files import Storage

UNIT_KEYS = ("scale_factor", "add_offset", "units")
NOT_PACKED = ("", "1", "1.0", "0", "0.0")
CONTIGUOUS_BYTES = 1 << 20
"""Rows of an array that is stored in one piece are read together up to this many bytes."""


class Variable(NamedTuple):
    """An array of a file.

    Attributes:
        dims: The name of each dimension; "" where the file gives none.
        shape: The length of each dimension.
        dtype: As NumPy writes it, such as "<f4"; "|O" for values of different lengths.
        chunks: The shape of the regions that are stored in one piece each, and read as a whole.
        unit: How its numbers are packed or times are counted, where that may differ from file to
            file, such as "scale_factor 0.1"; "" for neither.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    unit: str = ""

    @classmethod
    def of(
        cls, dims: tuple[str, ...], shape: tuple[int, ...], dtype: np.dtype[np.generic],
        chunks: tuple[int, ...] | None, attributes: Mapping[str, object],
    ) -> "Variable":  # fmt: skip
        """Describe an array, in one piece without chunks, and its unit by NetCDF's attributes."""
        unit: list[str] = []
        for key in UNIT_KEYS:
            value = (*np.asarray(attributes.get(key, "")).ravel().tolist(), "")[0]
            text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
            if " since " in text if key == "units" else text not in NOT_PACKED:
                unit.append(f"{key} {text}")
        unit += [dtype.str[1:]] if dtype.kind in "mM" else []
        chunks = chunks or contiguous_chunks(shape, dtype.itemsize)
        return cls(dims, shape, "|O" if dtype.kind == "T" else dtype.str, chunks, ", ".join(unit))

    @property
    def num_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)


class OpenFile(Protocol):
    """The arrays of one open file, by name. One thread uses it."""

    @property
    def variables(self) -> Mapping[str, Variable]: ...

    def read(self, name: str, box: Box) -> NDArray[np.generic]:
        """Read a region of an array, of the shape of the region."""
        ...


class Format(Protocol):
    """Opens the files of one format."""

    def opened(self, storage: Storage, path: str) -> AbstractContextManager[OpenFile]:
        """Open a file for as long as the context lasts.

        Raises:
            SourceError: If it is not of this format, or damaged, or its library is not installed.
        """
        ...

    def version(self, storage: Storage, path: str) -> list[int | str]:
        """Describe the file so that the description changes when the file does."""
        ...


@dataclass(frozen=True)
class PlainFormat:
    """What the formats share whose data are one file each."""

    def version(self, storage: Storage, path: str) -> list[int | str]:
        """Return length in bytes and time of change."""
        return list(storage.stat(path))


def contiguous_chunks(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Choose what to read together of an array that is stored row after row in one piece.

    Returns:
        Whole rows of the first dimension, as many as 1 MiB holds; if not even one fits, one index
        of the first dimension and of the second what fits, and so on.
    """
    chunks = [1] * len(shape)
    for at in reversed(range(len(shape))):
        row_bytes = itemsize * prod(shape[at + 1 :])
        chunks[at] = max(min(shape[at], CONTIGUOUS_BYTES // max(row_bytes, 1)), 1)
        if chunks[at] < shape[at]:
            break
    return tuple(chunks)
