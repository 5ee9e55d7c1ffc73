"""The only place that reads bytes of the source, so that each is counted and throttled."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import braceexpand
import fsspec

from dataio.errors import SourceError
from dataio.source.throttle import Throttle

SHARD_SUFFIXES = (".tar", ".parquet", ".tar.gz", ".tgz")
MAGIC = frozenset("*?[")


class _Medium(Protocol):
    size: int
    mtime_ns: int

    def pread(self, offset: int, length: int) -> bytes: ...

    def close(self) -> None: ...


class StorageFile:
    """An open file of the source. Made by `Storage.open`; any thread may read."""

    def __init__(self, path: str, medium: _Medium, storage: "Storage") -> None:
        self.path = path
        self._medium = medium
        self._storage = storage

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self._medium.size

    @property
    def in_order(self) -> bool:
        """Whether what is passed over is read all the same."""
        return False

    @property
    def mtime_ns(self) -> int:
        """Time of the last change; 0 where the storage does not tell."""
        return self._medium.mtime_ns

    def read_at(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes, fewer only at the end of the file. Blocks for the throttle.

        Raises:
            SourceError: If the storage fails.
        """
        length = max(min(length, self.size - offset), 0)
        self._storage.count(length)
        try:
            data = self._medium.pread(offset, length)
        except OSError as error:
            raise SourceError(
                f"{self.path}: reading {length} bytes at {offset} failed ({error}); check the "
                "filesystem, then start again: what was staged is kept"
            ) from error
        if len(data) != length:
            raise SourceError(
                f"{self.path}: ended at byte {offset + len(data)}, was {self.size} bytes long "
                "when opened; something is writing to it: start again when it is whole"
            )
        return data

    def close(self) -> None:
        """Give the file back."""
        self._medium.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Storage:
    """Opens files of the source and counts what is read of them. Thread-safe.

    Args:
        throttle: Slows down every request.

    Attributes:
        bytes_read: Bytes so far.
        num_opens: Files opened so far.
    """

    def __init__(self, throttle: Throttle | None = None) -> None:
        self._throttle = throttle
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.num_opens = 0

    def open(self, path: str) -> StorageFile:
        """Open a local path or a URL.

        Raises:
            SourceError: If it cannot be opened.
        """
        self.count(0, opens=1)
        try:
            medium: _Medium = _Remote(path) if "://" in path else _Local(path)
        except OSError as error:
            raise SourceError(
                f"{path}: cannot be opened ({error}), expected a readable file; check the path "
                "and its permissions on this node"
            ) from error
        return StorageFile(path, medium, self)

    def stat(self, path: str) -> tuple[int, int]:
        """Find a file's length in bytes and its time of change, without opening it.

        Raises:
            SourceError: If it cannot be found.
        """
        self.count(0)
        try:
            if "://" in path:
                return _Remote(path).size, 0
            status = Path(path).stat()
        except OSError as error:
            raise SourceError(
                f"{path}: cannot be opened ({error}), expected a readable file; check the path and "
                "its permissions on this node"
            ) from error
        return status.st_size, status.st_mtime_ns

    def exists(self, path: str) -> bool:
        """Say whether there is such a file."""
        if "://" not in path:
            return Path(path).is_file()
        system, name = _filesystem(path)
        return bool(system.isfile(name))

    def count(self, num_bytes: int, *, opens: int = 0) -> None:
        """Count a request. Blocks for the throttle."""
        with self._lock:
            self.bytes_read += num_bytes
            self.num_opens += opens
        if self._throttle is not None:
            self._throttle.take(num_bytes)


def _filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Find what reads a URL, and the name of the file there."""
    try:
        system, name = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise SourceError(
            f"{url}: cannot be opened ({error}), expected a path or a URL that fsspec knows; "
            "correct it, or install what reads it"
        ) from error
    return system, str(name)


class _Local:
    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self.mtime_ns = status.st_mtime_ns
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def pread(self, offset: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, offset)
        while len(data) < length:
            more = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def close(self) -> None:
        os.close(self._descriptor)


class _Remote:
    def __init__(self, path: str) -> None:
        self._system, self._name = _filesystem(path)
        self.size = int(self._system.info(self._name)["size"])
        self.mtime_ns = 0

    def pread(self, offset: int, length: int) -> bytes:
        return bytes(self._system.cat_file(self._name, start=offset, end=offset + length))

    def close(self) -> None:
        return None


def expand(pattern: str | Sequence[str]) -> list[str]:
    """List the shards that a pattern names.

    Args:
        pattern: A path, a brace pattern (``train-{000000..000127}.tar``), a glob, a directory,
            a URL, or several.

    Returns:
        Paths: Braces and lists in their order, globs and directories sorted.

    Raises:
        SourceError: If the pattern is empty, matches nothing, or names files that are missing.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    if not patterns or not all(patterns):
        raise SourceError(
            f"source: the shard pattern {pattern!r} is empty, expected one such as "
            f'"shards/train-{{000000..000127}}.tar"'
        )
    paths = [path for part in patterns for name in _braces(part) for path in _matches(name)]
    missing = [path for path in paths if "://" not in path and not Path(path).is_file()]
    if missing:
        raise SourceError(
            f"{missing[0]}: no such file; {len(missing)} of the {len(paths)} shards of "
            f"{pattern!r} are missing; check the pattern, and that this node sees the directory"
        )
    return paths


def _braces(pattern: str) -> list[str]:
    try:
        return list(braceexpand.braceexpand(pattern))
    except ValueError as error:
        raise SourceError(
            f"source: the braces of {pattern!r} do not match ({error}), expected something like "
            f"{{000000..000127}}"
        ) from error


def _matches(name: str) -> list[str]:
    is_glob = not MAGIC.isdisjoint(name)
    path = Path(name).expanduser()
    if "://" in name:
        if not is_glob:
            return [name]
        system, remote = _filesystem(name)
        found = [system.unstrip_protocol(match) for match in system.glob(remote)]
    elif path.is_dir():
        found = [str(child) for child in path.iterdir() if child.name.endswith(SHARD_SUFFIXES)]
    elif path.exists() or not is_glob:
        return [str(path)]
    else:
        root = Path(path.anchor)
        found = [str(match) for match in root.glob(str(path.relative_to(root)))]
    if not found:
        raise SourceError(
            f"{name}: the {'glob' if is_glob else 'directory'} holds no shard, expected files "
            f"ending in {' or '.join(SHARD_SUFFIXES)}; check the path, and that this node sees it"
        )
    return sorted(found)
