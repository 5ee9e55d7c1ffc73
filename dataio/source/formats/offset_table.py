"""Samples that a table of offsets names, as MDS and LitData write them.

``uint32 num_samples, uint32 offsets[num_samples + 1]``, little-endian, from the file's beginning.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.source.base import SampleCounts, SeekPoint, Shard
from dataio.source.formats.records import disagree
from dataio.source.storage.window import File, FileWindow, merge_extents

WIDTH = 4


@dataclass(frozen=True)
class OffsetTable:
    """A `Walk` that goes where the table says.

    Attributes:
        file: The shard, or what it decompresses to.
        offsets: int64[num_samples + 1]: Ascending; where samples begin, and the last one ends.
    """

    file: File
    offsets: NDArray[np.int64]

    @classmethod
    def read(cls, file: File, shard: Shard | None = None) -> "OffsetTable":
        """Read the table of a shard.

        Args:
            file: The open shard, or what it decompresses to.
            shard: What it is to hold; None where nobody counted it.

        Raises:
            SourceError: If the shard is truncated, longer than its samples, or not what was
                counted.
        """
        return cls(file, _read_offsets(file, shard))

    def count(self) -> SampleCounts:
        """Count the samples."""
        return SampleCounts([len(self.offsets) - 1])

    def between(self) -> memoryview:
        """View what lies between the table and the first sample; before any sample is read."""
        start = WIDTH * (len(self.offsets) + 1)
        return self.file.view_at(start, int(self.offsets[0]) - start)

    def find(self, numbers: NDArray[np.int64]) -> Iterator[tuple[SeekPoint, memoryview]]:
        """Read samples where the table says they are; what lies between far ones is not read.

        Raises:
            SourceError: If the shard ends before them, or behind the last one goes on.
        """
        extents = np.stack([self.offsets[numbers], self.offsets[numbers + 1]], axis=1)
        file, num_samples, stop = self.file, len(self.offsets) - 1, 0
        window = FileWindow(file, merge_extents(extents))
        for number, (start, stop) in zip(numbers.tolist(), extents.tolist(), strict=True):
            data = window.view(start, stop - start)
            if len(data) < stop - start:
                raise _truncated(file, num_samples)
            yield (number, start), data
        # Only here does a compressed shard show where it ends.
        if file.in_order and numbers[-1] == num_samples - 1 and file.view_at(stop, 1):
            raise _longer(file, stop, num_samples)


def _read_offsets(file: File, shard: Shard | None) -> NDArray[np.int64]:
    least_bytes = WIDTH * (2 + (shard.num_samples if shard is not None else 0))
    head = bytes(file.view_at(0, least_bytes))
    if len(head) < 2 * WIDTH:
        raise _truncated(file, 0)
    num_samples, begin = np.frombuffer(head[: 2 * WIDTH], "<u4").tolist()
    if shard is not None and num_samples != shard.num_samples:
        raise disagree(shard, f"{num_samples} samples")
    num_bytes = WIDTH * (num_samples + 2)
    if begin < num_bytes:
        raise _refused(file, WIDTH, f"a first sample at {begin}, in the table of {num_samples}")
    head += bytes(file.view_at(len(head), num_bytes - len(head)))
    if len(head) < num_bytes:
        raise _truncated(file, num_samples)
    # int64[num_samples + 1]
    offsets = np.frombuffer(head, "<u4")[1:].astype(np.int64)
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if len(falls):
        raise _refused(file, WIDTH * (int(falls[0]) + 2), "offsets of samples that do not ascend")
    if offsets[-1] > file.size:
        raise _truncated(file, num_samples)
    if offsets[-1] < file.size and not file.in_order:
        raise _longer(file, int(offsets[-1]), num_samples)
    return offsets


def cut_values(data: memoryview, sizes: Sequence[int | None], where: str) -> list[memoryview]:
    """Cut a sample into its values.

    Args:
        data: A uint32 for each value whose size is None, then the values.
        sizes: Of the values, in bytes.
        where: Shard and sample, for the message.

    Raises:
        SourceError: If the sizes do not add up to the sample.
    """
    num_varying = sum(size is None for size in sizes)
    varying = iter(np.frombuffer(data[: WIDTH * num_varying], "<u4").tolist())
    values, at = [], WIDTH * num_varying
    for size in sizes:
        length = next(varying, 0) if size is None else size
        values.append(data[at : at + length])
        at += length
    if at != len(data):
        raise SourceError(
            f"{where}: found {len(data)} bytes, expected {at} by the sizes of its values; the "
            "shard is damaged: copy or write it again"
        )
    return values


def _truncated(file: File, num_samples: int) -> SourceError:
    return SourceError(
        f"{file.path}: ends in the middle of its {num_samples} samples, expected a whole shard; it "
        "is truncated: copy it again"
    )


def _longer(file: File, stop: int, num_samples: int) -> SourceError:
    return _refused(file, stop, f"more bytes behind the last of its {num_samples} samples")


def _refused(file: File, at: int, found: str) -> SourceError:
    return SourceError(
        f"{file.path}: at byte {at}{' of what it holds' * file.in_order}: found {found}, expected "
        "a table of offsets and the samples that it names, and no more; the shard is damaged, or "
        "others were joined to it: copy or write it again"
    )
