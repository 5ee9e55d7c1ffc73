"""Open a cache: lock it, see that it holds what it must, recover it after a kill, make room."""

import contextlib
import logging
from pathlib import Path

import numpy as np

from dataio.base.errors import CacheError, DamagedCacheError
from dataio.base.filesystem import room_for
from dataio.plan.placement import Placement
from dataio.store.cache import Cache
from dataio.store.files.manifest import Entries, empty_entries, join_entries
from dataio.store.files.row_files import RowFiles
from dataio.store.state import FilesVerdict, judge

log = logging.getLogger(__name__)


def prepare(
    cache: Cache,
    *,
    exchanging: bool,
    wanted: Placement | None,
    read_only: bool,
    expected_bytes: int,
) -> None:
    """Create or adopt the directory, lock it and make room. Leader only, before anyone loads.

    Args:
        cache: As made.
        exchanging: Whether rows will come and go: then nobody else may use it meanwhile.
        wanted: The samples that a job which does not exchange needs; where they lie here already,
            the cache is shared with other such jobs. None: not known.
        read_only: Whether nothing may be made or changed.
        expected_bytes: Of the variable fields, as far as they are known.

    Raises:
        CacheBusyError: If another process uses it in a way that cannot be shared.
        OtherDatasetError: If it holds something else.
        CacheError: If it cannot be written or the disk is full.
    """
    with cache.named("prepare the cache"):
        cache.hold.enter(exchanging=exchanging, read_only=read_only)
        is_new = not cache.log.tables.path.exists()
        if cache.hold.is_another(is_new=is_new, holds_rows=cache.log.tables.holds_rows):
            # A staging that never ended binds nobody, and what it left is of another source.
            cache.rewrite(cache.entries, epoch=0, placement="")
            cache.hold.sign()
        if not cache.hold.shared:
            recover(cache)
        _keep_within_budget(cache)
        if cache.hold.shared:
            if not _is_right(cache, wanted):
                raise cache.hold.busy("holds other rows than this job needs and is in use")
            return
        if not exchanging and _is_right(cache, wanted):
            cache.hold.share()
            return
        _make_room(cache, expected_bytes)


def recover(cache: Cache) -> str:
    """Bring the directory from any state that a kill can leave to one that says what it holds.

    Alone, before anyone loads. Rows that were staged become the base's; files that mean nothing
    are removed. A manifest that is damaged is made anew of the rows that prove themselves: what
    is then missing comes from other nodes, or the source.

    Returns:
        What was made anew, for a message; "" if nothing was.
    """
    made_anew = ""
    try:
        head = cache.log.tables.read_head()
        verdict = judge(cache.log.tables.names(), head)
        if head is None and cache.files.headers.path.exists():
            raise DamagedCacheError(f"{cache.log.tables.path}: is no longer there")
        if head is not None:
            holds_rows = head.missing < head.rows
            check_files(cache.directory, cache.files, verdict, holds_rows=holds_rows)
            # The first of a cache are made after its manifest.
            cache.files.reserve(0)
            cache.load(writable=False)
            cache.log.adopt_for_good(head)
    except DamagedCacheError as error:
        num_variable = len(cache.schema.variable)
        found, made_anew = prove_rows(cache.files, error, num_variable=num_variable)
        held = found if len(found) else empty_entries(cache.num_slots, num_variable)
        cache.rewrite(held, epoch=0, placement="")
    for file in cache.files.by_position:
        file.repair_header()
    tables = cache.log.tables
    tables.unlink(judge(tables.names(), tables.read_head()).litter)
    return made_anew


def _is_right(cache: Cache, wanted: Placement | None) -> bool:
    """Whether all these samples lie here, each in its slot."""
    if wanted is None or not cache.log.tables.holds_rows():
        return False
    cache.load(writable=False)
    if len(cache.entries) != wanted.num_slots:
        return False
    if (cache.log.placement, cache.log.epoch) == (wanted.name, wanted.epoch):
        return cache.log.num_missing == 0
    return np.array_equal(cache.entries.sample_id[:], wanted.sample_ids())


def _keep_within_budget(cache: Cache) -> None:
    """Empty a cache that was filled under a larger quota, or none."""
    head = cache.log.tables.read_head()
    if head is None or cache.room.fits(head, disk_bytes=lambda: disk_bytes(cache.directory)):
        return
    if cache.hold.shared:
        raise cache.hold.busy("is larger than this job's quota and in use")
    if head.missing < head.rows:
        log.warning("%s: emptied, because it is larger than the quota", cache.directory)
    empty = empty_entries(cache.num_slots, len(cache.schema.variable))
    cache.rewrite(empty, epoch=0, placement="")
    cache.log.tables.unlink(cache.files.names())


def disk_bytes(directory: Path) -> int:
    """Count what a cache's files take on the disk."""
    total = 0
    for path in directory.iterdir():
        # A job that runs replaces its manifests meanwhile.
        with contextlib.suppress(FileNotFoundError):
            total += 512 * path.lstat().st_blocks
    return total


def _make_room(cache: Cache, expected_bytes: int) -> None:
    """Claim the space of the fixed fields, and look whether the others are likely to fit."""
    if not cache.log.tables.path.exists():
        cache.rewrite(cache.entries, epoch=0, placement="")
    budget, num_positions = cache.room.budget, cache.num_slots
    if budget is not None:
        num_positions = min(num_positions, budget.positions)
        expected_bytes = min(expected_bytes, cache.room.heaps_bytes)
    if not cache.log.tables.holds_rows():
        files = [file.path for file in cache.files.by_position if file.path.exists()]
        # A staging that was killed has claimed its room already.
        claimed = sum(512 * path.stat().st_blocks for path in files)
        need = max(num_positions * cache.schema.position_bytes - claimed, 0)
        room_for(cache.directory, need)
        # Only a guess, by the size of the source: no reason to refuse.
        try:
            room_for(cache.directory, need + expected_bytes)
        except CacheError as error:
            log.warning("staging may not fit, to judge by the size of the source: %s", error)
    cache.files.reserve(num_positions)


PROVED_ROWS = 4096


def check_files(
    directory: Path, files: RowFiles, verdict: FilesVerdict, *, holds_rows: bool
) -> None:
    """Look whether every file that the manifest needs is there.

    Raises:
        DamagedCacheError: If one is not.
    """
    lost = [path.name for file in files.by_position if not (path := file.path).exists()]
    if verdict.absent or (lost and holds_rows):
        missing = ", ".join([*verdict.absent, *lost])
        raise DamagedCacheError(f"{directory}: {missing} are no longer there")


def prove_rows(
    files: RowFiles, error: DamagedCacheError, *, num_variable: int
) -> tuple[Entries, str]:
    """Find the rows that prove themselves, where the manifest does not say. Reads all rows.

    Returns:
        The rows, in slots from 0 on, and what was found, for a message.
    """
    files.reserve(0)
    files.map(writable=False)
    found = find_rows(files, num_variable)
    message = (
        f"{error}; {len(found)} rows prove themselves and stay, the others are read from other "
        "nodes or from the source"
    )
    log.warning("made the manifest anew: %s", message)
    return found, message


def find_rows(files: RowFiles, num_variable: int) -> Entries:
    """Read every header, and keep what its row's bytes prove. Reads all rows.

    A sample has the same bytes whenever it was written, so a row of any epoch is as good as the
    newest.

    Args:
        files: Mapped.
        num_variable: Variable fields.

    Returns:
        Entries of distinct samples, in slots from 0 on.
    """
    parts = []
    for first in range(0, files.num_positions, PROVED_ROWS):
        found = files.read_headers(slice(first, min(first + PROVED_ROWS, files.num_positions)))
        parts.append(found.take(files.prove(found)))
    found = join_entries(parts, num_variable)
    _, firsts = np.unique(found.sample_id[:], return_index=True)
    found = found.take(np.sort(firsts))
    found.slot.put(np.arange(len(found)), np.arange(len(found)))
    return found
