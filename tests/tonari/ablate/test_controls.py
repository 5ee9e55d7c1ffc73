"""A policy is held against the best that a control reaches in its time; luck decides nothing."""

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from tonari.ablate.controls import AgainstControl, against_controls, control_verdict
from tonari.ablate.results import ArmResults

Cells = Mapping[int, tuple[float, float]]
"""By seed: seconds of training, and accuracy in points."""


def arm(name: str, cells: Cells, *, control: str = "", importance: str = "full") -> ArmResults:
    return ArmResults(
        name,
        "Full",
        control,
        {"importance.kind": importance},
        {seed: {"train_s": s, "accuracy": a / 100} for seed, (s, a) in cells.items()},
    )


def held(policy: Cells, controls: Mapping[str, Mapping[str, Cells]], full: Cells) -> list[
    AgainstControl
]:  # fmt: skip
    """Hold a policy against controls: kind -> arm -> cells."""
    arms = [arm("Full", full)]
    arms += [
        arm(name, cells, control=kind, importance="random" if kind == "random" else "full")
        for kind, own in controls.items()
        for name, cells in own.items()
    ]
    chosen = arm("Policy", policy, importance="kakurenbo")
    return list(against_controls(chosen, [*arms, chosen]))


def alike(seconds: float, points: float, *, seeds: int = 3) -> Cells:
    return {seed: (seconds, points + seed) for seed in range(seeds)}


def test_where_longer_training_is_worse_the_shorter_run_is_the_reference() -> None:
    # 40 % of the labels are wrong: the longer a run, the more of them it has learnt.
    (found,) = held(
        alike(96, 47.1), {"epochs": {"a third": alike(33, 43.8)}}, full=alike(100, 33.5)
    )
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(3.3)


def test_between_two_arms_it_is_the_line_where_that_rises() -> None:
    (found,) = held(alike(75, 88), {"epochs": {"half": alike(50, 80)}}, full=alike(100, 90))
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(3.0)


def test_an_arm_that_takes_longer_than_the_policy_never_counts() -> None:
    (found,) = held(alike(60, 88), {"epochs": {"half": alike(50, 80)}}, full=alike(100, 99))
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(88 - (80 + 19 * 10 / 50))


def test_a_slow_cell_takes_no_less_than_a_shorter_one() -> None:
    slow = {0: (50.0, 80.0), 1: (90.0, 80.0), 2: (50.0, 80.0)}
    full = {0: (100.0, 90.0), 1: (80.0, 90.0), 2: (100.0, 90.0)}
    (found,) = held(alike(85, 90), {"epochs": {"half": slow}}, full=full)
    assert found.difference is not None
    assert found.difference.num_seeds == 3


def verdicts(slope: float, *, gain: float = 0.0) -> list[str]:
    """Simulate 400 studies of 5 seeds: a policy at 0.6 of the time, as good as any control then."""
    rng = np.random.default_rng(17)
    shares = (0.25, 0.5, 0.75, 1.0)

    def trained(level: NDArray[np.float64], points: float, share: float) -> Cells:
        noisy = level + points + rng.normal(0, 1, 5)
        return {seed: (100 * share, float(reached)) for seed, reached in enumerate(noisy)}

    def study() -> str:
        # Of one seed all arms share the data and the first weights.
        level = rng.normal(70, 2, 5)
        controls = {
            kind: {f"{kind} {share}": trained(level, slope * share, share) for share in shares[:3]}
            for kind in ("epochs", "random")
        }
        full = trained(level, slope, 1.0)
        best = max(slope * 0.6, slope * shares[0])
        return control_verdict(held(trained(level, best + gain, 0.6), controls, full))

    return [study() for _ in range(400)]


@pytest.mark.parametrize("slope", [8.0, 0.0, -8.0])
def test_a_policy_that_is_nothing_beats_both_controls_in_few_of_400_studies(slope: float) -> None:
    assert verdicts(slope).count("beats both controls") <= 0.05 * 400
    # And one that is three points better does in most.
    assert verdicts(slope, gain=3.0).count("beats both controls") > 0.8 * 400


def test_more_policies_make_none_of_them_win_by_luck() -> None:
    rng = np.random.default_rng(5)

    def cells(seconds: float, points: float) -> Cells:
        return {s: (seconds, points + float(rng.normal())) for s in range(6)}

    def wins(num_policies: int) -> int:
        """Count the studies, of 300, in which any policy beats the control; none is any better."""
        found = 0
        for _ in range(300):
            arms = [arm("Full", cells(100, 80)), arm("half", cells(60, 80), control="epochs")]
            policies = [
                arm(f"P{n}", cells(60, 80), importance="kakurenbo") for n in range(num_policies)
            ]
            every = [*arms, *policies]
            held = [one for policy in policies for one in against_controls(policy, every)]
            found += "better" in [one.outcome for one in held]
        return found

    assert wins(1) <= 0.05 * 300
    assert wins(12) <= 0.05 * 300
