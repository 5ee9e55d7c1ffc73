"""How much less an arm needs to be trained until it is as good as the baseline."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tonari.ablate.results import ArmResults
from tonari.ablate.stats import Difference, paired_ratio
from tonari.report.tables import Table
from tonari.trainer.config.config import RunConfig

LENGTH, DEFAULT_LENGTH = "run.epochs", RunConfig.epochs


@dataclass(frozen=True)
class EqualLoss:
    """What a way to train costs until its test result is that of the baseline's whole run.

    Attributes:
        way: The arm of these settings that is trained longest; others differ in length alone.
        lengths: Arms of the line.
        times_fewer: The baseline's cost through that of the line where it reaches the baseline's
            result: geometric mean over the seeds that reach it, with its 95 % interval; None: none.
        num_reached: Those seeds.
        num_seeds: Seeds that have all the cells.
        num_at_least: Seeds in which the shortest run is as good already, so that the ratio is a
            lower bound.
    """

    way: str
    lengths: int
    times_fewer: Difference | None
    num_reached: int
    num_seeds: int
    num_at_least: int


def equal_loss(arms: Sequence[ArmResults], *, cost: str) -> list[EqualLoss]:
    """Read off every line of arms that differ in length alone where it is as good as the baseline.

    Between two lengths the result is taken to lie on a straight line over the logarithm of the
    cost; beyond the ends nothing is assumed.

    Args:
        arms: All of the study.
        cost: What is counted, of `tonari.ablate.controls.COSTS`.
    """
    by_name = {arm.name: arm for arm in arms}
    lines: dict[str, list[ArmResults]] = {}
    for arm in arms:
        lines.setdefault(_same_but_length(arm), []).append(arm)
    found = [_equal(line, by_name[line[0].baseline], cost) for line in lines.values()]
    return [one for one in found if one.num_seeds]


def _same_but_length(arm: ArmResults) -> str:
    kept = {name: value for name, value in arm.settings.items() if name != LENGTH}
    return json.dumps([arm.baseline, kept], sort_keys=True, default=str)


def _equal(line: Sequence[ArmResults], baseline: ArmResults, cost: str) -> EqualLoss:
    costs = [arm.figures(cost) for arm in (*line, baseline)]
    ends = [arm.final for arm in (*line, baseline)]
    seeds = sorted(set.intersection(*(set(each) for each in (*costs, *ends))))
    whole = {seed: costs[-1][seed] for seed in seeds}
    reached: dict[int, float] = {}
    num_at_least = 0
    for seed in seeds:
        places = sorted((c[seed], e[seed]) for c, e in zip(costs[:-1], ends[:-1], strict=True))
        place = _first_as_good(places, ends[-1][seed])
        if place is not None:
            reached[seed] = place
            num_at_least += place == places[0][0]
    longest = max(line, key=lambda arm: int(str(arm.settings.get(LENGTH, DEFAULT_LENGTH))))
    ratio = paired_ratio({seed: whole[seed] for seed in reached}, reached)
    return EqualLoss(longest.name, len(line), ratio, len(reached), len(seeds), num_at_least)


def _first_as_good(places: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Find the least cost at which a line of costs and results, costs rising, has a result."""
    if places[0][1] >= wanted:
        return places[0][0]
    for (near, low), (far, high) in pairwise(places):
        if high >= wanted:
            share = (wanted - low) / (high - low)
            return float(np.exp((1 - share) * np.log(near) + share * np.log(far)))
    return None


def table_of(found: Sequence[EqualLoss], baseline: str, noun: str) -> Table:
    """Lay the lines out."""
    times = f"times fewer rows to the {noun} of {baseline}"
    columns = ("trained as", "lengths", times, "seeds that reach it")
    best_first = sorted(found, key=lambda each: -(each.times_fewer.mean if each.times_fewer else 0))
    rows = [
        [one.way, str(one.lengths), _times(one), f"{one.num_reached} of {one.num_seeds}"]
        for one in best_first
    ]
    return Table(columns, rows)


def _times(one: EqualLoss) -> str:
    ratio = one.times_fewer
    if ratio is None:
        return "never"
    bound = f", at least, in {one.num_at_least} of {one.num_seeds}" if one.num_at_least else ""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.mean:.2f}{bound}"
    return f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]{bound}"


def as_document(found: Sequence[EqualLoss]) -> list[Mapping[str, object]]:
    """List the lines as JSON has them."""
    return [
        {
            "way": one.way,
            "lengths": one.lengths,
            "times_fewer": one.times_fewer and vars(one.times_fewer),
            "num_reached": one.num_reached,
            "num_seeds": one.num_seeds,
            "num_at_least": one.num_at_least,
        }
        for one in found
    ]
