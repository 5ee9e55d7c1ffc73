"""Read every row of a cache, and mark what does not match its checksum as missing."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.cache import Cache
from dataio.cache_lock import held, refuse_others
from dataio.cache_report import open_to_read
from dataio.rows import corrupt_rows

VERIFY_BLOCK_ROWS = 4096


def verify_cache(directory: Path, *, dry_run: bool) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Compare every row with its checksum, while nobody writes there.

    Args:
        directory: A node directory.
        dry_run: Whether corrupt rows are only named. Else the cache is held alone, and when all are
            read they are missing: the next job reads just these from the source.

    Yields:
        Rows checked so far, and int64[n]: the corrupt samples among those checked since the last.

    Raises:
        CacheBusyError: If a job uses it.
        CacheError: If it is too damaged to be read, or is another user's.
    """
    if not dry_run:
        refuse_others(directory)
    with held(directory, "verifying", alone=not dry_run) as lock:
        cache = open_to_read(directory)
        slots = np.flatnonzero(cache.entries.present)
        corrupt = []
        for first in range(0, len(slots), VERIFY_BLOCK_ROWS):
            block = slots[first : first + VERIFY_BLOCK_ROWS]
            rows = cache.read_rows(block)
            bad = corrupt_rows(rows)
            corrupt.append(block[bad])
            lock.touch()
            yield first + len(rows), rows.sample_id[bad]
        if not dry_run and corrupt:
            _forget(cache, np.concatenate(corrupt))


def _forget(cache: Cache, slots: NDArray[np.int64]) -> None:
    if not len(slots):
        return
    cache.entries.forget(slots)
    cache.rewrite(cache.entries, epoch=cache.epoch, placement=cache.placement)
