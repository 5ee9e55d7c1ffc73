"""Where some samples of a shard begin, so that a part of it is read without what lies before.

Whoever counts the samples sees where they lie. Of that a sparse index is kept: the number of a
sample and its first byte, 256 or so of a shard, but one a MiB of large ones. Seek points may come
from an index that somebody wrote. So whoever reads from one to the next sees that as many samples
lie between as they say: any readers who together read all find what is wrong.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dataio.source.base import SeekPoint

SPACING_BYTES, MOST_SPACING_BYTES = 16 << 10, 1 << 20
"""Least and most between two seek points."""
NUM_SEEK_POINTS = 256
"""Of a shard, where these limits allow it."""
SKIPPED_BYTES = 1 << 20
"""What is not read around where it is less: a request costs as much."""
START: SeekPoint = (0, 0)


def spacing_bytes(num_bytes: int) -> int:
    """Choose how far apart the seek points of a shard of some bytes are."""
    return max(SPACING_BYTES, min(num_bytes // NUM_SEEK_POINTS, MOST_SPACING_BYTES))


def cut_at_seek_points(
    numbers: NDArray[np.int64], points: NDArray[np.int64]
) -> Iterator[tuple[SeekPoint, NDArray[np.int64]]]:
    """Cut samples into runs, so that what lies between two runs need not be read.

    Args:
        numbers: int64[n]: Samples of a shard, sorted, n >= 1.
        points: int64[num_points, 2]: Seek points of the shard.

    Yields:
        The last seek point before a run, and its samples.
    """
    nearest = np.searchsorted(points[:, 0], numbers, side="right") - 1
    # Where the shard and then each seek point begins; behind the last nothing is skipped.
    begins = np.concatenate([[0], points[:, 1], [0]])
    skipped = begins[nearest[1:] + 1] - begins[nearest[:-1] + 2]
    cuts = np.flatnonzero((np.diff(nearest) > 1) & (skipped >= SKIPPED_BYTES)) + 1
    for run, point in zip(np.split(numbers, cuts), nearest[np.append(0, cuts)], strict=True):
        yield START if point < 0 else (int(points[point, 0]), int(points[point, 1])), run


def point_behind(points: NDArray[np.int64], number: int) -> int | None:
    """Find the byte of the first seek point behind a sample; None where there is none."""
    at = int(np.searchsorted(points[:, 0], number, side="right"))
    return int(points[at, 1]) if at < len(points) else None
