"""Shards without an index: counted once, marked on the way, and read from the mark before."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from dataio.source.base import Contents, Mark, Shard
from dataio.source.io.window import File
from dataio.source.records.samples import disagree
from dataio.source.tar.marks import MARK_BYTES, MARKS, MOST_MARK_BYTES, cut_at_marks

Walk = Callable[[File, Mark, int], Iterator[tuple[Mark, memoryview]]]
"""Walks samples in [the mark's byte, stop): each one's own mark, and its bytes."""


def count_and_mark(begins: Iterable[int], num_bytes: int) -> Contents:
    """Count samples and mark some of them, 256 or so.

    Args:
        begins: The first byte of each sample, ascending.
        num_bytes: Size of the shard. What a compressed one holds cannot be read from a mark on.
    """
    spacing = max(MARK_BYTES, min(num_bytes // MARKS, MOST_MARK_BYTES))
    marks: list[Mark] = []
    due, num_samples = spacing, 0
    for begin in begins:
        if begin >= due:
            marks.append((num_samples, begin))
            due = begin + spacing
        num_samples += 1
    return Contents([num_samples], np.array(marks, np.int64).reshape(-1, 2))


def read_marked(
    file: File, shard: Shard, numbers: NDArray[np.int64], walk: Walk
) -> Iterator[tuple[Mark, memoryview]]:
    """Read samples of a shard by its marks.

    Args:
        file: The open shard, or what it decompresses to.
        shard: The shard.
        numbers: int64[n]: Samples, sorted, n >= 1.
        walk: Finds the samples.

    Yields:
        Each sample's own mark, and its bytes.

    Raises:
        SourceError: If the shard ends before the last of them.
    """
    for start, run in cut_at_marks(numbers, shard.marks):
        # Nothing is read behind the first mark that follows the run.
        behind = int(np.searchsorted(shard.marks[:, 0], run[-1], side="right"))
        stop = int(shard.marks[behind, 1]) if behind < len(shard.marks) else file.size
        wanted = iter(run.tolist())
        number = next(wanted)
        for mark, data in walk(file, start, stop):
            if mark[0] < number:
                continue
            yield mark, data
            number = next(wanted, -1)
            if number < 0:
                break
        else:
            raise disagree(shard, f"no sample {number}")
