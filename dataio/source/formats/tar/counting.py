"""Counting the samples of a tar shard, and which of them reading can begin at.

What is read from a seek point on is the same as from the beginning of the shard: no header before
it has a say.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.source.base import SampleCounts, SeekPoint
from dataio.source.formats.seek_points import spacing_bytes
from dataio.source.formats.tar.headers import BLOCK, LINKED, as_text
from dataio.source.formats.tar.samples import Samples, walk_samples
from dataio.source.storage.window import File, FileWindow


def count_samples(file: File, *, joined: bool = False) -> SampleCounts:
    """Count the samples of a shard by its headers, and find its seek points.

    Args:
        file: The shard.
        joined: As of `HeaderReader`; then a key may come again, too.

    Raises:
        SourceError: If it is no tar file, truncated, a sample has two members of one extension, a
            key comes again, or a link leads to no file of the shard.
    """
    num_samples = end = 0
    spacing = spacing_bytes(file.size)
    points = [np.empty((0, 2), np.int64)]
    keys = list[bytes]()
    for samples in walk_samples(FileWindow(file), joined=joined):
        firsts = samples.first_members()
        begins = _begins(samples, firsts, end)
        # One of every interval that any begins in, but the first, which has the shard's start.
        interval = np.append(points[-1][-1:, 1], begins) // spacing
        new = np.flatnonzero(np.diff(interval, prepend=0)[len(interval) - len(begins) :] > 0)
        if len(new):
            points.append(np.stack([samples.start + new, begins[new]], axis=1))
        if not joined:
            keys += samples.keys(firsts)
        if (samples.members.num_bytes == LINKED).any():
            samples.extents()
        num_samples, end = samples.stop, int(_ends(samples)[-1])
    check_keys(file.path, keys)
    return SampleCounts([num_samples], np.concatenate(points))


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


def misplaced_point(samples: Samples, points: NDArray[np.int64]) -> tuple[SeekPoint, int] | None:
    """Find a seek point, among samples or just behind them, where its sample does not begin.

    Returns:
        The seek point, and the byte where the sample does begin; None if all are right.
    """
    first, last = np.searchsorted(points[:, 0], [samples.start, samples.stop], side="right")
    if first == last:
        return None
    # int64[num_samples]: where the sample behind each begins
    begins = _ends(samples)[np.append(samples.first_members()[1:], len(samples.number)) - 1]
    begins = begins[points[first:last, 0] - samples.start - 1]
    wrong = np.flatnonzero(begins != points[first:last, 1])
    if not len(wrong):
        return None
    number, offset = points[first + wrong[0]].tolist()
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
