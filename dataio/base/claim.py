"""Claims on files: locks that die with their owner, on one machine or over a shared filesystem.

A claim is a POSIX lock on a file, which holds over the nodes of every filesystem whose locks do
(NFS, GPFS; Lustre mounted with `flock`). The file's text names the owner, to be shown to others;
only the lock itself decides, and what a dead owner left behind counts for nothing. Claim files are
never removed: removing one could part two processes that both hold it.
"""

import contextlib
import errno
import fcntl
import getpass
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "PJM_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")
"""Of batch systems, the variable that has the job's number."""

# C's struct flock: l_type, l_whence, l_start, l_len, l_pid
FLOCK = "hhqqi"


@dataclass(frozen=True)
class Claimant:
    """A process that holds a lock, as it named itself.

    Attributes:
        pid: Its number; 0: it left no name.
        host: Where it runs.
        job: Its number with the batch system, if there is one.
        since_s: When it named itself, in seconds since 1970.
        user: Whose it is, where that is shown.
        mode: What it does, where that is shown.
    """

    pid: int
    host: str
    job: str
    since_s: float
    user: str = ""
    mode: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "a process that left no name"
        process, job = f"process {self.pid} on {self.host}", f", job {self.job}" if self.job else ""
        if not self.mode:
            return process + job
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s))
        return f"{process} (user {self.user}{job}), {self.mode} since {since}"

    def may_live(self) -> bool:
        """Whether the process is there, or on another host, where it cannot be seen."""
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True  # Another user's.
        return True


UNNAMED = Claimant(0, "", "", 0.0)


def this_process(mode: str = "") -> Claimant:
    """Describe this process as one that holds a lock; its user is shown with what it does."""
    job = next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), "")
    user = _user() if mode else ""
    return Claimant(os.getpid(), socket.gethostname(), job, time.time(), user, mode)


def parse(text: bytes | str) -> Claimant | None:
    """Read how a process named itself; None: no process has written this."""
    try:
        found = Claimant(**json.loads(text))
        time.localtime(found.since_s)
    except (ValueError, TypeError, OverflowError, OSError):
        return None
    return found if isinstance(found.pid, int) else None


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
            # A full disk has no room for a name: what is written next says so.
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, json.dumps(asdict(this_process())).encode(), 0)
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
        # None: it has not signed yet.
        return parse(os.pread(descriptor, 1 << 16, 0)) or replace(UNNAMED, since_s=time.time())
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


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
