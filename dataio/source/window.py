"""A forward view of a file through large sequential reads."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

READ_BYTES = 4 << 20
SMALL_MEMBER_BYTES = 64 << 10
HEADER_BYTES = 4096
"""Enough for a header and the small members that often stand beside a large one."""
MANY_BYTES = 64 << 10
"""From here on a piece has headers enough to search them together."""
GAP_BYTES = 64 << 10
"""Unwanted bytes that are cheaper to read than to make a request around."""


class File(Protocol):
    """What a window looks at."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int:
        """Length in bytes; more than any file has while it is not known."""
        ...

    @property
    def in_order(self) -> bool:
        """Whether what is passed over is read all the same."""
        ...

    def read_at(self, offset: int, length: int) -> bytes: ...


class Window:
    """Hands out slices of a file that is read forwards, each byte once.

    Slices stay valid when the window moves on.

    Args:
        file: The file.
        extents: int64[n, 2]: Sorted, disjoint [start, stop) outside of which nothing is read.

    Attributes:
        piece_bytes: How much to read at once.
    """

    def __init__(self, file: File, extents: NDArray[np.int64] | None = None) -> None:
        self.file = file
        self.piece_bytes = READ_BYTES
        self._extents = np.array([[0, file.size]]) if extents is None else extents
        self._start = 0
        self._data = memoryview(b"")

    def pace(self, piece_bytes: int) -> None:
        """Choose how much to read at once; no matter where a file is read in order alone."""
        self.piece_bytes = READ_BYTES if self.file.in_order else piece_bytes

    def rest(self, offset: int) -> memoryview:
        """View what is held from ``offset`` on; a piece is read if nothing is."""
        if not 0 <= offset - self._start < len(self._data):
            self._fill(offset, 0)
        return self._data[offset - self._start :]

    def view(self, offset: int, length: int) -> memoryview:
        """View bytes [offset, offset + length), fewer only at the end of the file."""
        start = offset - self._start
        if start < 0 or start + length > len(self._data):
            self._fill(offset, length)
            start = 0
        return self._data[start : start + length]

    def _fill(self, offset: int, length: int) -> None:
        kept = self._data[max(offset - self._start, 0) :] if offset >= self._start else b""
        extent = max(int(np.searchsorted(self._extents[:, 0], offset, side="right")) - 1, 0)
        start = offset + len(kept)
        stop = min(max(offset + length, start + self.piece_bytes), int(self._extents[extent, 1]))
        read = self.file.read_at(start, max(stop, offset + length) - start)
        self._data = memoryview(bytes(kept) + read if kept else read)
        self._start = offset


def skip_piece_bytes(member_bytes: int) -> int:
    """Choose how much to read at the next header while skipping members of about this size."""
    return READ_BYTES // 4 if member_bytes < SMALL_MEMBER_BYTES else HEADER_BYTES


def merge_extents(extents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Join extents with small gaps between: int64[n, 2] in any order -> int64[m, 2], sorted."""
    extents = extents[np.argsort(extents[:, 0], kind="stable")]
    reach = np.maximum.accumulate(extents[:, 1])
    first = np.flatnonzero(np.append(True, extents[1:, 0] - reach[:-1] > GAP_BYTES))
    last = np.append(first[1:], len(extents)) - 1
    return np.stack([extents[first, 0], reach[last]], axis=1)
