"""Errors of a disk, as errors that name the cache and the cure."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from dataio.base.errors import CacheError, DamagedCacheError


@contextlib.contextmanager
def named(directory: Path, doing: str) -> Iterator[None]:
    """Turn an error of the disk within into a `CacheError` with directory and cure."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cure = "free some space or give another directory (cache=..., TONARI_CACHE)"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            cure = "make it writable or give another directory (cache=..., TONARI_CACHE)"
        else:
            cure = "look at the disk; removing the directory makes the next run stage again"
        raise CacheError(f"{directory}: could not {doing}: {error}; {cure}") from error


@contextlib.contextmanager
def readable(directory: Path, name: str) -> Iterator[None]:
    """Turn what does not have the form that the cache wrote into a `DamagedCacheError`."""
    try:
        yield
    # Arrow's errors of form are ValueErrors too.
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCacheError(
            f"{directory}: {name} is damaged ({error}), expected what this cache wrote; "
            f"run `tonari cache verify {directory}`, which finds its rows again, or "
            "remove the directory, and the next run stages it again"
        ) from error
