"""Shards that begin with a table of offsets, as MDS and LitData write them.

``uint32 num_samples, uint32 offsets[num_samples + 1]``, little-endian, from the file's beginning.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError
from dataio.source.base import Shard
from dataio.source.io.window import File, Window, merge_extents
from dataio.source.records.samples import disagree

WIDTH = 4


def read_count(file: File) -> int:
    """Read how many samples a shard says that it holds."""
    head = file.view_at(0, WIDTH)
    if len(head) < WIDTH:
        raise _truncated(file, 0)
    return int.from_bytes(head, "little")


def read_table(file: File, shard: Shard) -> NDArray[np.int64]:
    """Read where the samples of a shard begin, and the last one ends.

    Returns:
        int64[num_samples + 1]: Ascending offsets.

    Raises:
        SourceError: If the shard is truncated, or not what was counted.
    """
    num_bytes = WIDTH * (shard.num_samples + 2)
    head = file.view_at(0, num_bytes)
    table = np.frombuffer(head[: len(head) // WIDTH * WIDTH], "<u4")
    if len(table) and table[0] != shard.num_samples:
        raise disagree(shard, f"{table[0]} samples")
    offsets = table[1:].astype(np.int64)
    if len(head) < num_bytes:
        raise _truncated(file, shard.num_samples)
    if offsets[0] < num_bytes or (np.diff(offsets) < 0).any():
        raise disagree(shard, "offsets of samples that do not ascend")
    if offsets[-1] > file.size:
        raise _truncated(file, shard.num_samples)
    return offsets


def read_packed(
    file: File, offsets: NDArray[np.int64], numbers: NDArray[np.int64]
) -> Iterator[tuple[int, memoryview]]:
    """Read samples where the table says they are; what lies between far ones is not read.

    Yields:
        Each sample's number and bytes.
    """
    extents = np.stack([offsets[numbers], offsets[numbers + 1]], axis=1)
    window = Window(file, merge_extents(extents))
    for number, (start, stop) in zip(numbers.tolist(), extents.tolist(), strict=True):
        data = window.view(start, stop - start)
        if len(data) < stop - start:
            raise _truncated(file, len(offsets) - 1)
        yield number, data


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
