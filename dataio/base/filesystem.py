"""Find on which filesystem a path lies, and choose a cache directory that is the node's own."""

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dataio.base.cgroup import memory_room
from dataio.base.errors import CacheError, DamagedCacheError, SharedFilesystemError
from dataio.base.location import bare
from dataio.base.own import check_root

log = logging.getLogger(__name__)

MOUNTINFO = Path("/proc/self/mountinfo")

SHARED = frozenset(
    "9p acfs afs beegfs ceph cifs coda cvfs fhgfs gfs gfs2 gpfs kafs lustre ncpfs nfs nfs4 ocfs2 "
    "orangefs panfs pvfs2 quobyte scoutfs smb3 smbfs vxfs wekafs yfs".split()
)
"""Types that several nodes see. Any FUSE type is one of them too, unless it is in LOCAL_FUSE."""

LOCAL_FUSE = frozenset(
    "fuse.bindfs fuse.encfs fuse.fuse-overlayfs fuse.fuse2fs fuse.gocryptfs fuse.lxcfs "
    "fuse.mergerfs fuse.ntfs-3g fuse.squashfuse fuse.squashfuse_ll fuse.unionfs fuse.zfs".split()
)

MEMORY_BACKED = frozenset({"tmpfs", "ramfs"})

MOST_RESERVE_BYTES = 1 << 30
"""Left free on the filesystem: a hundredth of it, at most this."""

SCRATCH_VARIABLES = (
    "SLURM_TMPDIR", "SLURM_JOB_TMP", "SLURM_JOB_TMPDIR", "PBS_LOCALDIR", "PBS_JOBFS", "T4TMPDIR",
    "SGE_LOCALDIR", "PJM_LOCALTMP", "LOCAL_SCRATCH", "LOCALWORKDIR", "TMPDIR", "FLUX_JOB_TMPDIR",
)  # fmt: skip
"""In order. A scheduler's or site's own name for the node's disk comes before TMPDIR, which may be
left at a /tmp in memory or at a shared directory. Flux bases its directory on TMPDIR."""


class Filesystem(NamedTuple):
    """What a path lies on."""

    type: str
    """As the kernel names it: ``"ext4"``, ``"fuse.sshfs"``; ``"unknown"`` without a mount table."""
    is_shared: bool
    """Whether other nodes see the same files."""
    mount_point: Path
    source: str
    """The device, server or label that is mounted."""
    options: tuple[str, ...] = ()
    """Of this mount, then of its filesystem, each once."""


def filesystem_of(path: Path, *, mountinfo: str | None = None) -> Filesystem:
    """Find the filesystem of a path, which need not exist yet.

    Args:
        path: A file or directory; links are followed.
        mountinfo: Text of a mount table instead of this process's.
    """
    if mountinfo is None:
        mountinfo = MOUNTINFO.read_text(errors="surrogateescape") if MOUNTINFO.exists() else ""
    resolved = path.resolve()
    found = Filesystem("unknown", False, Path("/"), "")
    for line in mountinfo.splitlines():
        mounted, _, kind = line.partition(" - ")
        mount_point = Path(_unescape(mounted.split(" ")[4]))
        deeper = len(mount_point.parts) >= len(found.mount_point.parts)
        # Equally deep: the later one was mounted over the earlier.
        if deeper and resolved.is_relative_to(mount_point):
            fs_type, source, *own = kind.split(" ")
            listed = ",".join([mounted.split(" ")[5], *own]).split(",")
            found = Filesystem(
                fs_type, is_shared(fs_type), mount_point, _unescape(source),
                tuple(dict.fromkeys(_unescape(option) for option in listed if option)),
            )  # fmt: skip
    return found


def find_directory(choice: str | None) -> Path:
    """Name the directory under which this node keeps its caches; creates and checks nothing.

    Args:
        choice: As `cache_directory` takes it.
    """
    named = _named(choice)
    check_path(named, "cache directory")
    return Path(named).expanduser().absolute() if named else _scratch_directory()


def cache_directory(choice: str | None, *, read_only: bool = False) -> Path:
    """Find and create the directory under which this node keeps its caches.

    Args:
        choice: A path, taken as it is; ``"auto"`` or None: the variable TONARI_CACHE, else
            ``tonari-<uid>`` in the first node-local scratch directory of this job, else in /tmp.
        read_only: Whether a directory that cannot be written will do: caches in it may be whole.

    Returns:
        An absolute path, created with mode 0700 if it was not there.

    Raises:
        SharedFilesystemError: If it lies on a shared filesystem.
        CacheError: If it cannot be created or written, is another user's, or one in which others
            could replace what lies there.
    """
    directory = find_directory(choice)
    _refuse_shared(directory)
    if not (read_only and os.access(directory, os.R_OK | os.X_OK)):
        _create(directory)
    named = bool(_named(choice))
    owner = directory.lstat().st_uid
    if not named and owner != os.getuid():
        raise CacheError(
            f"cache directory {directory} belongs to user {owner}, not to this one "
            f"({os.getuid()}); give another directory (cache=..., TONARI_CACHE)"
        )
    check_root(directory, follows=named)
    return directory


def room_for(directory: Path, num_bytes: int, *, reserve_bytes: int | None = None) -> int:
    """Make sure that a directory can take so much more, before work on it starts.

    Quotas of users and projects cannot be seen: where one is reached, writing fails. Files on a
    memory-backed filesystem also take from the machine's memory, and this cgroup's.

    Args:
        directory: Where the bytes will lie; it exists.
        num_bytes: How many.
        reserve_bytes: What must stay free; by default a hundredth of the filesystem, 1 GiB at most.

    Returns:
        Bytes that are left then, the reserve apart.

    Raises:
        CacheError: If there is too little room.
    """
    status = os.statvfs(directory)
    if reserve_bytes is None:
        reserve_bytes = min(status.f_blocks * status.f_frsize // 100, MOST_RESERVE_BYTES)
    free_bytes, where = status.f_bavail * status.f_frsize, "on the filesystem"
    fs_type = filesystem_of(directory).type
    if fs_type in MEMORY_BACKED:
        in_memory = memory_room()
        if in_memory is not None and in_memory < free_bytes:
            free_bytes, where = in_memory, f"in memory, which holds {fs_type}"
        elif in_memory is not None and 2 * num_bytes > in_memory:
            log.warning(
                "%s lies in memory (%s): %s of the %s that are available will be the cache's",
                directory, fs_type, _megabytes(num_bytes), _megabytes(in_memory),
            )  # fmt: skip
    left_bytes = free_bytes - reserve_bytes - num_bytes
    if left_bytes < 0:
        raise CacheError(
            f"{directory}: could not make room: needs {_megabytes(num_bytes)}, free "
            f"{_megabytes(free_bytes)} {where}, reserve {_megabytes(reserve_bytes)}; free some "
            "space or give another directory (cache=..., TONARI_CACHE)"
        )
    return left_bytes


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def is_named(choice: str | None) -> bool:
    """Whether somebody named this very directory, so that even another user's is meant."""
    return choice not in (None, "auto")


def _named(choice: str | None) -> str | None:
    return os.environ.get("TONARI_CACHE") if choice in (None, "auto") else choice


def is_shared(fs_type: str) -> bool:
    """Whether other nodes see the same files on a filesystem of this type."""
    # Sites mount parallel filesystems under FUSE names of their own: of those we do not know, a
    # wrong refusal costs one variable, a wrong trust costs the run.
    is_fuse = fs_type == "fuse" or fs_type.startswith("fuse.")
    return fs_type in SHARED or (is_fuse and fs_type not in LOCAL_FUSE)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


@dataclass(frozen=True)
class Scratch:
    """A directory that a cache could lie in, and why it does not.

    Attributes:
        name: The variable that names it; ``""`` for /tmp.
        path: Absolute.
        against: Why it is not taken; ``""`` if it would be.
    """

    name: str
    path: Path
    against: str


def scratch_directories() -> list[Scratch]:
    """Look at each directory that this job's environment names, in order, and at /tmp."""
    named = [(name, os.environ.get(name)) for name in SCRATCH_VARIABLES]
    return [
        Scratch(name, Path(path).absolute(), _against(Path(path)))
        for name, path in [*named, ("", "/tmp")]
        if path
    ]


def _against(path: Path) -> str:
    if not path.is_dir():
        return "is not there"
    if not os.access(path, os.W_OK | os.X_OK):
        return "cannot be written"
    found = filesystem_of(path)
    return f"is shared ({found.type})" if found.is_shared else ""


def _scratch_directory() -> Path:
    listed = scratch_directories()
    fit = [scratch for scratch in listed if not scratch.against]
    shared = [scratch for scratch in listed if scratch.against.startswith("is shared")]
    # Where all are shared, the first is named in the error that refuses it.
    found = [scratch.path for scratch in (*fit, *shared)] or [Path("/tmp")]
    return found[0] / f"tonari-{os.getuid()}"


def _refuse_shared(directory: Path) -> None:
    found = filesystem_of(directory)
    if found.is_shared and os.environ.get("TONARI_ALLOW_SHARED_CACHE") != "1":
        raise SharedFilesystemError(
            f"cache directory {directory} lies on {found.type} ({found.source} at "
            f"{found.mount_point}), which other nodes see too; a cache must be its node's own: "
            "choose a directory on a local disk (cache=..., TONARI_CACHE), or set "
            "TONARI_ALLOW_SHARED_CACHE=1 if each node really has its own there"
        )


def _create(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"cache directory {directory} cannot be created: {error.strerror}; make its parent "
            "writable or give another directory (cache=..., TONARI_CACHE)"
        ) from error
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise CacheError(
            f"cache directory {directory} is not writable for user {os.getuid()}; make it writable "
            "or give another directory (cache=..., TONARI_CACHE)"
        )


def check_path(path: object, where: str) -> None:
    """Refuse a URL where only a path can be: it would become a file's name.

    Raises:
        ValueError: If it is one.
    """
    if "://" in (text := str(path)):
        raise ValueError(
            f"{where} is {bare(text)}, found a URL, expected a path that this node sees; give one, "
            "and copy from or to the URL by other means"
        )


def _free_words(directory: Path) -> str:
    try:
        disk = shutil.disk_usage(directory)
    except OSError:
        return "how much is free cannot be read"
    return f"{disk.free / 1e6:,.0f} of {disk.total / 1e6:,.0f} MB are free"


@contextlib.contextmanager
def named(directory: Path, doing: str) -> Iterator[None]:
    """Turn an error of the disk within into a `CacheError` with directory and cure."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cure = (
                "free some space or give another directory (cache=..., TONARI_CACHE), or keep "
                f"fewer rows there (dataio.NodeCache(quota=...)); {_free_words(directory)}"
            )
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
