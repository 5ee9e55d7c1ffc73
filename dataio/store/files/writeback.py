"""Have the kernel begin to write to the disk what was written, so that a later flush is short."""

import ctypes

WORTH_BYTES = 1 << 20
"""Shorter runs wait for the flush: a call for each costs more than it saves."""
WRITE = 2
"""``SYNC_FILE_RANGE_WRITE`` of Linux."""


def begin_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Begin to write a part of a file to the disk, and do not wait.

    It makes nothing durable: `os.fdatasync` does, and has less left to do. Does nothing for few
    bytes, and where the kernel has no such call.
    """
    if _sync_file_range is not None and num_bytes >= WORTH_BYTES:
        # What it may say is no matter: the flush says it again.
        _sync_file_range(descriptor, offset, num_bytes, WRITE)


def _find() -> "ctypes._NamedFuncPointer | None":
    found: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


_sync_file_range = _find()
