"""Ask the kernel what Python has no call for: a filesystem's magic, and which pages are cached."""

import ctypes
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CACHESTAT = 451
"""The same number on every machine whose calls follow the common table."""
OTHER_TABLES = ("alpha", "mips", "ia64")

WINDOW_BYTES = 1 << 30
"""Mapped at a time: one byte of answer a page, whatever the file's size."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def statfs_magic(path: Path) -> int:
    """Read the number that names a kind of filesystem, unsigned, as statfs(2) gives it.

    Raises:
        OSError: If the path cannot be reached.
    """
    # Larger than the structure on any machine; the kind is its first word, a long on all of ours.
    buffer = (ctypes.c_long * 64)()
    if _libc.statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return int(buffer[0]) & 0xFFFFFFFF


def cachestat_pages(descriptor: int) -> int | None:
    """Count a file's pages in the page cache; None where cachestat(2) fails.

    It came with Linux 6.5. Later kernels report it only to users who may write the file.
    """
    if platform.machine().startswith(OTHER_TABLES):
        return None
    # From 0, with no end.
    whole = (ctypes.c_uint64 * 2)(0, 0)
    counts = (ctypes.c_uint64 * 5)()
    called = _libc.syscall(
        ctypes.c_long(CACHESTAT), ctypes.c_int(descriptor), ctypes.byref(whole),
        ctypes.byref(counts), ctypes.c_uint(0),
    )  # fmt: skip
    return int(counts[0]) if called == 0 else None


def mincore_pages(descriptor: int) -> int | None:
    """Count a file's pages in the page cache by mapping it; None where mincore(2) cannot know.

    To users who neither own the file nor may write it the kernel reports that all pages are there,
    so its answer is ignored then.
    """
    status = os.fstat(descriptor)
    if os.geteuid() not in (0, status.st_uid) and not _may_write(descriptor):
        return None
    try:
        return sum(_mapped_pages(descriptor, status.st_size))
    except OSError:
        # Some filesystems cannot be mapped; that is an answer too.
        return None


def _may_write(descriptor: int) -> bool:
    return os.access(f"/proc/self/fd/{descriptor}", os.W_OK)


def _mapped_pages(descriptor: int, num_bytes: int) -> Iterator[int]:
    for start in range(0, num_bytes, WINDOW_BYTES):
        length = min(WINDOW_BYTES, num_bytes - start)
        with mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start) as mapped:
            pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(mapped, np.uint8)
            called = _libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(length),
                ctypes.c_void_p(pages.ctypes.data),
            )  # fmt: skip
            # The map cannot be closed while a view of it lives.
            del view
        if called != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        yield int(np.count_nonzero(pages & 1))
