"""The checkpoints of a run as directories: which are there, how far each had come, which go."""

import logging
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from dataio.base.atomic import read_record, write_record
from dataio.base.errors import DamagedFileError
from tonari.trainer.checkpoint.agree import together
from tonari.trainer.checkpoint.sums import MANIFEST
from tonari.trainer.errors import CheckpointError, ConfigError

NAME = re.compile(r"step-\d{8}")
PARTIAL = re.compile(r"step-\d{8}\.partial")
PROGRESS = "progress.json"
EVALUATIONS = "evaluations"
"""In a run's directory: what other processes evaluate; see `tonari.trainer.run.beside`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        epochs: Those that are done.
        steps: Those that are done.
        so_far: Figures of the running epoch, from `Meter.so_far`.
        skipped: Of the steps, those whose rows were passed over: pairs of a first one, and the one
            behind the last.
    """

    epochs: int = 0
    steps: int = 0
    so_far: dict[str, float] = field(default_factory=dict)
    skipped: list[list[int]] = field(default_factory=list)

    def stepped(self) -> "Progress":
        """Count a step."""
        return Progress(self.epochs, self.steps + 1, self.so_far, self.skipped)


def read_progress(path: Path) -> Progress:
    """Read how far the run of a checkpoint had come.

    Raises:
        ConfigError: If ``path`` is not a whole checkpoint.
    """
    try:
        return Progress(**read_record(path / PROGRESS))
    except (OSError, DamagedFileError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a whole checkpoint: {error}; give a step-NUMBER directory of a run's "
            "checkpoints, or --resume auto for the newest"
        ) from error


def whole_checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints that have their name, from the oldest to the newest."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))


def latest(directory: Path) -> Path | None:
    """Find the newest whole checkpoint of a run, damaged or not."""
    found = whole_checkpoints(directory)
    return found[-1] if found else None


def begin(partial: Path, progress: Progress) -> None:
    """Make the directory that a checkpoint is written into, anew if a kill left one."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_record(partial / PROGRESS, asdict(progress))


def remove_old(directory: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, and what kills left of others."""
    for path in whole_checkpoints(directory)[:-keep]:
        if not (path / MANIFEST).exists():
            continue  # Of no run.
        # Renamed first: a kill here must not leave half a checkpoint under a whole one's name.
        path.rename(path.with_suffix(".partial"))
    for path in directory.iterdir():
        if PARTIAL.fullmatch(path.name):
            shutil.rmtree(path)


def set_aside(damaged: list[tuple[Path, CheckpointError]], taken: Path) -> None:
    """Rename damaged checkpoints, with a warning that names the one to go on from."""
    for path, error in damaged:
        aside = _rename(path, ".damaged")
        logger.warning(
            "[rank 0] %s; ignored, and renamed to %s: going on from %s",
            error, aside.name, taken.name,
        )  # fmt: skip


def set_aside_later(directory: Path, taken: Path) -> None:
    """Rename the checkpoints of steps that the run will come to again. Collective.

    Where a run goes on from an older checkpoint, those after it belong to another course:
    they would block its own, and the newest would be taken for the end of the run.

    Args:
        directory: Of all checkpoints of the run.
        taken: The one that was restored.
    """
    together(lambda: _leave_later(directory, taken) if dist.get_rank() == 0 else None)


def _leave_later(directory: Path, taken: Path) -> None:
    for path in whole_checkpoints(directory):
        if path.name >= taken.name and path.resolve() != taken.resolve():
            aside = _rename(path, ".later")
            logger.warning(
                "[rank 0] %s: renamed to %s: the run goes on from %s, and comes to this step again",
                path, aside.name, taken,
            )  # fmt: skip


def _rename(path: Path, suffix: str) -> Path:
    aside = path.with_suffix(suffix)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside
