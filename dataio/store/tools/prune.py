"""Remove caches that nobody uses: only files that a cache wrote, and only where no others lie."""

import contextlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataio.base.errors import CacheError
from dataio.store.lock import gate, held, refuse_others
from dataio.store.tools.report import CacheReport

WRITTEN = re.compile(
    r"(meta\.json|manifest\.json|lock|bandwidth|scores.*\.npy|fixed-\d+\.npy|headers\.npy|heap-\d+\.bin|"
    r"base-\d+\.arrow|delta-\d+-\d+\.arrow|staged-\d+-\d+-\d+\.arrow|surplus-\d+\.arrow|"
    r"given-\d+-\d+-\d+\.arrow)(\.partial)?"
)
"""Names of all files that a cache writes."""


@dataclass(frozen=True, kw_only=True)
class PruneChoice:
    """Which caches are to go. Those in use stay whatever is chosen.

    Attributes:
        everything: All of them.
        stale: Those whose source has changed, and those too damaged to be used.
        unused_s: Those that no job has taken for so long.
        keep_bytes: The least recently used, until the rest is no larger than this.
    """

    everything: bool = False
    stale: bool = False
    unused_s: float | None = None
    keep_bytes: int | None = None

    def of(
        self, reports: Sequence[CacheReport], changed: Sequence[bool], *, now_s: float
    ) -> list[CacheReport]:
        """Choose.

        Args:
            reports: All caches of a root.
            changed: For each, whether its source is known to have changed.
            now_s: Seconds since 1970.

        Returns:
            Those to remove, least recently used first.
        """
        free = [
            (report, is_changed)
            for report, is_changed in zip(reports, changed, strict=True)
            if report.in_use_by is None
        ]
        free.sort(key=lambda pair: pair[0].last_used_s)
        going = [report for report, is_changed in free if self._goes(report, is_changed, now_s)]
        if self.keep_bytes is None:
            return going
        kept = sum(report.disk_bytes for report in reports) - sum(r.disk_bytes for r in going)
        for report, _ in free:
            if kept > self.keep_bytes and report not in going:
                going.append(report)
                kept -= report.disk_bytes
        return going

    def _goes(self, report: CacheReport, is_changed: bool, now_s: float) -> bool:
        if self.everything or (self.stale and (is_changed or report.problem is not None)):
            return True
        return self.unused_s is not None and now_s - report.last_used_s > self.unused_s


def remove_cache(directory: Path) -> int:
    """Remove one node directory, and its dataset's when that is empty then.

    Never follows a link. A kill half-way leaves a cache that misses rows, or what the next call
    removes.

    Returns:
        Bytes that are free now.

    Raises:
        CacheBusyError: If a job uses it.
        CacheError: If anything lies there that no cache wrote; nothing is removed then.
    """
    if directory.is_symlink():
        raise CacheError(
            f"{directory}: is a link, expected a cache's own directory; remove it by hand"
        )
    _refuse_foreign(directory)
    with held(directory, "pruning", alone=True), gate(directory):
        freed = _unlink_all(directory)
        directory.rmdir()
    # Another node directory, or a job that begins just now, keeps it.
    with contextlib.suppress(OSError):
        directory.parent.rmdir()
    return freed


def _refuse_foreign(directory: Path) -> None:
    refuse_others(directory)
    foreign = sorted(entry.name for entry in os.scandir(directory) if not _is_ours(entry))
    if foreign:
        raise CacheError(
            f"{directory}: found {', '.join(foreign[:5])}{' ...' if foreign[5:] else ''}, expected "
            "only files that a cache writes; move them away, or remove the directory by hand"
        )


def _is_ours(entry: "os.DirEntry[str]") -> bool:
    is_file = entry.is_file(follow_symlinks=False)
    return is_file and WRITTEN.fullmatch(entry.name) is not None


def _unlink_all(directory: Path) -> int:
    """Unlink the files by way of the directory itself: no link put in its place is followed."""
    freed = 0
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        names = [entry.name for entry in os.scandir(opened) if _is_ours(entry)]
        # The truth first: what is left after a kill is a cache without rows. The lock last.
        names.sort(key=lambda name: (name == "lock", name != "manifest.json", name))
        for name in names:
            found = os.stat(name, dir_fd=opened, follow_symlinks=False)
            # What a process still maps is not free yet, but nobody else will find it.
            freed += 512 * found.st_blocks if stat.S_ISREG(found.st_mode) else 0
            os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)
    return freed
