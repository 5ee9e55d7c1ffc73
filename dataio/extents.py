"""Free space of a heap file, derived from what is live: no free list is ever stored."""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray


class FreeExtents:
    """The gaps between live extents of one heap file, handed out best fit first, then at the end.

    Args:
        offsets: int64[n]: Where live extents begin, in any order.
        lengths: int64[n]: Their bytes; extents may repeat but not overlap otherwise.
    """

    def __init__(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        live = lengths > 0
        order = np.argsort(offsets[live], kind="stable")
        starts, ends = offsets[live][order], (offsets + lengths)[live][order]
        # int64[n + 1]: a gap lies between the end of one extent and the start of the next
        gap_starts = np.concatenate([[0], ends])[:-1]
        gap_lengths = starts - gap_starts
        gaps = np.flatnonzero(gap_lengths > 0)
        self._gaps: list[tuple[int, int]] = sorted(
            zip(gap_lengths[gaps].tolist(), gap_starts[gaps].tolist(), strict=True)
        )
        self.end = int(ends.max(initial=0))

    def take(self, length: int) -> int:
        """Hand out ``length`` bytes and say where they begin."""
        if length == 0:
            return 0  # anywhere: nothing lies there, and the file may be cut behind what does
        place = bisect_left(self._gaps, (length, -1))
        if place == len(self._gaps):
            offset, self.end = self.end, self.end + length
            return offset
        gap, offset = self._gaps.pop(place)
        if gap > length:
            insort(self._gaps, (gap - length, offset + length))
        return offset
