"""What a run measured of an epoch's parts beside its plan, as factors for the plan of another."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dataio.base.errors import DamagedFileError
from dataio.base.lines import read_checked_lines
from tonari.oracle.epoch import MOVING, PlannedEpoch
from tonari.oracle.errors import OracleError
from tonari.trainer.watch.parts import OTHER
from tonari.trainer.watch.plan import PARTS

LEAST_FRACTION = 0.01
"""Of an epoch: of what was planned shorter than that, a ratio means little."""
CURE = "give the run.directory of a run that `tonari train --plan` trained, or its metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Factor:
    """What was measured over what was planned, of a part of a run's epochs.

    Attributes:
        median: Over epochs.
        low: The tenth of a hundred.
        high: The ninetieth.
        num_epochs: Epochs that it is of.
    """

    median: float
    low: float
    high: float
    num_epochs: int


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a run's epochs after its first measured.

    Attributes:
        factors: Of the names of `PARTS`; of those that were hardly planned there is none.
        unplanned_s: Median of what was hardly planned and took its time all the same.
    """

    factors: Mapping[str, Factor]
    unplanned_s: Mapping[str, float]

    def scale(self, epoch: PlannedEpoch) -> PlannedEpoch:
        """Return a plan with each part times its factor, if it has one."""
        factors = {name: factor.median for name, factor in self.factors.items()}
        return replace(epoch, **{name: getattr(epoch, name) * of for name, of in factors.items()})

    def range_s(self, epoch: PlannedEpoch) -> tuple[float, float]:
        """Compute the range of a plan's epoch: that of steps, wider by that of the factors."""
        ends = []
        for end, spread in zip(("low", "high"), epoch.spread, strict=True):
            ends.append(
                sum(
                    getattr(epoch, name)
                    * (getattr(self.factors[name], end) if name in self.factors else 1.0)
                    * (spread if name in MOVING else 1.0)
                    for name in PARTS
                )
            )
        return ends[0], ends[1]


def learn(run: Path) -> Learned:
    """Read what a run measured beside its plan; it may still be under way.

    Args:
        run: Its directory, or its file of metrics.

    Raises:
        OracleError: If there is no such file, or no epoch after the first in it that has a plan.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    epochs = _epochs(path)
    planned = [line for line in epochs if "planned_s" in line]
    if not planned:
        raise OracleError(
            f"{path}: has {len(epochs)} epochs and none beside a plan; {CURE}"
            if epochs
            else f"{path}: no epoch has ended; wait for two, or give another run"
        )
    later = [line for line in planned if line["epoch"]]
    if not later:
        raise OracleError(
            f"{path}: only the first epoch has ended, which is left out as it starts cold; wait "
            "for the second"
        )
    factors, unplanned_s = {}, {}
    for name in (*PARTS, OTHER):
        ratios = [
            line[name] / line[f"planned_{name}"]
            for line in later
            if line.get(f"planned_{name}", 0.0) > LEAST_FRACTION * line["planned_s"]
        ]
        measured_s = statistics.median(line[name] for line in later)
        if ratios:
            factors[name] = _factor(ratios)
        elif measured_s > LEAST_FRACTION * statistics.median(line["measured_s"] for line in later):
            unplanned_s[name] = measured_s
    return Learned(factors=factors, unplanned_s=unplanned_s)


def _factor(ratios: Sequence[float]) -> Factor:
    low = high = median = statistics.median(ratios)
    if len(ratios) > 1:
        low, *_, high = statistics.quantiles(ratios, n=10, method="inclusive")
    return Factor(
        median=median, low=min(low, median), high=max(high, median), num_epochs=len(ratios)
    )


def _epochs(path: Path) -> list[dict[str, float]]:
    """Read the lines of epochs; of a run under way the last line may be cut off."""
    try:
        return [line for line in read_checked_lines(path) if line["kind"] == "epoch"]
    except (OSError, DamagedFileError, KeyError) as error:
        raise OracleError(
            f"{path}: cannot be read as the metrics of a run ({type(error).__name__}: {error}); "
            + CURE
        ) from error
