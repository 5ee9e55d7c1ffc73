"""Who trains a cell: locks that die with their owner, on one machine or over a shared filesystem.

A claim is a POSIX lock on the cell's file in `claims`, which holds over the nodes of every
filesystem whose locks do (NFS, GPFS; Lustre mounted with `flock`). The file's text names the owner,
to be shown to others; only the lock itself decides, and what a dead owner left behind counts for
nothing. Claim files are never removed: removing one could part two processes that both hold it.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dataio.cache.lock import JOB_VARIABLES
from tonari.ablate.study.config import Cell
from tonari.errors import CommandError

CLAIMS = "claims"

# C's struct flock: l_type, l_whence, l_start, l_len, l_pid
FLOCK = "hhqqi"


@dataclass(frozen=True)
class Claimant:
    """A process that trains a cell, as it named itself; ``since_s`` is seconds since 1970."""

    pid: int
    host: str
    job: str
    since_s: float

    def __str__(self) -> str:
        if not self.pid:
            return "a process that left no name"
        return f"process {self.pid} on {self.host}" + (f", job {self.job}" if self.job else "")


@contextlib.contextmanager
def claim(out: Path, cell: Cell) -> Iterator[bool]:
    """Try to be the only one who trains a cell.

    Yields:
        Whether nobody else does: then nobody else will until the end of the `with`, or of this
        process, however it ends.

    Raises:
        CommandError: If the filesystem has no locks.
    """
    path = _path(out, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        taken = _lock(descriptor, path)
        if taken:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(_this_process())).encode(), 0)
        yield taken
    finally:
        os.close(descriptor)


def claimant(out: Path, cell: Cell) -> Claimant | None:
    """Say which other process trains a cell; None if none does. Disturbs nobody who claims it.

    Not for a process that itself holds the claim: closing the file would let go of its lock.
    """
    try:
        descriptor = os.open(_path(out, cell), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
        if struct.unpack(FLOCK, answer)[0] == fcntl.F_UNLCK:
            return None
        return Claimant(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return Claimant(0, "", "", time.time())  # it has not signed yet
    finally:
        os.close(descriptor)


def _path(out: Path, cell: Cell) -> Path:
    return out / CLAIMS / cell.file_name


def _lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise CommandError(
                f"{path}: cannot be locked ({error.strerror}), expected a filesystem with locks: "
                f"without, processes would train the same cells; name another --out, or have it "
                f"mounted with locks (Lustre: -o flock)"
            ) from error
        raise
    return True


def _this_process() -> Claimant:
    job = next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), "")
    return Claimant(os.getpid(), socket.gethostname(), job, time.time())
