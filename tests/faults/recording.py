"""Record what a job does to a directory, so that each state a kill or power cut leaves is known."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_digest

from dataio.store.files.store import FixedFile

Files = Mapping[str, bytes]
"""Content by path below the root."""

KINDS = ("kill", "cut", "names", "bytes")
"""What is there after: a kill, all that was written; a power cut, only what was flushed; or one
that kept the names and lost the bytes, or the other way round."""


@dataclass(frozen=True)
class State:
    """A directory at one moment, as one kind of end leaves it.

    Attributes:
        before: The operation that was not done any more.
        kind: Of the end, one of `KINDS`.
        files: What is there.
        mark: What `Recorder.mark` was at that moment.
    """

    before: str
    kind: str
    files: Files
    mark: Any

    def restore(self, root: Path) -> None:
        """Write the files below a new root."""
        root.mkdir(mode=0o700)
        for name, data in self.files.items():
            path = root / name
            for level in reversed(path.relative_to(root).parents):
                (root / level).mkdir(mode=0o700, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o600)

    def __str__(self) -> str:
        return f"{self.kind} before {self.before}, at {self.mark}"


@dataclass
class Recorder:
    """The states of all files below ``root``, before each operation on them.

    Operations on them wait for one another: a state is never one amid an operation, but for writes,
    which are done in two halves. Flushes are only noted, to be quick.

    Attributes:
        root: The directory; directories in it are taken to be durable once they are there.
        mark: Kept with each state.
        states: What was recorded; equal ones once.
        num_operations: How many were done.
        whole_bytes: A write of no more is done at once.
    """

    root: Path
    mark: Any = None
    states: list[State] = field(default_factory=list)
    num_operations: int = 0
    whole_bytes: int = 1
    _lock: Any = field(default_factory=threading.RLock)
    _blobs: dict[bytes, bytes] = field(default_factory=dict)
    _seen: set[Any] = field(default_factory=set)
    # A number for each file ever made: inodes are used again.
    _numbers: dict[int, int] = field(default_factory=dict)
    _next: Iterator[int] = field(default_factory=itertools.count)
    _durable_bytes: dict[int, bytes] = field(default_factory=dict)
    _durable_names: dict[str, dict[str, int]] = field(default_factory=dict)

    @contextlib.contextmanager
    def recording(self) -> Iterator["Recorder"]:
        """Record what is done within; what is there already is durable."""
        for directory in [self.root, *(p for p in self.root.rglob("*") if p.is_dir())]:
            self._keep_names(directory)
        for path in self._paths():
            self._keep_bytes(path)
        with contextlib.ExitStack() as undo:
            for name in ("replace", "unlink", "truncate", "open", "posix_fallocate", "pwrite"):
                undo.enter_context(self._patched(name))
            for name in ("fsync", "fdatasync"):
                undo.enter_context(_set(os, name, self._flush(name)))
            undo.enter_context(_set(FixedFile, "write", self._store(FixedFile.write)))
            yield self
        self._capture("the end")

    def _patched(self, name: str) -> Any:
        return _set(os, name, getattr(self, f"_{name}")(getattr(os, name)))

    def _replace(self, then: Any) -> Any:
        def replace(source: Any, target: Any, **options: Any) -> None:
            with self._operation("replace", target):
                self._forget(target)
                then(source, target, **options)

        return replace

    def _unlink(self, then: Any) -> Any:
        def unlink(path: Any, **options: Any) -> None:
            with self._operation("unlink", path):
                self._forget(path)
                then(path, **options)

        return unlink

    def _truncate(self, then: Any) -> Any:
        def truncate(path: Any, length: int) -> None:
            with self._operation("truncate", path):
                then(path, length)

        return truncate

    def _open(self, then: Any) -> Any:
        def open_(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
            if not flags & os.O_CREAT:
                return int(then(path, flags, mode, **options))
            with self._operation("create", path):
                return int(then(path, flags, mode, **options))

        return open_

    def _posix_fallocate(self, then: Any) -> Any:
        def posix_fallocate(descriptor: int, offset: int, length: int) -> None:
            with self._operation("claim", _path_of(descriptor)):
                then(descriptor, offset, length)

        return posix_fallocate

    def _pwrite(self, then: Any) -> Any:
        def pwrite(descriptor: int, data: Any, offset: int) -> int:
            path = _path_of(descriptor)
            half = len(data) // 2 if len(data) > self.whole_bytes else 0
            with self._operation("write", path):
                done = int(then(descriptor, data[:half], offset)) if half else 0
            with self._operation("write the rest of", path):
                return done + int(then(descriptor, data[done:], offset + done))

        return pwrite

    def _store(self, then: Any) -> Any:
        def write(file: FixedFile, positions: Any, rows: Any) -> None:
            half = len(positions) // 2
            with self._operation("store in", file.path):
                then(file, positions[:half], rows[:half])
            with self._operation("store the rest in", file.path):
                then(file, positions[half:], rows[half:])

        return write

    def _flush(self, name: str) -> Any:
        def flush(descriptor: int) -> None:
            path = Path(_path_of(descriptor))
            with self._operation(name, path):
                if not self._is_ours(path):
                    return
                if path.is_dir():
                    self._keep_names(path)
                else:
                    self._keep_bytes(path)

        return flush

    @contextlib.contextmanager
    def _operation(self, name: str, path: Any) -> Iterator[None]:
        if not self._is_ours(path):
            yield
            return
        with self._lock:
            self.num_operations += 1
            self._capture(f"{name} {Path(os.fsdecode(path)).relative_to(self.root)}")
            yield

    def _is_ours(self, path: Any) -> bool:
        return isinstance(path, (str, Path)) and Path(path).is_relative_to(self.root)

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    def _number(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._numbers:
            self._numbers[inode] = next(self._next)
        return self._numbers[inode]

    def _forget(self, path: Any) -> None:
        if Path(path).exists():
            self._numbers.pop(Path(path).stat().st_ino, None)

    def _read(self, path: Path) -> bytes:
        data = path.read_bytes()
        return self._blobs.setdefault(xxh3_128_digest(data), data)

    def _keep_bytes(self, path: Path) -> None:
        self._durable_bytes[self._number(path)] = self._read(path)

    def _keep_names(self, directory: Path) -> None:
        self._durable_names[str(directory.relative_to(self.root))] = {
            path.name: self._number(path) for path in directory.iterdir() if path.is_file()
        }

    def _capture(self, before: str) -> None:
        paths = {str(path.relative_to(self.root)): path for path in self._paths()}
        numbers = {name: self._number(path) for name, path in paths.items()}
        seen = {name: self._read(path) for name, path in paths.items()}
        by_number = {numbers[name]: data for name, data in seen.items()}
        durable = self._durable_bytes
        flushed = {
            str(Path(directory, name)): number
            for directory, names in self._durable_names.items()
            for name, number in names.items()
        }
        self._add(before, "kill", seen)
        # What has a name and was never flushed may be empty.
        self._add(before, "cut", {n: durable.get(i, b"") for n, i in flushed.items()})
        self._add(before, "names", {n: durable.get(i, b"") for n, i in numbers.items()})
        self._add(
            before, "bytes",
            {n: by_number.get(i, durable.get(i, b"")) for n, i in flushed.items()},
        )  # fmt: skip

    def _add(self, before: str, kind: str, files: Files) -> None:
        # Who held the lock is told by process and time: no two are equal.
        told = {name: id(data) for name, data in files.items() if not name.endswith("/lock")}
        key = (repr(self.mark), frozenset(told.items()))
        if key not in self._seen:
            self._seen.add(key)
            self.states.append(State(before, kind, files, self.mark))


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())
