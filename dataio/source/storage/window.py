"""A forward view of a file through large sequential reads."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

READ_BYTES = 8 << 20
IN_ORDER_BYTES = 4 << 20
"""Where all before is read in any case, a part is not to cost much behind its end."""
SKIP_BYTES = 1 << 20
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

    @property
    def request_bytes(self) -> int:
        """How many bytes take as long to read as a request takes: fewer are not passed over."""
        ...

    @property
    def most_bytes(self) -> int:
        """How many bytes a single value may have: of what is compressed, a limit on its memory."""
        ...

    def view_at(self, offset: int, length: int) -> memoryview:
        """Read, fewer bytes only at the end of the file; the view stays what it is."""
        ...


class ReadFile(File, Protocol):
    """A file whose bytes can be had as such."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Read, fewer bytes only at the end of the file."""
        ...


class FileWindow:
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
        self.piece_bytes = IN_ORDER_BYTES if file.in_order else READ_BYTES
        self._extents = np.array([[0, file.size]]) if extents is None else extents
        self._start = 0
        self._before = self._data = memoryview(b"")

    def pace(self, piece_bytes: int) -> None:
        """Choose how much to read at once; no matter where a file is read in order alone."""
        self.piece_bytes = IN_ORDER_BYTES if self.file.in_order else piece_bytes

    def skip_piece_bytes(self, member_bytes: int) -> int:
        """Choose how much to read at the next header while skipping members of about this size."""
        return SKIP_BYTES if member_bytes < self.file.request_bytes else HEADER_BYTES

    def rest(self, offset: int, *, least: int = 1) -> memoryview:
        """View what is held from ``offset`` on; a piece is read if less than ``least`` is."""
        if sum(map(len, self._held(offset))) < least:
            self._fill(offset, 0)
        held = self._held(offset)
        return held[0] if len(held) == 1 else _joined(held)

    def view(self, offset: int, length: int) -> memoryview:
        """View bytes [offset, offset + length), fewer only at the end of the file."""
        start = offset - self._start
        if start >= 0 and start + length <= len(self._data):
            return self._data[start : start + length]
        if sum(map(len, self._held(offset))) < length:
            self._fill(offset, length)
        first, *second = self._held(offset) or [self._data]
        # Only what straddles two pieces is copied.
        rest = length - len(first)
        return _joined([first, second[0][:rest]]) if second and rest > 0 else first[:length]

    def _held(self, offset: int) -> list[memoryview]:
        """The bytes from ``offset`` on, of the piece before and the last, that are not empty."""
        start = offset - self._start
        before = (
            self._before[len(self._before) + start :] if -len(self._before) <= start < 0 else b""
        )
        if start < 0 and not before:
            return []
        return [part for part in (memoryview(before), self._data[max(start, 0) :]) if len(part)]

    def _fill(self, offset: int, length: int) -> None:
        held = self._held(offset)
        kept = memoryview(b"") if not held else held[0] if len(held) == 1 else _joined(held)
        extent = max(int(np.searchsorted(self._extents[:, 0], offset, side="right")) - 1, 0)
        start = offset + len(kept)
        stop = min(max(offset + length, start + self.piece_bytes), int(self._extents[extent, 1]))
        read = self.file.view_at(start, max(stop, offset + length) - start)
        self._before, self._data, self._start = kept, read, start


def _joined(parts: list[memoryview]) -> memoryview:
    return memoryview(b"".join(parts))


def merge_extents(extents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Join extents with small gaps between: int64[n, 2] in any order -> int64[m, 2], sorted."""
    extents = extents[np.argsort(extents[:, 0], kind="stable")]
    reach = np.maximum.accumulate(extents[:, 1])
    first = np.flatnonzero(np.append(True, extents[1:, 0] - reach[:-1] > GAP_BYTES))
    last = np.append(first[1:], len(extents)) - 1
    return np.stack([extents[first, 0], reach[last]], axis=1)
