"""Where some samples of a tar shard begin, so that a part of it is read without what lies before.

Whoever counts the samples sees where they lie. Of that a sparse table is kept: the number of a
sample and the byte its first header begins at, 256 or so of a shard, but one a MiB of large ones.
What is read from a mark on is the same as from the beginning of the shard: no header before it has
a say.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dataio.source.base import Contents, Mark
from dataio.source.io.window import File, Window
from dataio.source.tar.headers import BLOCK
from dataio.source.tar.samples import Samples, walk_samples

MARK_BYTES, MOST_MARK_BYTES = 16 << 10, 1 << 20
"""Least and most between two marks."""
MARKS = 256
"""Of a shard, where these limits allow it."""
SKIPPED_BYTES = 1 << 20
"""What is not read around where it is less: a request costs as much."""
START: Mark = (0, 0)


def count_and_mark(file: File) -> Contents:
    """Count the samples of a shard by its headers, and mark some of them.

    Raises:
        SourceError: If it is no tar file, truncated, or a sample has two members of one extension.
    """
    num_samples = end = 0
    mark_bytes = max(MARK_BYTES, min(file.size // MARKS, MOST_MARK_BYTES))
    marks = [np.empty((0, 2), np.int64)]
    for samples in walk_samples(Window(file)):
        begins = _begins(samples, end)
        if not samples.under_global:
            # One of every stretch that any begins in, but the first, which has the shard's start.
            stretch = np.append(marks[-1][-1:, 1], begins) // mark_bytes
            new = np.flatnonzero(np.diff(stretch, prepend=0)[len(stretch) - len(begins) :] > 0)
            if len(new):
                marks.append(np.stack([samples.start + new, begins[new]], axis=1))
        num_samples, end = samples.stop, int(_ends(samples)[-1])
    return Contents([num_samples], np.concatenate(marks))


def cut_at_marks(
    numbers: NDArray[np.int64], marks: NDArray[np.int64]
) -> Iterator[tuple[Mark, NDArray[np.int64]]]:
    """Cut samples into runs, so that what lies between two runs need not be read.

    Args:
        numbers: int64[n]: Samples of a shard, sorted, n >= 1.
        marks: int64[num_marks, 2]: Of the shard, see `count_and_mark`.

    Yields:
        The last mark before a run, and its samples.
    """
    nearest = np.searchsorted(marks[:, 0], numbers, side="right") - 1
    # Where the shard and then each mark begins; behind the last mark nothing is skipped.
    begins = np.concatenate([[0], marks[:, 1], [0]])
    skipped = begins[nearest[1:] + 1] - begins[nearest[:-1] + 2]
    cuts = np.flatnonzero((np.diff(nearest) > 1) & (skipped >= SKIPPED_BYTES)) + 1
    for run, mark in zip(np.split(numbers, cuts), nearest[np.append(0, cuts)], strict=True):
        yield START if mark < 0 else (int(marks[mark, 0]), int(marks[mark, 1])), run


def _ends(samples: Samples) -> NDArray[np.int64]:
    """int64[num_members]: The first byte behind each member, where the next header may be."""
    members = samples.members
    return members.offset + (members.num_bytes + BLOCK - 1) // BLOCK * BLOCK


def _begins(samples: Samples, end: int) -> NDArray[np.int64]:
    """int64[num_samples]: The first byte that may say something about each sample.

    That is behind the last member of the one before, which ends at ``end`` for the first: long
    names and pax records stand before the header that they belong to.
    """
    begins = _ends(samples)[samples.first_members() - 1]
    begins[0] = end
    return begins
