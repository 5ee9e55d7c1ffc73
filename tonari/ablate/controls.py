"""Hold a policy against the honest controls, at no more than its own cost.

A control may spend less than the policy: where longer training makes a model worse, as with wrong
labels, whoever has the time stops sooner. What counts is the best that it reaches by then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tonari.ablate.results import ArmResults
from tonari.ablate.stats import Difference, direction, paired_difference

SeedLine = tuple[NDArray[np.float64], NDArray[np.float64]]
"""A control's line in one seed, float64[arms] each: costs, rising, and test results in points."""

CONTROLS = {
    "epochs": "fewer epochs",
    "random": "random pruning",
    "highest": "dropping the highest losses",
    "ema": "fewer epochs with averaged weights",
    "robust": "a robust loss",
}
"""The values of an arm's `control`, and what reports call them."""

HONEST = ("epochs", "random")
"""Those without which a study says little of a policy; their lines end at the baseline."""

COSTS = {"train_s": "training time", "cost_rows": "cost in rows"}
"""What "no more than the policy's own cost" may count, and what reports call it."""


@dataclass(frozen=True)
class AgainstControl:
    """A policy against one control.

    Attributes:
        control: A key of `CONTROLS`.
        difference: Points above the best of the control at the policy's own cost or less;
            None: no pair yet. The intervals of all policies of a study hold the truth together.
        outcome: "better", "worse" or "undecided", of the policy.
        num_cheaper: Seeds in which the policy cost less than the control's cheapest arm, whose
            accuracy then stands in.
        num_dearer: Seeds in which it cost more than the dearest.
    """

    control: str
    difference: Difference | None
    outcome: str
    num_cheaper: int
    num_dearer: int

    @property
    def name(self) -> str:
        """What reports call the control."""
        return CONTROLS[self.control]


def control_line(
    arms: Sequence[ArmResults], control: str, *, baseline: str, cost: str = "train_s"
) -> tuple[ArmResults, ...]:
    """Find the arms that make a control's line: its own, and of `HONEST` ones the baseline too.

    Returns:
        In order of mean cost; empty where no arm of the control has been trained.
    """
    timed = [arm for arm in arms if arm.figures(cost)]
    own = [arm for arm in timed if arm.control == control and arm.baseline == baseline]
    whole = [arm for arm in timed if arm.name == baseline and control in HONEST]
    if not own:
        return ()
    return tuple(sorted([*own, *whole], key=lambda arm: _mean_cost(arm, cost)))


def against_controls(
    arm: ArmResults, arms: Sequence[ArmResults], *, cost: str = "train_s"
) -> tuple[AgainstControl, ...]:
    """Hold a policy against each control that was trained.

    For each seed the control's accuracy is read off the line through that seed's cells of the
    control, joined by straight pieces, at the policy's own cost or at an arm that cost less: where
    the mean over the other seeds is highest, so that no seed's luck chooses for itself.
    It is not extrapolated: beyond an end, the accuracy at that end counts.

    Args:
        arm: The policy.
        arms: All of the study.
        cost: Of `COSTS`.
    """
    lines = {
        control: control_line(arms, control, baseline=arm.baseline, cost=cost)
        for control in CONTROLS
    }
    # To beat both a policy must pass two tests, which makes it no easier; more policies do.
    policies = max(sum(one.is_policy for one in arms), 1)
    return tuple(
        _against(arm, line, control, policies, cost) for control, line in lines.items() if line
    )


def control_verdict(found: Sequence[AgainstControl]) -> str:
    """Say in a few words which controls a policy beats."""
    better = [one.name for one in found if one.outcome == "better"]
    worse = [one.name for one in found if one.outcome == "worse"]
    if not found:
        return "no control to compare with"
    missing = "".join(
        f"; {CONTROLS[control]} not run" for control in HONEST
        if control not in {one.control for one in found}
    )  # fmt: skip
    if len(better) == len(found) and not missing:
        return beats_all(len(found))
    if better:
        return f"beats {', '.join(better)}" + (missing or " only")
    if worse:
        return f"beats none{missing}"
    return _undecided(found) + missing


def beats_all(num_controls: int) -> str:
    """Say that a policy is shown to be above every control."""
    return "beats both controls" if num_controls == 2 else f"beats all {num_controls} controls"


def _undecided(found: Sequence[AgainstControl]) -> str:
    num_seeds = max(one.difference.num_seeds if one.difference else 0 for one in found)
    if not num_seeds:
        return "no pair yet"
    return f"undecided at {num_seeds} seed{'s' if num_seeds > 1 else ''}"


def _against(
    arm: ArmResults, line: Sequence[ArmResults], control: str, policies: int, cost: str
) -> AgainstControl:
    costs, final = arm.figures(cost), arm.final
    ends = _lines_by_seed(line, cost)
    seeds = sorted(costs.keys() & final.keys() & ends.keys())
    reached = {seed: _reached(seed, costs[seed], ends) for seed in seeds}
    difference = paired_difference(final, reached, comparisons=policies)
    return AgainstControl(
        control,
        difference,
        direction(difference),
        sum(costs[seed] < float(ends[seed][0][0]) for seed in seeds),
        sum(costs[seed] > float(ends[seed][0][-1]) for seed in seeds),
    )


def _reached(seed: int, cost: float, lines: Mapping[int, SeedLine]) -> float:
    """Find the best that a seed's control reaches at that cost, by the other seeds.

    Args:
        seed: Of the policy's cell.
        cost: Of that cell.
        lines: The control's, by seed.
    """
    places, own = lines[seed]
    numbers = np.arange(len(places))
    # A place of the line: the number of an arm, or between two.
    here = float(np.interp(cost, places, numbers))
    options = [*numbers[numbers < here], here]
    others = [line for number, (_, line) in lines.items() if number != seed] or [own]
    means = [np.mean([np.interp(place, numbers, line) for line in others]) for place in options]
    return float(np.interp(options[int(np.argmax(means))], numbers, own))


def _lines_by_seed(line: Sequence[ArmResults], cost: str) -> Mapping[int, SeedLine]:
    """Find the lines of the seeds that every arm has."""
    costs = [arm.figures(cost) for arm in line]
    finals = [arm.final for arm in line]
    # A seed that lacks one of the arms would be held against another line than the others are
    seeds = set.intersection(*(set(one) for one in [*costs, *finals]))
    # In the arms' order; a cell that a busy machine made slow takes no less time than those before.
    return {
        seed: (
            np.maximum.accumulate([arm[seed] for arm in costs]),
            np.array([arm[seed] for arm in finals]),
        )
        for seed in seeds
    }


def _mean_cost(arm: ArmResults, cost: str) -> float:
    return float(np.mean(list(arm.figures(cost).values())))
