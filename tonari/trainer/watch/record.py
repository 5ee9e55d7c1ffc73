"""What a run notes of itself in its directory: when it was started, on what, and how it ended."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from dataio.base.atomic import read_record, write_record
from dataio.base.claim import claimant
from tonari.trainer.checkpoint.directory import whole_checkpoints

logger = logging.getLogger(__name__)

NAME, CLAIM, METRICS = "run.json", "run.lock", "metrics.jsonl"
"""In a run's directory: the record, what the process holds that writes the run, its metrics."""
COMPLETE = "complete"


@dataclass
class Start:
    """One start of a run.

    Attributes:
        at_s: When, in seconds since 1970.
        ranks: On how many.
        from_step: Optimizer steps that were done already.
        ended_s: When it ended; None: it runs, or was killed.
        how: `COMPLETE`, ``"stopped by SIGTERM"``, or the error that ended it; empty as ``ended_s``.
    """

    at_s: float
    ranks: int
    from_step: int = 0
    ended_s: float | None = None
    how: str = ""


@dataclass
class Record:
    """A run as its directory describes it.

    Attributes:
        starts: The first, and each that went on.
        planned_steps: Optimizer steps at the run's end.
        metrics: File of its metrics; relative: in the run's directory.
        ids: Under which it is known to others, by the name of the key that asks for it.
    """

    starts: list[Start]
    planned_steps: int = 0
    metrics: str = METRICS
    ids: dict[str, str] = field(default_factory=dict)


def read_run(directory: Path) -> Record:
    """Read what a run noted.

    Raises:
        DamagedFileError: If it is damaged.
        OSError: If it cannot be read: the directory is none of a run.
    """
    stored = read_record(directory / NAME)
    return Record(**{**stored, "starts": [Start(**start) for start in stored["starts"]]})


def state_of(directory: Path, starts: list[Start]) -> str:
    """Find what became of a run: ``running``, ``complete``, ``stopped``, ``failed``.

    One that was stopped, or killed behind a checkpoint, can go on.

    Not for the process that runs it, see `claimant`.
    """
    how = starts[-1].how
    if claimant(directory / CLAIM):
        return "running"
    if how == COMPLETE:
        return COMPLETE
    # Without a word: it was killed
    can_go_on = not how and whole_checkpoints(directory / "checkpoints")
    return "stopped" if can_go_on or how.startswith("stopped") else "failed"


class Noted:
    """Keeps a run's record while a start of it is open. For one rank.

    Attributes:
        record: What is noted.
        how: As `end` was told; empty before.
    """

    def __init__(
        self, directory: Path, record: Record, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.record, self.how = record, ""
        self._path, self._clock = directory / NAME, clock

    def __enter__(self) -> Self:
        self.write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        start = self.record.starts[-1]
        start.ended_s = self._clock()
        start.how = self.how or f"{kind.__name__ if kind else 'ended'}: {error}"
        try:
            self.write()
        except OSError as unwritten:
            if error is None:
                raise
            # What ended the run is worth more: a full disk is often both.
            logger.warning("%s: how the run ended could not be noted (%s)", self._path, unwritten)

    def end(self, how: str, steps: int) -> None:
        """Say that the run has ended well, as `Start` has it, after so many steps."""
        self.how = how
        if how == COMPLETE:  # epochs that hide samples have fewer steps than was planned
            self.record.planned_steps = steps

    def write(self) -> None:
        """Replace the file."""
        write_record(self._path, asdict(self.record))


def seconds_of(start: Start, *, alive_s: float) -> float:
    """Say how long a start took, or has taken so far.

    Args:
        start: Which.
        alive_s: The last time at which it is known to have run, where it did not end by itself.
    """
    return max((start.ended_s or alive_s) - start.at_s, 0.0)


Settings = Mapping[str, Mapping[str, object]]
"""A run's ``config.json``: its tables."""
