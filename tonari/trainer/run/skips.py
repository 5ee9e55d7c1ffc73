"""Optimizer steps whose rows a run passes over, as those of a spike of the loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tonari.trainer.checkpoint.directory import Progress, read_progress
from tonari.trainer.errors import ConfigError


def parse_skips(texts: Sequence[str]) -> tuple[range, ...]:
    """Read what ``--skip-steps`` was given.

    Raises:
        ConfigError: If one is not A:B with 1 <= A < B, or two overlap.
    """
    found = []
    for text in texts:
        first, _, stop = text.partition(":")
        if not (first.isdecimal() and stop.isdecimal() and 1 <= int(first) < int(stop)):
            raise ConfigError(
                f"--skip-steps {text}: expected A:B with 1 <= A < B, optimizer steps as "
                "metrics.jsonl counts them, from A up to and without B; give for example "
                "--skip-steps 41200:41250"
            )
        found.append(range(int(first), int(stop)))
    found.sort(key=lambda steps: steps.start)
    for one, other in pairwise(found):
        if other.start < one.stop:
            raise ConfigError(
                f"--skip-steps {_words(one)} and {_words(other)} overlap, expected steps that are "
                "named once; give one range for both"
            )
    return tuple(found)


@dataclass(frozen=True)
class Skips:
    """Steps that a run has yet to pass over.

    Attributes:
        ranges: Ascending; the first step of a run is 1.
    """

    ranges: tuple[range, ...] = ()

    def fits(self, path: Path) -> bool:
        """Whether a checkpoint trained none of the steps; one that cannot be read is kept."""
        try:
            return self._trained(read_progress(path)) is None
        except ConfigError:
            return True

    def after(self, progress: Progress, *, path: Path | None = None) -> "Skips":
        """Find what a run that has come so far has yet to pass over.

        Args:
            progress: Of the checkpoint.
            path: The checkpoint, for messages.

        Raises:
            ConfigError: If it trained some of the steps.
        """
        trained = self._trained(progress)
        if trained is not None:
            raise ConfigError(
                f"--skip-steps {_words(trained)}: {path} has {progress.steps} steps behind it, "
                f"expected a checkpoint of step {trained.start - 1} or before; give such a one as "
                "--resume PATH, or leave --resume out to have the newest that fits"
            )
        left = (steps for steps in self.ranges if not _is_in(steps, progress))
        return Skips(tuple(left))

    def check(self, *, last: int, run_ends: bool) -> None:
        """Refuse steps that cannot be passed over.

        Args:
            last: The last step of an epoch, or of the run.
            run_ends: Whether it is the run's, or an upper bound of it.

        Raises:
            ConfigError: If some are of two epochs, or none is left to be trained behind them.
        """
        for steps in self.ranges:
            if run_ends and steps.stop > last:
                raise ConfigError(
                    f"--skip-steps {_words(steps)}: the run's last step is {last}, expected steps "
                    "before it, with one behind them to go on with; give smaller numbers, or a "
                    "longer run"
                )
            if steps.start <= last < steps.stop - 1:
                raise ConfigError(
                    f"--skip-steps {_words(steps)}: an epoch ends with step {last}, expected steps "
                    f"of one epoch; give --skip-steps {steps.start}:{last + 1} --skip-steps "
                    f"{last + 1}:{steps.stop}"
                )

    def from_step(self, step: int) -> int:
        """Count the steps to pass over from a step on."""
        return next((len(steps) for steps in self.ranges if steps.start == step), 0)

    def _trained(self, progress: Progress) -> range | None:
        """Find the first range of which steps were trained."""
        for steps in self.ranges:
            if progress.steps >= steps.start and not _is_in(steps, progress):
                return steps
        return None


def _is_in(steps: range, progress: Progress) -> bool:
    return [steps.start, steps.stop] in progress.skipped


def _words(steps: range) -> str:
    return f"{steps.start}:{steps.stop}"
