"""Arrays that lie in a file as they lie in memory: regions of them, by ranges of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.rows.tiles import Box
from dataio.source.storage.files import StorageFile

SPAN_BYTES = 1 << 20
"""A span up to this long is read whole, unless what is wanted of it lies far apart."""
MAX_GAP_BYTES = 64 << 10
"""Unwanted bytes that are cheaper to read than to make a request around."""


@dataclass(frozen=True)
class RawArray:
    """An array that is stored row after row.

    Attributes:
        file: Where it lies.
        start: Its first byte.
        shape: The length of each dimension.
        dtype: Of its numbers.
        row_bytes: From one index of the first dimension to the next, where other data lie between
            them; 0: nothing does.
    """

    file: StorageFile
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    row_bytes: int = 0

    def read(self, box: Box) -> NDArray[np.generic]:
        """Read a region.

        Raises:
            SourceError: If the file ends before it.
        """
        out = np.empty([part.stop - part.start for part in box], self.dtype)
        if not out.size:
            return out
        if not self.row_bytes:
            self._read(self.start, self.shape, box, out)
            return out
        wanted = out[0].nbytes
        if (out.shape[0] - 1) * self.row_bytes + wanted <= SPAN_BYTES and not any(
            part.start or part.stop < length
            for part, length in zip(box[1:], self.shape[1:], strict=True)
        ):
            first = self.start + box[0].start * self.row_bytes
            data = self._bytes(first, (out.shape[0] - 1) * self.row_bytes + wanted)
            strides = (self.row_bytes, *out.strides[1:])
            out[...] = np.ndarray(out.shape, self.dtype, data, strides=strides)
            return out
        for i in range(out.shape[0]):
            at = self.start + (box[0].start + i) * self.row_bytes
            self._read(at, self.shape[1:], box[1:], out[i : i + 1].reshape(out.shape[1:]))
        return out

    def _read(self, start: int, shape: Sequence[int], box: Box, out: NDArray[np.generic]) -> None:
        if not box:
            out[...] = np.frombuffer(self._bytes(start, self.dtype.itemsize), self.dtype)[0]
            return
        stride = self.dtype.itemsize * prod(shape[1:])
        first, num_rows = start + box[0].start * stride, box[0].stop - box[0].start
        if _is_one_span(shape, box, self.dtype.itemsize):
            data = np.frombuffer(self._bytes(first, num_rows * stride), self.dtype)
            out[...] = data.reshape(num_rows, *shape[1:])[(slice(None), *box[1:])]
            return
        for i in range(num_rows):
            self._read(first + i * stride, shape[1:], box[1:], out[i])

    def _bytes(self, start: int, length: int) -> bytes:
        data = self.file.read_at(start, length)
        if len(data) < length:
            raise SourceError(
                f"{self.file.path}: ends at byte {self.file.size}, expected an array up to byte "
                f"{start + length}; the file is truncated: copy or write it again"
            )
        return data


def span_bytes(shape: Sequence[int], box: Box, itemsize: int) -> int:
    """Count the bytes that are read for a region of an array without other data between rows."""
    if not box:
        return itemsize
    inner = prod(shape[1:]) * itemsize
    if not _is_one_span(shape, box, itemsize):
        inner = span_bytes(shape[1:], box[1:], itemsize)
    return int(box[0].stop - box[0].start) * inner


def _is_one_span(shape: Sequence[int], box: Box, itemsize: int) -> bool:
    """Whether a region is read together with all that lies between its first and last row."""
    counts = [int(part.stop - part.start) for part in box]
    strides = [itemsize * prod(shape[at + 1 :]) for at in range(len(shape))]
    # Of one row, from the first wanted byte up to the last
    extent = itemsize + sum((n - 1) * by for n, by in zip(counts[1:], strides[1:], strict=True))
    small = max(SPAN_BYTES, 2 * itemsize * prod(counts))
    return strides[0] - extent <= MAX_GAP_BYTES and counts[0] * strides[0] <= small
