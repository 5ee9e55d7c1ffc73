"""Where some samples of a tar shard begin, so that a part of it is read without what lies before.

Whoever counts the samples sees where they lie. Of that a sparse table is kept: the number of a
sample and the byte its first header begins at, 256 or so of a shard, but one a MiB of large ones.
What is read from a mark on is the same as from the beginning of the shard: no header before it has
a say. Marks may come from an index that somebody wrote. So whoever reads from one to the next sees
that as many samples lie between as they say: any readers who together read all find what is wrong.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.source.base import Contents, Mark
from dataio.source.formats.tar.headers import BLOCK, LINKED, as_text
from dataio.source.formats.tar.samples import Samples, walk_samples
from dataio.source.storage.window import File, Window

MARK_BYTES, MOST_MARK_BYTES = 16 << 10, 1 << 20
"""Least and most between two marks."""
MARKS = 256
"""Of a shard, where these limits allow it."""
SKIPPED_BYTES = 1 << 20
"""What is not read around where it is less: a request costs as much."""
START: Mark = (0, 0)


def count_and_mark(file: File, *, joined: bool = False) -> Contents:
    """Count the samples of a shard by its headers, and mark some of them.

    Args:
        file: The shard.
        joined: As of `HeaderReader`; then a key may come again, too.

    Raises:
        SourceError: If it is no tar file, truncated, a sample has two members of one extension, a
            key comes again, or a link leads to no file of the shard.
    """
    num_samples = end = 0
    spacing = mark_bytes(file.size)
    marks = [np.empty((0, 2), np.int64)]
    keys = list[bytes]()
    for samples in walk_samples(Window(file), joined=joined):
        firsts = samples.first_members()
        begins = _begins(samples, firsts, end)
        # One of every stretch that any begins in, but the first, which has the shard's start.
        stretch = np.append(marks[-1][-1:, 1], begins) // spacing
        new = np.flatnonzero(np.diff(stretch, prepend=0)[len(stretch) - len(begins) :] > 0)
        if len(new):
            marks.append(np.stack([samples.start + new, begins[new]], axis=1))
        if not joined:
            keys += samples.keys(firsts)
        if (samples.members.num_bytes == LINKED).any():
            samples.extents()
        num_samples, end = samples.stop, int(_ends(samples)[-1])
    check_keys(file.path, keys)
    return Contents([num_samples], np.concatenate(marks))


def mark_bytes(num_bytes: int) -> int:
    """Choose how far apart the marks of a shard of some bytes are."""
    return max(MARK_BYTES, min(num_bytes // MARKS, MOST_MARK_BYTES))


def check_keys(path: str, keys: Sequence[bytes]) -> None:
    """Refuse a shard in which a key comes again, behind other samples.

    Raises:
        SourceError: It names the key.
    """
    if len(set(keys)) < len(keys):
        again = as_text(Counter(keys).most_common(1)[0][0])
        raise SourceError(
            f"{path}: found sample {again!r} in two places, expected the members of a sample side "
            "by side; write the shard again, sorted by name (`tar --sort=name`), or with other "
            "keys; or, if each is a sample of its own, open it with dataio.Shards(..., joined=True)"
        )


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


def misplaced_mark(samples: Samples, marks: NDArray[np.int64]) -> tuple[Mark, int] | None:
    """Find a mark among some samples, or just behind them, that is not where its sample begins.

    Returns:
        The mark, and the byte where the sample does begin; None if all are right.
    """
    first, last = np.searchsorted(marks[:, 0], [samples.start, samples.stop], side="right")
    if first == last:
        return None
    # int64[num_samples]: where the sample behind each begins
    begins = _ends(samples)[np.append(samples.first_members()[1:], len(samples.number)) - 1]
    begins = begins[marks[first:last, 0] - samples.start - 1]
    wrong = np.flatnonzero(begins != marks[first:last, 1])
    if not len(wrong):
        return None
    number, offset = marks[first + wrong[0]].tolist()
    return (number, offset), int(begins[wrong[0]])


def _ends(samples: Samples) -> NDArray[np.int64]:
    """int64[num_members]: The first byte behind each member, where the next header may be."""
    members = samples.members
    return members.offset + (members.num_bytes + BLOCK - 1) // BLOCK * BLOCK


def _begins(samples: Samples, firsts: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """int64[num_samples]: The first byte that may say something about each sample.

    That is behind the last member of the one before, which ends at ``end`` for the first: long
    names and pax records stand before the header that they belong to.
    """
    begins = _ends(samples)[firsts - 1]
    begins[0] = end
    return begins
