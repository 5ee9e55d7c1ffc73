"""Read every row of a cache, and repair what can be repaired without the source."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.store.cache import Cache
from dataio.store.files.manifest import Entries
from dataio.store.files.row_files import RowFiles
from dataio.store.lock import held, refuse_others
from dataio.store.manifest_files import Identity
from dataio.store.prepare import recover
from dataio.store.tools.report import identity_of, open_to_read

VERIFY_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Verified:
    """What was found since the last.

    Attributes:
        num_rows: Rows checked so far.
        corrupt: int64[n]: Samples whose bytes do not match their checksum, or are gone.
        num_headers: Headers of sound rows that were not what the manifest says.
        arrays: Files whose own header, which NumPy reads, was not what their size says.
        rebuilt: Why the manifest was made anew; "" if it was not.
    """

    num_rows: int
    corrupt: NDArray[np.int64]
    num_headers: int = 0
    arrays: tuple[str, ...] = ()
    rebuilt: str = ""


def verify_cache(directory: Path, *, dry_run: bool) -> Iterator[Verified]:
    """Compare every row with its checksum, while nobody writes there.

    Args:
        directory: A node directory.
        dry_run: Whether damage is only named. Else the cache is held alone: a manifest that is
            damaged is made anew of the rows that prove themselves, headers are written again, and
            corrupt rows are missing in the end: the next job reads just these from the source.

    Raises:
        CacheBusyError: If a job uses it.
        CacheError: If it is too damaged to be read, or is another user's.
    """
    if not dry_run:
        refuse_others(directory)
    with held(directory, "verifying", alone=not dry_run) as lock:
        identity = identity_of(directory)
        files = RowFiles(directory, identity.schema, local_rank=0, heap_bytes=None)
        arrays = tuple(file.path.name for file in files.by_position if not file.has_its_header())
        rebuilt = "" if dry_run else _recovered(directory, identity)
        yield Verified(0, np.empty(0, np.int64), arrays=arrays, rebuilt=rebuilt)
        cache = open_to_read(directory)
        files.map(writable=False)
        slots, corrupt = np.flatnonzero(cache.entries.present), []
        for first in range(0, len(slots), VERIFY_BLOCK_ROWS):
            block = slots[first : first + VERIFY_BLOCK_ROWS]
            found = _verify(files, cache.entries.take(block), dry_run=dry_run)
            corrupt.append(block[np.isin(cache.entries.sample_id[block], found.corrupt)])
            lock.touch()
            yield Verified(first + len(block), found.corrupt, found.num_headers)
        if not dry_run:
            files.headers.sync()
            _forget(cache, np.concatenate([*corrupt, np.empty(0, np.int64)]))


def _recovered(directory: Path, identity: Identity) -> str:
    return recover(
        Cache(directory, identity, num_slots=0, num_positions=0, local_rank=0, local_size=1)
    )


def _verify(files: RowFiles, entries: Entries, *, dry_run: bool) -> Verified:
    proved = files.prove(entries)
    num_headers = files.repair_headers(entries.take(proved), dry_run=dry_run)
    return Verified(len(entries), entries.sample_id[~proved], num_headers)


def _forget(cache: Cache, slots: NDArray[np.int64]) -> None:
    if not len(slots):
        return
    cache.entries.forget(slots)
    cache.rewrite(cache.entries, epoch=cache.log.epoch, placement=cache.log.placement)
