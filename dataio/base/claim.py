"""Claims on files: locks that die with their owner, on one machine or over a shared filesystem.

A claim is a POSIX lock on a file, which holds over the nodes of every filesystem whose locks do
(NFS, GPFS; Lustre mounted with `flock`). The file's text names the owner, to be shown to others;
only the lock itself decides, and what a dead owner left behind counts for nothing. Claim files are
never removed: removing one could part two processes that both hold it.
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

JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "PJM_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")
"""Of batch systems, the variable that has the job's number."""

# C's struct flock: l_type, l_whence, l_start, l_len, l_pid
FLOCK = "hhqqi"


@dataclass(frozen=True)
class Claimant:
    """A process that holds a claim, as it named itself; ``since_s`` is seconds since 1970."""

    pid: int
    host: str
    job: str
    since_s: float

    def __str__(self) -> str:
        if not self.pid:
            return "a process that left no name"
        return f"process {self.pid} on {self.host}" + (f", job {self.job}" if self.job else "")


class NoLocksError(OSError):
    """The filesystem has no locks."""


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Try to be the only one who holds a claim.

    Args:
        path: Its file; made with its directory where it is not there.

    Yields:
        Whether nobody else does: then nobody else will until the end of the `with`, or of this
        process, however it ends.

    Raises:
        NoLocksError: If the filesystem has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        taken = _lock(descriptor)
        if taken:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(_this_process())).encode(), 0)
        yield taken
    finally:
        os.close(descriptor)


def claimant(path: Path) -> Claimant | None:
    """Say which other process holds a claim; None if none does. Disturbs nobody who holds it.

    Not for a process that itself holds the claim: closing the file would let go of its lock.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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


def _lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise NoLocksError(error.errno, error.strerror) from error
        raise
    return True


def _this_process() -> Claimant:
    job = next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), "")
    return Claimant(os.getpid(), socket.gethostname(), job, time.time())
