"""What a run did: JSON lines and TensorBoard on disk, and a line on rank 0's terminal."""

import importlib.util
import logging
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Self

from dataio.base.errors import install_command
from dataio.base.lines import checked_line, parse_checked_line
from tonari.trainer.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from torch.utils.tensorboard.writer import SummaryWriter

logger = logging.getLogger(__name__)
Line = Mapping[str, str | int | float | None]
"""One object of the log. Times are ``*_s``, sizes ``*_bytes``, shares ``*_fraction``."""


class MetricsLog:
    """Appends one JSON object a line; each is on disk before the next step. For one rank.

    Each has a ``checksum``, which `dataio.base.lines` checks: a figure that has changed is not
    taken for one that was measured.

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

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, line: Line) -> None:
        """Append a line; what is not finite is written as null, which every reader takes."""
        finite = {name: value if _is_finite(value) else None for name, value in line.items()}
        self._file.write(checked_line(finite) + "\n")


class Board:
    """Writes every number of a line for TensorBoard, under its kind. For one rank.

    Args:
        directory: Of the event files.

    Raises:
        ConfigError: If TensorBoard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        self._writer = import_writer()(str(directory))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, line: Line) -> None:
        """Add a line's numbers at its step."""
        for name, value in numbers(line).items():
            self._writer.add_scalar(name, value, line["step"])


def numbers(line: Line) -> dict[str, float]:
    """Name a line's numbers ``kind/name``, for what shows figures over steps."""
    return {
        f"{line['kind']}/{name}": value
        for name, value in line.items()
        if isinstance(value, int | float) and name not in ("epoch", "step")
    }


def import_writer() -> "type[SummaryWriter]":
    """Import what writes for TensorBoard.

    Raises:
        ConfigError: If TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"run.tensorboard is true, but tensorboard cannot be imported ({error}); "
            f"{install_command('tensorboard')}, or set run.tensorboard=false: metrics.jsonl "
            "has the same figures"
        ) from error
    return SummaryWriter


BAR_FIGURES = 4
"""So many of a step's figures stand beside a bar: epoch, step, loss, speed."""
SAY_S = 60.0
"""Between two lines on recent steps in a log."""


class ProgressLine:
    """Says on standard error how far an epoch is: on a terminal by a bar, in a log by lines."""

    def __init__(self, *, shown: bool) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._speaks = self._is_log = shown
        self._next = time.monotonic() + SAY_S
        if shown and sys.stderr.isatty() and importlib.util.find_spec("rich"):
            import rich.console
            import rich.progress as columns

            self._is_log = False
            self._bar = columns.Progress(
                columns.BarColumn(12), columns.MofNCompleteColumn(), columns.TimeRemainingColumn(),
                columns.TextColumn("{task.description}"), transient=True,
                redirect_stdout=sys.stdout.isatty(), console=rich.console.Console(stderr=True),
            )  # fmt: skip

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, words: str) -> None:
        """Say what is trained."""
        if self._speaks:
            print(words, file=sys.stderr, flush=True)

    def say(self, words: str) -> None:
        """Put what fits of the words beside the bar; in a log all, once a minute."""
        if self._bar is not None:
            first = ", ".join(words.split(", ")[:BAR_FIGURES])
            self._bar.update(self._shown(self._bar), description=first)
        elif self._is_log and (now := time.monotonic()) >= self._next:
            self._next = now + SAY_S
            print(words, file=sys.stderr, flush=True)

    def count(self, step: int, *, of: int) -> None:
        """Say how far the epoch is."""
        if self._bar is not None:
            self._bar.update(self._shown(self._bar), completed=step, total=of)

    def _shown(self, bar: "Progress") -> "TaskID":
        if self._task is None:
            self._task = bar.add_task("training")
        return self._task


def progress_words(line: Line) -> str:
    """Put the figures of recent steps into the words of one line; those not known are left out."""
    shown = [
        _figure(line, "loss", "loss {:.4f}"),
        _figure(line, "samples_per_s", "{:,.0f} samples/s"),
        _figure(line, "tokens_per_s", "{:,.0f} tokens/s"),
        _figure(line, "mfu", "MFU {:.1%}"),
        _figure(line, "wait_fraction", "wait {:.0%}"),
        _figure(line, "hidden_fraction", "hidden {:.0%}"),
        _figure(line, "exchange_overlap_fraction", "overlap {:.0%}"),
    ]
    return ", ".join([f"epoch {line['epoch']}, step {line['step']}", *filter(None, shown)])


def _figure(line: Line, name: str, words: str) -> str:
    value = line.get(name)
    return "" if value is None else words.format(value)


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _bytes_until(path: Path, step: int | None) -> int:
    if step is None:
        return 0
    kept_bytes = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            later = (parse_checked_line(line) or {})["step"] > step
        except (ValueError, KeyError, TypeError) as error:
            # Figures are to be looked at: no run ends for one that cannot be.
            logger.warning(
                "[rank 0] %s: line %d is damaged (%s), expected an object with a step; it is left "
                "as it is: repair or remove it", path, number, error,
            )  # fmt: skip
            later = False
        if later:
            break
        kept_bytes += len(line)
    return kept_bytes
