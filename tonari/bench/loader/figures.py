"""What is asked for, and what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from tonari.bench.loader.contenders import Contender
from tonari.bench.loader.sets import SampleSet

Temperature = Literal["warm", "cold"]


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How loaders are measured, as flags of the command."""

    ranks: tuple[int, ...] = (1,)
    """Ranks on this node, such as `--ranks 1 2 4`. tonari-exchanged is measured with 1 only."""
    workers: tuple[int, ...] = (0, 2)
    """Worker processes a rank, or threads where a loader has threads."""
    temperatures: tuple[Temperature, ...] = ("warm",)
    """Page cache: warm, or cold: each repeat opens the loader anew, its files evicted before."""
    repeats: int = 5
    """Epochs measured of each contender, beside the first."""
    round_s: tyro.conf.Suppress[float] = 0.5
    """Where warm, a repeat is as many epochs as fill this time."""
    time_limit_s: Annotated[float, tyro.conf.arg(name="time-limit")] = 3600.0
    """Seconds after which nothing new is begun."""
    timeout_s: Annotated[float, tyro.conf.arg(name="timeout")] = 600.0
    """Seconds that a contender may take to prepare a set, to open, or for an epoch."""


@dataclass(frozen=True, kw_only=True)
class LoaderJob:
    """What is measured, and where.

    Attributes:
        settings: How.
        sets: The sets, scaled.
        contenders: The loaders and limits to measure.
        directory: For the sets and every form of them.
        environments: Where the peers' environments are.
        keep: Whether the sets are kept for the next run.
    """

    settings: LoaderSettings
    sets: Sequence[SampleSet]
    contenders: Sequence[Contender]
    directory: Path
    environments: Path
    keep: bool = False


@dataclass(frozen=True, kw_only=True)
class EpochFigures:
    """One epoch, or several one after the other, of all measured ranks.

    Attributes:
        samples: Delivered by all ranks together.
        elapsed_s: Of the slowest rank.
        cpu_s: Processor time of all processes.
        first_batch_s: Of the slowest rank, opening included.
        pss_bytes: Largest memory of all processes together; None where it was not watched.
        label_spread: Mean over ranks; see `harness.label_spread`.
        lost: Samples that were not delivered.
        repeated: Samples that were delivered again, or that belong to another rank.
        mismatched: Samples whose content is another's.
    """

    samples: int
    elapsed_s: float
    cpu_s: float
    first_batch_s: float
    pss_bytes: int | None
    label_spread: float
    lost: int
    repeated: int
    mismatched: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.elapsed_s

    @property
    def cpu_s_per_1000(self) -> float:
        return self.cpu_s / max(self.samples, 1) * 1000

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.repeated or self.mismatched)

    def followed_by(self, after: "EpochFigures") -> "EpochFigures":
        """Add the next epoch's."""
        return EpochFigures(
            samples=self.samples + after.samples,
            elapsed_s=self.elapsed_s + after.elapsed_s,
            cpu_s=self.cpu_s + after.cpu_s,
            first_batch_s=self.first_batch_s,
            pss_bytes=self.pss_bytes,
            label_spread=(self.label_spread + after.label_spread) / 2,
            lost=self.lost + after.lost,
            repeated=self.repeated + after.repeated,
            mismatched=self.mismatched + after.mismatched,
        )


@dataclass(kw_only=True)
class LoaderRecord:
    """One contender in one case.

    Attributes:
        set_name: Of the set.
        contender: Name.
        kind: ours, peer or limit.
        ranks: On this node.
        workers: Processes or threads a rank.
        temperature: warm or cold.
        versions: Of its packages.
        problem: Why there are no figures, or "".
        prepare_s: Turning the set into its own form.
        source_bytes: Read for that.
        cache_bytes: Disk space of that form.
        first: Figures of the first epoch, where warm.
        epochs: Of the repeats.
        resident_fraction: Cold: part of the files that stayed in memory, the most of all repeats.
        eviction: Cold: how the files were dropped.
    """

    set_name: str
    contender: str
    kind: str
    ranks: int
    workers: int
    temperature: Temperature
    versions: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    prepare_s: float | None = None
    source_bytes: int | None = None
    cache_bytes: int | None = None
    first: EpochFigures | None = None
    epochs: list[EpochFigures] = field(default_factory=list)
    resident_fraction: float | None = None
    eviction: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether every sample was delivered once and whole, in every epoch."""
        all_epochs = [*([self.first] if self.first else []), *self.epochs]
        return all(figures.is_exact for figures in all_epochs)


def compare(
    ids: NDArray[np.int64], num_samples: int, expected: NDArray[np.int64] | None = None
) -> tuple[int, int]:
    """Count expected samples that are missing, and samples not expected or delivered again."""
    wanted = np.ones(num_samples, np.int64)
    if expected is not None:
        wanted[:] = 0
        wanted[expected] = 1
    here = (ids >= 0) & (ids < num_samples)
    found = np.bincount(ids[here], minlength=num_samples)
    lost = int(np.maximum(wanted - found, 0).sum())
    return lost, int(np.maximum(found - wanted, 0).sum() + np.count_nonzero(~here))
