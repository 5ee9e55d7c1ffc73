"""Directories and files of a cache in which no other user of the machine can have had a hand.

A cache root may be one in which others write too, as in /tmp. What lies there is believed, and
written to, if it is this user's own, or one's whom this user has to trust: root's, or, to read, of
whoever owns the root that was named. From the root on, directories are opened one in the other by
their handles, no link is followed, and nobody else may write in them; so what was checked stays.
"""

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from dataio.base.errors import CacheError

TRUST_VARIABLE = "TONARI_TRUST_CACHE"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def trusts_everyone() -> bool:
    """Whether this user says that whoever may write in the cache root is to be trusted."""
    return os.environ.get(TRUST_VARIABLE) == "1"


def others_may_write(status: os.stat_result) -> bool:
    """Whether another user may, but for root; the group that is a user's own counts as the user."""
    mode = status.st_mode
    return bool(mode & 0o002 or (mode & 0o020 and not _is_group_of_one(status)))


def _is_group_of_one(status: os.stat_result) -> bool:
    # Where each user has a group of that name, umask is often 002.
    with contextlib.suppress(KeyError):
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid)
        alone = group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
        return alone and group.gr_gid == user.pw_gid
    return False


def check_root(root: Path, *, follows: bool) -> None:
    """Refuse a cache root in which other users could replace directories of this one.

    Args:
        root: It exists.
        follows: Whether it may be a symbolic link, as one that somebody named.

    Raises:
        CacheError: If it is one.
    """
    status = root.stat() if follows else root.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise CacheError(
            f"cache directory {root} is a symbolic link of user {status.st_uid}, expected a "
            "directory; remove it, or give another directory (cache=..., TONARI_CACHE)"
        )
    if others_may_write(status) and not status.st_mode & stat.S_ISVTX and not trusts_everyone():
        raise CacheError(
            f"cache directory {root} of user {status.st_uid} has mode {_mode(status)}: other users "
            f"could replace what user {os.getuid()} keeps there; expected one that they cannot "
            f"write, or with the sticky bit; run `chmod go-w {root}` or `chmod +t {root}`, give a "
            f"directory of your own (cache=..., TONARI_CACHE), or set {TRUST_VARIABLE}=1 if all "
            "who may write there are to be trusted"
        )


def distrust(root: Path, directory: Path) -> str:
    """Say why what lies in a dataset's directory of another user is not read; "" if it may be."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"it is no directory, and belongs to user {status.st_uid}"
    if trusts_everyone():
        return ""
    if status.st_uid not in (os.getuid(), 0, root.stat().st_uid):
        return (
            f"it belongs to user {status.st_uid}, who is neither this one, nor root, nor the owner "
            f"of {root}; {TRUST_VARIABLE}=1 says that all who may write there are to be trusted"
        )
    if others_may_write(status):
        return f"it has mode {_mode(status)}, and others than user {status.st_uid} may write there"
    return ""


def make_own(directory: Path) -> None:
    """Create a node's cache directory, and the two above it, for this user alone; or check them.

    Raises:
        CacheError: If one of them, or a file in it, is not this user's alone.
        FileNotFoundError: If somebody removed one meanwhile.
    """
    home, root = directory.parents[:2]
    root.mkdir(mode=0o700, exist_ok=True)
    with _walked(root, (home, directory), make=True) as found:
        for level, descriptor in found:
            _check_directory(level, os.fstat(descriptor), {os.getuid()})
        _check_files(directory, found[-1][1], {os.getuid()}, to_write=True)


def check_readable(directory: Path) -> None:
    """Refuse a node's cache directory that another user than its root's owner may have prepared.

    Raises:
        CacheError: If it is one.
        FileNotFoundError: If it is not there.
    """
    home, root = directory.parents[:2]
    trusted = {os.getuid(), 0, root.stat().st_uid}
    with _walked(root, (home, directory), make=False) as found:
        for level, descriptor in found:
            _check_directory(level, os.fstat(descriptor), trusted)
        _check_files(directory, found[-1][1], trusted, to_write=False)


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[int]:
    """Open a node's cache directory by way of the two above it, of which no link is followed.

    Raises:
        CacheError: If there is one.
        OSError: If it cannot be opened.
    """
    home, root = directory.parents[:2]
    with _walked(root, (home, directory), make=False) as found:
        yield found[-1][1]


def own_subdirectory(root: Path, names: tuple[str, ...]) -> Path | None:
    """Find or make the first of some directories that is this user's alone; None if none is."""
    for name in names:
        path = root / name
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError:
            return None
        status = path.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_own and (not others_may_write(status) or trusts_everyone()):
            return path
    return None


def check_own_file(path: Path) -> None:
    """Refuse a file that is not this user's alone.

    Raises:
        CacheError: If it is not.
        FileNotFoundError: If it is not there.
    """
    _check_file(path, path.lstat(), {os.getuid()}, to_write=False)


def open_own(name: str, flags: int, *, directory: Path, descriptor: int | None = None) -> int:
    """Open a file that is nobody else's, in a directory; a new one is made for this user alone.

    Args:
        name: Of the file.
        flags: As of `os.open`; only to read, another user's is opened too.
        directory: Where it lies, for messages.
        descriptor: Of that directory; None: found by its path.

    Raises:
        CacheError: If it is a link, no file, another user's, or one with other names.
        OSError: If it cannot be opened.
    """
    path = directory / name
    writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
    try:
        where = name if descriptor is not None else path
        found = os.open(where, flags | _FILE, 0o600, dir_fd=descriptor)
    except OSError as error:
        if path.is_symlink():
            raise _refused(path, path.lstat(), "is a symbolic link") from error
        raise
    try:
        owners = {os.getuid()} if writes else None
        _check_file(path, os.fstat(found), owners, to_write=writes)
    except BaseException:
        os.close(found)
        raise
    return found


@contextlib.contextmanager
def _walked(
    root: Path, levels: tuple[Path, ...], *, make: bool
) -> Iterator[list[tuple[Path, int]]]:
    """Open directories one in the other, from the root on: no link is followed below it."""
    with contextlib.ExitStack() as closing:
        above = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        closing.callback(os.close, above)
        found = []
        for level in levels:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(level.name, 0o700, dir_fd=above)
            try:
                above = os.open(level.name, _DIRECTORY, dir_fd=above)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                raise _refused(level, level.lstat(), "is no directory") from error
            closing.callback(os.close, above)
            found.append((level, above))
        yield found


def _check_directory(path: Path, status: os.stat_result, owners: set[int]) -> None:
    if trusts_everyone():
        return
    if status.st_uid not in owners:
        raise _refused(path, status, "is another user's")
    if others_may_write(status):
        raise _refused(path, status, "may be written by others")


def _check_files(directory: Path, descriptor: int, owners: set[int], *, to_write: bool) -> None:
    for name in os.listdir(descriptor):
        # Another job of this user's may replace its manifests meanwhile.
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                _check_file(directory / name, status, owners, to_write=to_write)


def _check_file(
    path: Path, status: os.stat_result, owners: set[int] | None, *, to_write: bool
) -> None:
    """Refuse a file by what it is; what others may write is never written to, nor believed."""
    if stat.S_ISLNK(status.st_mode):
        raise _refused(path, status, "is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise _refused(path, status, "is no file")
    if to_write and status.st_nlink > 1:
        raise _refused(path, status, f"has {status.st_nlink} names (hard links)")
    if trusts_everyone() or owners is None:
        return
    if status.st_uid not in owners:
        raise _refused(path, status, "is another user's")
    if others_may_write(status):
        raise _refused(path, status, "may be written by others")


def _refused(path: Path, status: os.stat_result, found: str) -> CacheError:
    own = f"user {os.getuid()}'s own" if status.st_uid != os.getuid() else "this user's own"
    return CacheError(
        f"{path}: {found}, found owner {status.st_uid} and mode {_mode(status)}, expected "
        f"{own} file or directory that nobody else may write: somebody may have put it there; "
        "look at it, then remove it (of a cache, the next run stages it again), or "
        "`chmod go-w` it, or give another cache directory (cache=..., TONARI_CACHE)"
    )


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"
