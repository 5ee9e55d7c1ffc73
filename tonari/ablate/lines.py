"""What a study found of each arm: accuracy, cost, and how it stands to baseline and controls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tonari.ablate.controls import AgainstControl, against_controls, control_verdict
from tonari.ablate.measure import ACCURACY, POINTS, Measure, measure_of
from tonari.ablate.results import ArmResults, CellFile, gather_arms
from tonari.ablate.stats import (
    Difference,
    Mean,
    mean_over_seeds,
    paired_difference,
    paired_ratio,
    verdict,
)
from tonari.ablate.study import Study


@dataclass(frozen=True)
class Target:
    """When an arm's test result first reached a target.

    Attributes:
        accuracy: The target, in points of the measure.
        seconds: Of training until then, mean over the seeds that reached it; None: none did.
        num_reached: Those seeds.
        num_seeds: All that were looked at.
    """

    accuracy: float
    seconds: float | None
    num_reached: int
    num_seeds: int


@dataclass(frozen=True)
class Costs:
    """What training an arm took; ratios are to its baseline, paired by seed.

    Attributes:
        train_s: Seconds of training alone, tests left out.
        rows_trained: Passed forward and backward.
        cost_rows: Trained, with all else that training took counted as rows; see `Trained`.
        hidden_fraction: Share of rows left out, mean over epochs.
        hidden_precision: Share of these that are known to be wrong; None where none is.
        hidden_recall: Share of the wrong ones that is left out.
    """

    train_s: Mean
    train_ratio: Difference | None
    rows_trained: float | None
    rows_ratio: Difference | None
    cost_rows: float | None
    hidden_fraction: float | None
    hidden_precision: float | None
    hidden_recall: float | None
    target: Target | None


@dataclass(frozen=True)
class Line:
    """An arm in the table; accuracies in points (hundredths), test losses in nats.

    Differences are in points of ``measure``: where it is the loss, hundredths of a nat below.
    `costs` is None where no cell has them; `controls` is empty where the arm is no policy.
    """

    arm: str
    baseline: str
    control: str
    is_policy: bool
    accuracy: Mean | None
    difference: Difference | None
    verdict: str
    wall_s: float | None
    costs: Costs | None
    controls: tuple[AgainstControl, ...]
    control_verdict: str
    test_loss: Mean | None = None
    measure: Measure = ACCURACY


def report_lines(study: Study, found: Mapping[str, Mapping[int, CellFile]]) -> list[Line]:
    """Sum up every arm.

    Args:
        study: Its arms, margin and target.
        found: Cells that are there, by arm and seed.
    """
    arms = gather_arms(study, found)
    by_name = {arm.name: arm for arm in arms}
    return [_line(study, arm, by_name[arm.baseline], arms) for arm in arms]


def _line(study: Study, arm: ArmResults, baseline: ArmResults, arms: Sequence[ArmResults]) -> Line:
    own = arm.final
    difference, words = None, "baseline"
    if arm is not baseline:
        difference = paired_difference(own, baseline.final)
        words = verdict(difference, margin=study.study.margin_points)
    controls = against_controls(arm, arms, cost=study.study.cost) if arm.is_policy else ()
    return Line(
        arm.name,
        arm.baseline,
        arm.control,
        arm.is_policy,
        _mean_and_spread(arm, "accuracy", scale=POINTS),
        difference,
        words,
        _mean(arm, "wall_s"),
        _costs(arm, baseline, target_points(study, baseline)),
        controls,
        control_verdict(controls) if arm.is_policy and own else "",
        _mean_and_spread(arm, "test_loss"),
        arm.measure,
    )


def _mean_and_spread(arm: ArmResults, name: str, *, scale: float = 1.0) -> Mean | None:
    values = [scale * value for value in arm.figures(name).values()]
    return mean_over_seeds(values) if values else None


def target_points(study: Study, baseline: ArmResults) -> float | None:
    """Say which test result arms of a baseline are timed to.

    Returns:
        ``study.target_accuracy`` in points; the baseline's mean less the margin where it names
        none, as of text; None where the baseline has no cell either.
    """
    if study.study.target_accuracy and measure_of(study) is ACCURACY:
        return POINTS * study.study.target_accuracy
    reached = list(baseline.final.values())
    return mean_over_seeds(reached).mean - study.study.margin_points if reached else None


def _costs(arm: ArmResults, baseline: ArmResults, target: float | None) -> Costs | None:
    seconds = list(arm.figures("train_s").values())
    if not seconds:
        return None
    train, rows = (
        None if arm is baseline else paired_ratio(arm.figures(name), baseline.figures(name))
        for name in ("train_s", "rows_trained")
    )
    return Costs(
        mean_over_seeds(seconds),
        train,
        _mean(arm, "rows_trained"),
        rows,
        _mean(arm, "cost_rows"),
        _mean(arm, "hidden_fraction"),
        _mean(arm, "hidden_precision"),
        _mean(arm, "hidden_recall"),
        None if target is None else _target(arm, target),
    )


def _target(arm: ArmResults, target: float) -> Target:
    reached = list(arm.seconds_to(target).values())
    seconds = sum(reached) / len(reached) if reached else None
    return Target(target, seconds, len(reached), len(arm.figures("train_s")))


def _mean(arm: ArmResults, name: str) -> float | None:
    values = list(arm.figures(name).values())
    return sum(values) / len(values) if values else None
