"""Put files out of this node's page cache, and see how much of them is in it."""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from tonari.bench.errors import BenchError
from tonari.bench.storage.site.kernel import cachestat_pages, mincore_pages, statfs_magic
from tonari.bench.storage.site.record import JsonRecord

SaidBy = Literal["cachestat", "mincore", "none"]

STACKED = frozenset({0x794C7630, 0xF15F})
"""Overlay and eCryptfs: their pages lie with the file below, where cachestat does not look."""

CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.EROFS})

Count = Callable[[int], int | None]


class Residency(JsonRecord, frozen=True, kw_only=True):
    """How much of some files lay in this node's page cache.

    Attributes:
        bytes_in_files: Their sizes, holes included.
        bytes_resident: Part of these in memory; None where it is unknown for any file.
        said_by: The system call that counted them; ``"none"`` with None.
    """

    bytes_in_files: int
    bytes_resident: int | None
    said_by: SaidBy


def evict(paths: Sequence[Path]) -> None:
    """Ask the kernel to drop these files from this node's page cache; needs no root.

    What was written is made durable first, because only clean pages go. The kernel may keep some,
    for example of a file that is mapped: check with `resident_bytes`.

    Raises:
        BenchError: If a file is gone or cannot be read.
    """
    for path in paths:
        with _opened(path) as descriptor:
            try:
                os.fsync(descriptor)
            except OSError as error:
                # Nothing of ours is unwritten where nothing can be written.
                if error.errno not in CANNOT_SYNC:
                    raise
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes(
    paths: Sequence[Path], *, cachestat: Count = cachestat_pages, mincore: Count = mincore_pages
) -> Residency:
    """Measure how much of these files lies in this node's page cache, without reading them.

    A FUSE filesystem without ``auto_cache`` drops a file's pages when it is opened, here too: what
    is counted is what a reader that opens it now finds.

    Args:
        paths: Files; each is opened once.
        cachestat: Counts the pages of a descriptor, or returns None.
        mincore: The same for kernels and filesystems where the first one cannot.

    Raises:
        BenchError: If a file is gone or cannot be read.
    """
    in_files, resident, said_by = 0, 0, "cachestat"
    for path in paths:
        with _opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            stacked = statfs_magic(Path(f"/proc/self/fd/{descriptor}")) in STACKED
            pages = None if stacked else cachestat(descriptor)
            if pages is None and said_by != "none":
                pages = mincore(descriptor)
                said_by = "none" if pages is None else "mincore"
        in_files += size
        # The last page counts as far as the file goes.
        resident += min((pages or 0) * mmap.PAGESIZE, size)
    if said_by == "none":
        return Residency(bytes_in_files=in_files, bytes_resident=None, said_by="none")
    counted_by: SaidBy = "mincore" if said_by == "mincore" else "cachestat"
    return Residency(bytes_in_files=in_files, bytes_resident=resident, said_by=counted_by)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BenchError(
            f"{path}: its pages in memory cannot be looked at: {error.strerror}; expected a file "
            "that stays, and can be read, until the benchmark ends: keep other jobs from it"
        ) from error
