"""The files of a rehearsal: operations are points, and a crash undoes what was not flushed."""

import contextlib
import os
import random  # noqa: TID251 - of no sample: of what a disk keeps
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.recording import Files, Recorder, State, _path_of, _set
from tests.rehearsal.audit import check_quota
from tests.rehearsal.scheduler import Scheduler

TEMPORARY = re.compile(
    r"-\w{8}(?=\.npy)|(?<=live|laim)-[0-9a-f]{8}|(?<=samples---tar-)\w{12}|(?<=/indexes)/\S+"
)
"""What is drawn of a file's name, or comes from the root's: another one in each course."""
PIECE_BYTES = 64
"""What a disk, and a process that is killed, writes whole or not at all: files are small, too."""


class Disks(Recorder):
    """All files below a root, real ones, on which each operation is a point of the scheduler.

    Args:
        root: The directory.
        scheduler: Of the rehearsal.
        quota_bytes: What each node's cache may take; None: what there is.
    """

    def __init__(self, root: Path, scheduler: Scheduler, *, quota_bytes: int | None = None) -> None:
        super().__init__(root, whole_bytes=PIECE_BYTES)
        self._scheduler, self._quota_bytes = scheduler, quota_bytes
        self._prefix = f"{root}/"
        self._open_by: dict[int, int] = {}
        self._left: dict[str, Files] = {}
        self._renamed: list[tuple[Path, Path]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator["Disks"]:
        """Put this in place of what changes files, within."""
        with super().recording(), _set(os, "open", self._noting(os.open)):
            with _set(os, "close", self._forgetting(os.close)):
                yield self

    def crash(self, kind: str) -> None:
        """Leave what an end of all machines leaves, as `recording.KINDS` names them.

        ``"torn"``: of what was not flushed, each directory's names and each piece of a file may be
        there or not.
        """
        self._capture(kind)
        if kind == "kill":
            return
        if kind == "torn":
            self._left[kind] = dict(self._tear())
        left = {name: data for name, data in self._left[kind].items() if not _is_log(name)}
        left |= {name: data for name, data in self._left["kill"].items() if _is_log(name)}
        aside = self.root.with_name(self.root.name + ".before")
        self.root.rename(aside)
        State(kind, kind, left, None).restore(self.root)
        shutil.rmtree(aside)
        self._numbers.clear()
        self._durable_bytes.clear()
        self._durable_names.clear()
        self._renamed.clear()
        for directory in [self.root, *(p for p in self.root.rglob("*") if p.is_dir())]:
            self._keep_names(directory)
        for path in self._paths():
            self._keep_bytes(path)

    def _tear(self) -> Iterator[tuple[str, bytes]]:
        draw, left = self._scheduler.random, self._left
        directories = sorted({str(Path(name).parent) for kind in left.values() for name in kind})
        for directory in directories:
            new, old = draw.choice([("kill", "names"), ("bytes", "cut")])
            for name in sorted(name for name in left[new] if str(Path(name).parent) == directory):
                data, before = left[new][name], left[old][name]
                yield name, data if data == before else _mixed(draw, data, before)

    def close_all(self, rank: int | None = None) -> None:
        """Close what killed processes had open, or one of them: their locks are free."""
        for descriptor in [d for d, its in self._open_by.items() if rank in (None, its)]:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            self._open_by.pop(descriptor, None)

    def _replace(self, then: Any) -> Any:
        replace_file = super()._replace(then)

        def replace(source: Any, target: Any, **options: Any) -> None:
            replace_file(source, target, **options)
            if Path(target).is_dir():
                self._renamed.append((Path(source), Path(target)))

        return replace

    def _keep_names(self, directory: Path) -> None:
        # A directory has its old name for as long as the one that it lies in is not flushed.
        for source, target in [each for each in self._renamed if each[1].parent == directory]:
            self._renamed.remove((source, target))
            before, after = (str(path.relative_to(self.root)) for path in (source, target))
            for name in [
                n for n in self._durable_names if n == before or n.startswith(f"{before}/")
            ]:
                self._durable_names[after + name[len(before) :]] = self._durable_names.pop(name)
        # Nor are there names in one that is gone from it.
        below = [n for n in self._durable_names if directory in (self.root / n).parents]
        for name in below:
            child = (self.root / name).relative_to(directory).parts[0]
            if not (directory / child).exists():
                del self._durable_names[name]
        super()._keep_names(directory)

    def _add(self, before: str, kind: str, files: Files) -> None:
        self._left[kind] = files

    @contextlib.contextmanager
    def _operation(self, name: str, path: Any) -> Iterator[None]:
        if not self._is_ours(path):
            yield
            return
        self.num_operations += 1
        relative = os.fspath(path)[len(self._prefix) :]
        self._scheduler.point(f"{name} {TEMPORARY.sub('', relative)}")
        yield
        if self._quota_bytes is not None and relative.startswith("cache/"):
            check_quota(Path(path).parent, self._quota_bytes)

    def _is_ours(self, path: Any) -> bool:
        return isinstance(path, (str, Path)) and f"{path}/".startswith(self._prefix)

    def _noting(self, then: Callable[..., int]) -> Callable[..., int]:
        def open_(path: Any, flags: int, *args: Any, **options: Any) -> int:
            descriptor = then(path, flags, *args, **options)
            task = self._scheduler.task()
            if task is not None and self._is_ours(_path_of(descriptor)):
                self._open_by[descriptor] = task.rank
            return descriptor

        return open_

    def _forgetting(self, then: Callable[[int], None]) -> Callable[[int], None]:
        def close(descriptor: int) -> None:
            self._open_by.pop(descriptor, None)
            then(descriptor)

        return close


def _is_log(name: str) -> bool:
    """Whether it is of the log of rows, of which a machine that fails may lose some."""
    return name.startswith("rows/")


def _mixed(draw: random.Random, data: bytes, before: bytes) -> bytes:
    length = len(draw.choice([data, before]))
    parts = [draw.choice([data, before]) for _ in range(0, length, PIECE_BYTES)]
    pieces = [
        part[number * PIECE_BYTES : (number + 1) * PIECE_BYTES].ljust(PIECE_BYTES, b"\0")
        for number, part in enumerate(parts)
    ]
    return b"".join(pieces)[:length]
