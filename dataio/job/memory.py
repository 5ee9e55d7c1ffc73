"""What the C library does with memory that a step has freed."""

import ctypes
import os

KEPT_BYTES = 256 << 20
"""Of free memory at the end of the heap, at the most."""

LARGEST_BYTES = 32 << 20
"""Of a piece that may lie in the heap: the most that glibc takes. Larger ones are always mapped."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Have this process keep what a step frees for the next step, which takes as much again.

    By itself glibc gives it back to the system, and takes it anew page by page, until a piece of up
    to 32 MiB was freed for the first time: a fifth of a small model's step. Where the user has set
    ``MALLOC_`` variables or tunables these hold, and other C libraries are left alone.

    Source: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in mallopt(3) of the Linux manual pages.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or (
        "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
