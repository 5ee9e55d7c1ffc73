"""Two to four sentences on what a study found, made of its figures alone."""

from collections import Counter
from collections.abc import Sequence

from tonari.ablate.controls import beats_all
from tonari.ablate.lines import Line
from tonari.ablate.stats import negated
from tonari.ablate.words import has_costs, measure_of_lines, points, ratio

NUM_LOSSES = 3
"""Comparisons that a control wins, named at the top; the table has all."""


NEAR_CHANCE = 1.0
"""Points above guessing that are no sign of learning."""


def findings(
    lines: Sequence[Line], *, margin: float, num_cells: int, expected: int,
    chance: float | None = None,
) -> list[str]:  # fmt: skip
    """Sum a study up.

    Args:
        lines: Its arms.
        margin: Points that count as no loss.
        num_cells: Cells that are there.
        expected: Cells of the whole study.
        chance: Accuracy of guessing, in points; None: it is not known.

    Returns:
        Sentences, the most important first.
    """
    if not num_cells:
        return ["No cell has been trained yet."]
    policies = [line for line in lines if line.is_policy and line.accuracy]
    if learned_nothing(lines, chance):
        said = [
            f"Nothing was learned: no arm is above the {chance:g} % of guessing, so nothing can be "
            "compared. Look at the labels, the learning rate and the number of epochs."
        ]
    else:
        said = _on_policies(policies) if policies else [_on_arms(lines)]
        said += [_cheapest(lines, margin, measure_of_lines(lines).noun)] if has_costs(lines) else []
    if num_cells < expected:
        missing = expected - num_cells
        are = "is" if missing == 1 else "are"
        said.append(f"{missing} of {expected} cells {are} missing; figures may change.")
    return [sentence for sentence in said if sentence]


def learned_nothing(lines: Sequence[Line], chance: float | None) -> bool:
    """Find whether every arm with a result is as good as guessing."""
    means = [line.accuracy.mean for line in lines if line.accuracy]
    return chance is not None and bool(means) and max(means) < chance + NEAR_CHANCE


def _on_policies(policies: Sequence[Line]) -> list[str]:
    both = [line for line in policies if line.control_verdict == beats_all(len(line.controls))]
    count = len(policies)
    if both:
        some = f"{len(both)} of {count} policies" if count > 1 else "The policy"
        verb, own = ("beat", "their") if len(both) > 1 else ("beats", "its")
        first = f"{some} {verb} every control at {own} own cost: {_names(both)}."
    else:
        rest = "; ".join(
            f"{_names([x for x in policies if x.control_verdict == verdict])}: {verdict}"
            for verdict in dict.fromkeys(line.control_verdict for line in policies)
        )
        none = f"None of {count} policies beats" if count > 1 else "The policy does not beat"
        first = f"{none} every control at its own cost ({rest})."
    return [first, _losses(policies)]


def _losses(policies: Sequence[Line]) -> str:
    """Where a control wins, by how much."""
    losses = sorted(
        (one.difference.mean, line.arm, one.name, one.difference)
        for line in policies
        for one in line.controls
        if one.outcome == "worse" and one.difference
    )
    if not losses:
        return ""
    worst = "; ".join(
        f"{name} reaches {points(negated(gap))} points more than {arm}"
        for _, arm, name, gap in losses[:NUM_LOSSES]
    )
    rest = len(losses) - NUM_LOSSES
    return f"A control wins at no more cost: {worst}{f'; and {rest} more' if rest > 0 else ''}."


def _cheapest(lines: Sequence[Line], margin: float, noun: str) -> str:
    """The cheapest arm that is shown to keep its baseline's test result, whatever it is."""
    kept = [
        line for line in lines
        if line.verdict == "better" or line.verdict.startswith("within")
        if line.costs and line.costs.train_ratio
    ]  # fmt: skip
    cheaper = [line for line in kept if _ratio(line) < 1]
    if not cheaper:
        return f"No arm is shown to keep its baseline's {noun}, to {margin:g} points, in less time."
    best = min(cheaper, key=_ratio)
    assert best.costs is not None
    assert best.difference is not None
    kind = "a control" if best.control else "a policy" if best.is_policy else "an arm"
    return (
        f"The cheapest arm shown to keep the {noun} of {best.baseline} is {best.arm}, {kind}: "
        f"{points(best.difference)} points in {ratio(best.costs.train_ratio)} x the time."
    )


def _ratio(line: Line) -> float:
    assert line.costs is not None
    assert line.costs.train_ratio is not None
    return line.costs.train_ratio.mean


def _on_arms(lines: Sequence[Line]) -> str:
    compared = [line for line in lines if line.difference]
    counts = Counter(line.verdict.split(" with")[0] for line in compared)
    if not compared:
        return "No arm can be compared with its baseline yet."
    words = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
    return f"Arms held against their baselines: {words}."


def _names(lines: Sequence[Line]) -> str:
    names = [line.arm for line in lines]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
