"""What a run did: JSON lines on disk, and a line on rank 0's terminal while it runs."""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Line = Mapping[str, str | int | float | None]
"""One object of the log. Times are ``*_s``, sizes ``*_bytes``, shares ``*_fraction``."""


class MetricsLog:
    """Appends one JSON object a line; each is on disk before the next step. For one rank.

    Args:
        path: Made with its directory.
        after_step: Keep the lines an earlier start wrote up to this step; None keeps nothing.
    """

    def __init__(self, path: Path, *, after_step: int | None = None) -> None:
        self.path = path
        self._after_step = after_step

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a", buffering=1)
        self._file.truncate(_bytes_until(self.path, self._after_step))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, line: Line) -> None:
        """Append a line."""
        self._file.write(json.dumps(line) + "\n")


class ProgressLine:
    """Shows an epoch's steps on a terminal; where there is none, or no rich, shows nothing."""

    def __init__(self, *, shown: bool) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if shown and sys.stderr.isatty() and importlib.util.find_spec("rich"):
            import rich.console
            import rich.progress

            console = rich.console.Console(stderr=True)
            self._bar = rich.progress.Progress(console=console, transient=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, words: str, *, step: int, steps: int) -> None:
        """Say how far the epoch is."""
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(words)
        self._bar.update(self._task, description=words, completed=step, total=steps)


def _bytes_until(path: Path, step: int | None) -> int:
    if step is None:
        return 0
    kept_bytes = 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") or json.loads(line)["step"] > step:
            break
        kept_bytes += len(line)
    return kept_bytes
