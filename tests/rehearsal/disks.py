"""The files of a rehearsal: operations are points, and a crash undoes what was not flushed."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.recording import Files, Recorder, State, _path_of, _set
from tests.rehearsal.scheduler import Scheduler


class Disks(Recorder):
    """All files below a root, real ones, on which each operation is a point of the scheduler.

    Args:
        root: The directory.
        scheduler: Of the rehearsal.
    """

    def __init__(self, root: Path, scheduler: Scheduler) -> None:
        super().__init__(root)
        self._scheduler = scheduler
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
        """Leave what an end of all machines leaves, as `recording.KINDS` names them."""
        self._capture(kind)
        if kind == "kill":
            return
        aside = self.root.with_name(self.root.name + ".before")
        self.root.rename(aside)
        State(kind, kind, self._left[kind], None).restore(self.root)
        shutil.rmtree(aside)
        self._numbers.clear()
        self._durable_bytes.clear()
        self._durable_names.clear()
        self._renamed.clear()
        for directory in [self.root, *(p for p in self.root.rglob("*") if p.is_dir())]:
            self._keep_names(directory)
        for path in self._paths():
            self._keep_bytes(path)

    def close_all(self) -> None:
        """Close what killed processes had open: their locks are free."""
        for descriptor in list(self._open_by):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._open_by.clear()

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
        super()._keep_names(directory)

    def _add(self, before: str, kind: str, files: Files) -> None:
        self._left[kind] = files

    @contextlib.contextmanager
    def _operation(self, name: str, path: Any) -> Iterator[None]:
        if self._is_ours(path):
            self.num_operations += 1
            relative = Path(os.fsdecode(path)).relative_to(self.root)
            self._scheduler.point(f"{name} {relative}")
        yield

    def _noting(self, then: Callable[..., int]) -> Callable[..., int]:
        def open_(path: Any, flags: int, *args: Any, **options: Any) -> int:
            descriptor = then(path, flags, *args, **options)
            task = self._scheduler.task()
            if task is not None and self._is_ours(Path(_path_of(descriptor))):
                self._open_by[descriptor] = task.rank
            return descriptor

        return open_

    def _forgetting(self, then: Callable[[int], None]) -> Callable[[int], None]:
        def close(descriptor: int) -> None:
            self._open_by.pop(descriptor, None)
            then(descriptor)

        return close
