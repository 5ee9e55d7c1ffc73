"""Free space of a pool's files, derived from what is live: no free list is ever stored."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.store.files.manifest import Column, Entries, blocks
from dataio.store.files.row_files import RowFiles


def find_free_positions(num_positions: int, used: Sequence[Column[np.int64]]) -> NDArray[np.int64]:
    """Find the positions that no manifest mentions, ascending.

    Time and a byte of memory for every position, unless a row's position is its slot.
    """
    if len(used) == 1 and used[0].is_slot():
        return np.arange(len(used[0]), num_positions, dtype=np.int64)
    free = np.ones(num_positions, np.bool_)
    for column in used:
        for part in blocks(len(column)):
            positions = column[part]
            free[positions[positions >= 0]] = False
    return np.flatnonzero(free)


def join_positions(free: NDArray[np.int64], more: NDArray[np.int64]) -> NDArray[np.int64]:
    """Add positions to those that are free: ascending, each once."""
    # A sort, because np.union1d hashes: for runs of numbers that took 50 times as long.
    joined = np.sort(np.concatenate([free, more]), kind="stable")
    is_new = np.diff(joined, prepend=joined[:1] - 1) != 0
    return joined[np.flatnonzero(is_new)]


def find_claimed(
    places: Entries, lengths: NDArray[np.int64], live: Sequence[Entries]
) -> NDArray[np.int64]:
    """Find the rows that could not be written without touching another sample's.

    Time for every live row.

    Args:
        places: Where the rows are to be written.
        lengths: int64[n, num_variable]: Of their variable fields, which may differ from what
            ``places`` say.
        live: All entries whose bytes must stay.

    Returns:
        int64[m]: Numbers of the rows.
    """
    ids, positions, heaps = places.sample_id[:], places.position[:], places.heap[:]
    starts = places.offset[:]
    ends = starts + lengths.sum(axis=1)
    claimed = np.zeros(len(places), np.bool_)
    for entries in live:
        for part in blocks(len(entries)):
            theirs, at = entries.sample_id[part], entries.position[part]
            heap, start = entries.heap[part], entries.offset[part]
            end = start + entries.lengths[part].sum(axis=1)
            for row in np.flatnonzero(~claimed).tolist():
                touched = at == positions[row]
                touched |= (heap == heaps[row]) & (start < ends[row]) & (starts[row] < end)
                claimed[row] = bool((touched & (theirs != ids[row]) & (theirs >= 0)).any())
    return np.flatnonzero(claimed)


def find_free_extents(used: Sequence[Entries], *, heap: int) -> "FreeExtents":
    """Find the gaps of one heap file. Sorts its extents only if there are gaps between them."""
    total = end = 0
    for offsets, lengths in _live_extents(used, heap):
        total += int(lengths.sum())
        end = max(end, int((offsets + lengths).max(initial=0)))
    if total == end:
        return FreeExtents(np.zeros(1, np.int64), np.array([end]))
    parts = zip(*_live_extents(used, heap), strict=True)
    offsets, lengths = (np.concatenate(part) for part in parts)
    return FreeExtents(offsets, lengths)


def _live_extents(
    used: Sequence[Entries], heap: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    for entries in used:
        for part in blocks(len(entries)):
            lengths = entries.lengths[part].sum(axis=1)
            mine = np.flatnonzero((entries.heap[part] == heap) & (lengths > 0))
            yield entries.offset[part][mine], lengths[mine]


class FreeExtents:
    """The gaps between live extents of one heap file, handed out best fit first, then at the end.

    Args:
        offsets: int64[n]: Where live extents begin, in any order.
        lengths: int64[n]: Their bytes; extents do not overlap.

    Attributes:
        end: Where what was handed out ends.
    """

    def __init__(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        live = lengths > 0
        offsets, ends = offsets[live], (offsets + lengths)[live]
        self.end = int(ends.max(initial=0))
        # By length, to fit; by both ends, to join what is given back.
        self._gaps: list[tuple[int, int]] = []
        self._stops: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        order = np.argsort(offsets, kind="stable")
        # int64[n]: a gap lies between the end of one extent and the start of the next
        gap_starts = np.concatenate([[0], ends[order]])[:-1]
        gap_stops = offsets[order]
        gaps = np.flatnonzero(gap_stops > gap_starts)
        for start, stop in zip(gap_starts[gaps].tolist(), gap_stops[gaps].tolist(), strict=True):
            self._stops[start], self._starts[stop] = stop, start
        self._gaps = sorted((stop - start, start) for start, stop in self._stops.items())

    def take(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Hand out extents of these bytes and say where each begins: int64[n]."""
        if not self._gaps:
            offsets = self.end + np.cumsum(lengths) - lengths
            self.end += int(lengths.sum())
            # Nothing lies there, and the file may be cut behind what does.
            return np.where(lengths > 0, offsets, 0)
        return np.array([self._take(length) for length in lengths.tolist()], np.int64)

    def _take(self, length: int) -> int:
        if length == 0:
            return 0
        place = bisect_left(self._gaps, (length, -1))
        if place == len(self._gaps):
            offset, self.end = self.end, self.end + length
            return offset
        gap, offset = self._gaps.pop(place)
        stop = self._stops.pop(offset)
        del self._starts[stop]
        if gap > length:
            self._add(offset + length, stop)
        return offset

    def give_back(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Take extents back that are live no more."""
        live = lengths > 0
        for start, stop in zip(
            offsets[live].tolist(), (offsets + lengths)[live].tolist(), strict=True
        ):
            if stop in self._stops:
                stop = self._removed(stop)[1]
            if start in self._starts:
                start = self._removed(self._starts[start])[0]
            if stop == self.end:
                self.end = start
            else:
                self._add(start, stop)

    def _add(self, start: int, stop: int) -> None:
        self._stops[start], self._starts[stop] = stop, start
        insort(self._gaps, (stop - start, start))

    def _removed(self, start: int) -> tuple[int, int]:
        stop = self._stops.pop(start)
        del self._starts[stop]
        del self._gaps[bisect_left(self._gaps, (stop - start, start))]
        return start, stop


class Space:
    """Free positions, the same on all local ranks, and the gaps of this local rank's heap.

    Both are derived from the manifests when they are first asked for, then kept up to date.

    Args:
        files: The cache's.
        local_rank: Whose heap.
        in_use: Names every manifest in use, as entries.
    """

    def __init__(
        self, files: RowFiles, *, local_rank: int, in_use: Callable[[], Sequence[Entries]]
    ) -> None:
        self._files = files
        self._local_rank = local_rank
        self._in_use = in_use
        self._positions: NDArray[np.int64] | None = None
        self._extents: FreeExtents | None = None

    @property
    def positions(self) -> NDArray[np.int64]:
        """int64[n]: Positions that no manifest in use mentions, ascending."""
        if self._positions is None:
            used = [entries.position for entries in self._in_use()]
            self._positions = find_free_positions(self._files.num_positions, used)
        return self._positions

    @property
    def extents(self) -> FreeExtents:
        """The gaps of this local rank's heap."""
        if self._extents is None:
            self._extents = find_free_extents(self._in_use(), heap=self._local_rank)
        return self._extents

    @property
    def heap_end(self) -> int | None:
        """Where live extents end; None where nobody has asked for any yet."""
        return None if self._extents is None else self._extents.end

    def forget(self) -> None:
        """Derive both anew: other manifests are in use."""
        self._positions = self._extents = None

    def forget_positions(self) -> None:
        """Derive the free positions anew."""
        self._positions = None

    def set_aside(self, num_positions: int) -> NDArray[np.int64]:
        """Take the first free positions for rows to be staged."""
        free = self.positions
        self._positions = free[num_positions:]
        return free[:num_positions]

    def take_positions(self, positions: NDArray[np.int64]) -> None:
        """Rows lie there from now on."""
        if self._positions is not None:
            self._positions = np.setdiff1d(self._positions, positions, assume_unique=True)

    def grow(self, before: int) -> None:
        """Positions from ``before`` on were added to the files."""
        if self._positions is not None:
            more = np.arange(before, self._files.num_positions)
            self._positions = np.concatenate([self._positions, more])

    def release(self, entries: Entries | None) -> None:
        """Give back the space of entries that no manifest in use mentions any more."""
        if entries is None:
            return
        if self._positions is not None:
            gone = entries.position[:]
            self._positions = join_positions(self._positions, gone[gone >= 0])
        mine = entries.heap[:] == self._local_rank
        self.give_back(entries.offset[:][mine], entries.extent_bytes[mine])

    def give_back(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Free extents of this local rank's heap."""
        if self._extents is not None:
            self._extents.give_back(offsets, lengths)
