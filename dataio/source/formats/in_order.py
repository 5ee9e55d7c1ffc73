"""Samples that lie one behind the other, without an index.

A shard is counted once, seek points are found on the way, and it is read from the point before.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataio.source.base import SampleCounts, SeekPoint, Shard
from dataio.source.formats.records import disagree
from dataio.source.formats.seek_points import START, cut_at_seek_points, point_behind, spacing_bytes
from dataio.source.storage.window import File


class Steps(Protocol):
    """Steps over samples in [the seek point's byte, stop), which hold every byte between.

    Yields each one's own seek point, and its bytes; these are optional unless ``reads_all``.
    """

    def __call__(
        self, file: File, start: SeekPoint, stop: int, *, reads_all: bool
    ) -> Iterator[tuple[SeekPoint, memoryview]]: ...


class InOrder:
    """A `Walk` from sample to sample.

    Args:
        file: The shard, or what it decompresses to.
        shard: What it is to hold; None where nobody counted it.
        steps: Finds the samples.
    """

    def __init__(self, file: File, shard: Shard | None, *, steps: Steps) -> None:
        self._file, self._shard, self._steps = file, shard, steps

    def count(self) -> SampleCounts:
        """Count the samples up to the last byte of the shard, and choose seek points.

        Raises:
            SourceError: If anything in it is no sample.
        """
        file, spacing = self._file, spacing_bytes(self._file.size)
        points: list[SeekPoint] = []
        due, num_samples = spacing, 0
        for (_, begin), _ in self._steps(file, START, file.size, reads_all=False):
            if begin >= due:
                points.append((num_samples, begin))
                due = begin + spacing
            num_samples += 1
        # Nobody can seek in what a compressed shard holds.
        points = [] if file.in_order else points
        return SampleCounts([num_samples], np.array(points, np.int64).reshape(-1, 2))

    def find(self, numbers: NDArray[np.int64]) -> Iterator[tuple[SeekPoint, memoryview]]:
        """Find samples from the seek point before each run of them.

        Raises:
            SourceError: If one of them is not there.
        """
        assert self._shard is not None, "a shard is counted before it is read"
        points = self._shard.seek_points
        for start, run in cut_at_seek_points(numbers, points):
            # Nothing is read behind the first seek point that follows the run.
            behind = point_behind(points, int(run[-1]))
            wanted = iter(run.tolist())
            number = next(wanted)
            stop = self._file.size if behind is None else behind
            for point, data in self._steps(self._file, start, stop, reads_all=True):
                if point[0] < number:
                    continue
                yield point, data
                number = next(wanted, -1)
                if number < 0:
                    break
            else:
                raise disagree(self._shard, f"no sample {number}")
