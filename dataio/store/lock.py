"""Who uses a cache: locks that die with their owner, and a text that names it.

The lock is an flock on the cache's file `lock`: exclusive for a job that writes, shared for jobs
that only read. Its text holds one line of JSON an owner, to be shown to others; only the flock
itself decides.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from dataio.base.claim import UNNAMED, Claimant, parse, this_process
from dataio.base.errors import CacheBusyError, CacheError
from dataio.base.own import open_own, opened

Mode = Literal["staging", "exchanging", "sharing", "verifying", "pruning", "exporting"]
"""What an owner does; one that is "staging" will share the cache when it is whole."""

GATE_TIMEOUT_S = 20.0


class CacheLock:
    """This process's hold on a cache directory.

    Locks are taken and changed under a second flock, on the directory itself: turning an exclusive
    lock into a shared one lets go of it for a moment, and nobody may slip in then.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shared = False
        self._descriptor: int | None = None

    def take(self, mode: Mode) -> bool:
        """Take it exclusively; False if anybody else holds it."""
        with gate(self.directory) as here:
            descriptor = self._open(here, os.O_RDWR | os.O_CREAT)
            if not _flock(descriptor, fcntl.LOCK_EX):
                os.close(descriptor)
                return False
            self._descriptor, self.shared = descriptor, False
            self._sign(mode, alone=True)
        return True

    def join(self, mode: Mode = "sharing") -> bool:
        """Take it together with others; False if somebody holds it exclusively.

        Where no lock can be opened, as in another user's read-only cache, there is none to take.
        """
        with gate(self.directory) as here:
            descriptor, writable = self._open_to_share(here)
            if descriptor is not None and not _flock(descriptor, fcntl.LOCK_SH):
                os.close(descriptor)
                return False
            self._descriptor, self.shared = descriptor, True
            if writable:
                self._sign(mode, alone=False)
        return True

    def share(self) -> None:
        """Let others read too, from now on.

        Raises:
            CacheBusyError: If somebody took it meanwhile, without the gate.
        """
        if self._descriptor is None or self.shared:
            return
        with gate(self.directory):
            self.shared = _flock(self._descriptor, fcntl.LOCK_SH)
            if self.shared:
                self._sign("sharing", alone=True)
                return
        self.release()
        raise self.busy("was taken while this job began to share it")

    def upgrade(self, mode: Mode) -> None:
        """Hold it alone, to write.

        Raises:
            CacheBusyError: If others read it; it stays shared then.
        """
        if not self.shared:
            return
        found = "holds other rows than this job needs and is"
        if self._descriptor is None:
            raise self.busy(f"{found} read-only; it is used")
        with gate(self.directory):
            if _flock(self._descriptor, fcntl.LOCK_EX):
                self.shared = False
                self._sign(mode, alone=True)
                return
            # The failed try has let go of it; under the gate nobody can have come between.
            _flock(self._descriptor, fcntl.LOCK_SH)
        raise self.busy(f"{found} in use")

    def sign(self, mode: Mode) -> None:
        """Say anew what it is held alone for."""
        if self._descriptor is not None and not self.shared:
            with gate(self.directory):
                self._sign(mode, alone=True)

    def touch(self) -> None:
        """Show those who wait that this process gets on."""
        if self._descriptor is not None:
            with contextlib.suppress(PermissionError):  # Another user's: nobody waits for readers.
                os.utime(self._descriptor)

    def release(self) -> None:
        """Let go; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def busy(self, found: str) -> CacheBusyError:
        """Make the error that names who holds it."""
        by = describe(owners(self.directory))
        return CacheBusyError(
            f"{self.directory}: the cache {found} by {by}; wait for it to end, or give this job a "
            "cache directory of its own (cache=..., TONARI_CACHE)"
        )

    def _open(self, here: int, flags: int) -> int:
        return open_own("lock", flags, directory=self.directory, descriptor=here)

    def _open_to_share(self, here: int) -> tuple[int | None, bool]:
        """Open it in a directory that is open; of another user's, only to read."""
        if os.fstat(here).st_uid == os.getuid():
            try:
                return self._open(here, os.O_RDWR | os.O_CREAT), True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
        with contextlib.suppress(PermissionError, FileNotFoundError):
            return self._open(here, os.O_RDONLY), False
        return None, False

    def _sign(self, mode: Mode, *, alone: bool) -> None:
        assert self._descriptor is not None
        if alone:
            os.ftruncate(self._descriptor, 0)
        line = json.dumps(asdict(this_process(mode))) + "\n"
        os.pwrite(self._descriptor, line.encode(), os.fstat(self._descriptor).st_size)


@contextlib.contextmanager
def held(directory: Path, mode: Mode, *, alone: bool) -> Iterator[CacheLock]:
    """Hold a cache for a piece of work.

    Raises:
        CacheBusyError: If a job uses it in a way that excludes this.
        CacheError: If it cannot be locked, as on a read-only filesystem.
    """
    lock = CacheLock(directory)
    try:
        taken = lock.take(mode) if alone else lock.join(mode)
    except OSError as error:
        raise CacheError(
            f"{directory}: could not be locked ({error}), expected a cache of this user's that can "
            "be written; only its owner can change it"
        ) from error
    if not taken:
        raise lock.busy("is in use")
    try:
        yield lock
    finally:
        lock.release()


def refuse_others(directory: Path) -> None:
    """Refuse to change another user's cache, even as root.

    Raises:
        CacheError: If it is one.
    """
    owner = directory.lstat().st_uid
    if owner != os.getuid():
        raise CacheError(
            f"{directory}: belongs to user {owner}, not to this one ({os.getuid()}); ask its owner "
            "to do it"
        )


def owners(directory: Path) -> list[Claimant]:
    """Name who holds a cache; none if nobody does.

    Raises:
        OSError: If the directory cannot be read.
    """
    with gate(directory) as here:
        try:
            descriptor = open_own("lock", os.O_RDONLY, directory=directory, descriptor=here)
        except FileNotFoundError:
            return []
        try:
            is_shared = _flock(descriptor, fcntl.LOCK_SH)
            if is_shared and _flock(descriptor, fcntl.LOCK_EX):
                return []
            lines = os.pread(descriptor, 1 << 20, 0).splitlines()
        finally:
            os.close(descriptor)
    # Those who shared it and left are still in the text; the only owner has cleared it.
    named = list(filter(None, map(parse, lines)))
    living = [owner for owner in named if owner.may_live()] if is_shared else named
    return living or named or [UNNAMED]


def describe(found: list[Claimant]) -> str:
    """Write some owners for a message."""
    return " and ".join(map(str, found)) or "nobody"


@contextlib.contextmanager
def gate(directory: Path) -> Iterator[int]:
    """Keep every other process from taking, changing or looking at this cache's lock.

    Yields:
        The open directory.

    Raises:
        FileNotFoundError: If the directory is not there, or has been removed.
        CacheBusyError: If somebody keeps the gate, as a stopped process would.
    """
    with opened(directory) as descriptor:
        deadline = time.monotonic() + GATE_TIMEOUT_S
        while not _flock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise CacheBusyError(
                    f"{directory}: its lock has been changing hands for {GATE_TIMEOUT_S:.0f} s, "
                    "expected milliseconds; look for a stopped process that uses the directory"
                )
            time.sleep(0.002)
        here, found = directory.lstat(), os.fstat(descriptor)
        if (here.st_dev, here.st_ino) != (found.st_dev, found.st_ino):
            raise FileNotFoundError(f"{directory} has been removed")
        yield descriptor


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
