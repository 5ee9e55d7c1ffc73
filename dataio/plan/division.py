"""Who reads which of a node's missing rows: along the shards, so that each is opened once."""

import numpy as np
from numpy.typing import NDArray


def divide_along_shards(
    sample_ids: NDArray[np.int64], *, shard_starts: NDArray[np.int64], num_parts: int
) -> NDArray[np.int64]:
    """Cut rows into parts of about equal size, between two shards wherever one begins near by.

    Args:
        sample_ids: int64[n]: Sorted.
        shard_starts: int64[num_shards]: First sample of each shard.
        num_parts: Parts, >= 1; a part may be empty.

    Returns:
        int64[num_parts + 1]: Ascending bounds of the parts in ``sample_ids``, from 0 to n. No cut
        moves by more than half a part; a shard is cut only if it is larger than that.
    """
    num_rows = len(sample_ids)
    even = num_rows * np.arange(num_parts + 1, dtype=np.int64) // num_parts
    bounds = np.unique(np.append(np.searchsorted(sample_ids, shard_starts), [0, num_rows]))
    above = np.minimum(np.searchsorted(bounds, even), len(bounds) - 1)
    below = np.maximum(above - 1, 0)
    nearest = np.where(bounds[above] - even <= even - bounds[below], bounds[above], bounds[below])
    return np.where(np.abs(nearest - even) * 2 * num_parts <= num_rows, nearest, even)


def cut_at_shards(
    sample_ids: NDArray[np.int64], *, shard_starts: NDArray[np.int64], num_readers: int
) -> NDArray[np.int64]:
    """Cut one rank's part into pieces that its readers take in turn: a shard each, or less.

    Where there are fewer shards than readers, their rows are divided instead.

    Returns:
        int64[num_pieces + 1]: Ascending, distinct bounds in ``sample_ids``, from 0 to n.
    """
    num_rows = len(sample_ids)
    shards = np.unique(np.append(np.searchsorted(sample_ids, shard_starts), [0, num_rows]))
    if len(shards) > num_readers:
        return shards
    return np.unique(
        divide_along_shards(sample_ids, shard_starts=shard_starts, num_parts=num_readers)
    )
