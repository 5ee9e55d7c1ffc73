"""A study's report as one page that needs nothing else: no script, no font, no file beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tonari.ablate.lines import Line
from tonari.ablate.measure import Measure
from tonari.ablate.plots import draw_accuracy, draw_curves, draw_pareto
from tonari.ablate.results import ArmResults, number
from tonari.ablate.words import (
    has_costs,
    measure_of_lines,
    points,
    ratio,
    table_columns,
    table_row,
    verdict_sentence,
)
from tonari.report.pages import Picture, lay_out, picture

TEMPLATE = Path(__file__).with_suffix(".jinja")


@dataclass(frozen=True)
class Card:
    """A policy against the controls, to be looked at: rows of name, figure and outcome.

    `is_outside` is set where its time lies beyond a control's line in some seed.
    """

    arm: str
    verdict: str
    outcome: str
    rows: tuple[tuple[str, str, str], ...]
    sentence: str
    is_outside: bool


def page(document: Mapping[str, object], arms: Sequence[ArmResults], lines: Sequence[Line]) -> str:
    """Lay out the page.

    Args:
        document: What study.json holds.
        arms: The cells.
        lines: What they add up to.
    """
    columns, measure = table_columns(lines), measure_of_lines(lines)
    same, different = _settings(arms)
    return lay_out(
        TEMPLATE,
        document=document,
        plots=_plots(arms, lines, number(document, "margin_points")) if document["cells"] else [],
        cards=[_card(line) for line in lines if line.is_policy and line.accuracy],
        columns=columns,
        rows=[(_tone(line.verdict), _kind(line), table_row(line, columns)) for line in lines],
        targets=_targets(lines, measure),
        measure=measure,
        same=same,
        different=different,
        has_costs=has_costs(lines),
        minutes=number(document, "wall_s") / 60,
    )


def _targets(lines: Sequence[Line], measure: Measure) -> list[str]:
    """Say what arms are timed to, in figures as the table has them."""
    found = {x.costs.target.accuracy for x in lines if x.costs and x.costs.target}
    return [f"{measure.shown(target):.2f}" for target in sorted(found)]


def _plots(arms: Sequence[ArmResults], lines: Sequence[Line], margin: float) -> list[Picture]:
    size = (8.5, 1.6 + 0.34 * len(arms))
    noun = measure_of_lines(lines).noun
    by_arm = picture(
        f"{noun.capitalize()} by arm",
        f"Left: every seed's final {noun}. Right: the paired difference to the arm's baseline "
        "with its 95 % interval.",
        lambda figure: draw_accuracy(figure, arms, lines, margin),
        size,
    )
    if not has_costs(lines):
        return [by_arm]
    return [
        picture(
            "What the time buys",
            f"Mean final {noun} against mean training time. A policy is worth having where it "
            "lies above both controls' lines. Bars are standard deviations over seeds; what all "
            "arms of a seed share is in them, and not in the paired differences below.",
            lambda figure: draw_pareto(figure, arms),
            (7.6, 6.4),
        ),
        picture(
            "On the way",
            f"Test {noun} against the time trained so far; mean over seeds, bands are standard "
            "deviations.",
            lambda figure: draw_curves(figure, arms),
            (7.6, 5.8),
        ),
        by_arm,
    ]


def _card(line: Line) -> Card:
    rows = [
        (f"over {one.name}", points(one.difference), one.outcome)
        for one in line.controls
        if one.difference
    ]
    if line.difference:
        rows.append((f"over {line.baseline}", points(line.difference), _tone(line.verdict)))
    if line.costs and line.costs.train_ratio:
        rows.append((f"time, x {line.baseline}", ratio(line.costs.train_ratio), ""))
    return Card(
        line.arm, line.control_verdict, _tone(line.control_verdict), tuple(rows),
        verdict_sentence(line), any(x.num_cheaper or x.num_dearer for x in line.controls),
    )  # fmt: skip


def _tone(verdict: str) -> str:
    """How a verdict is coloured: "better", "worse", or plain."""
    if verdict.startswith(("better", "beats both", "beats all")):
        return "better"
    return "worse" if verdict.startswith(("worse", "beats none")) else "undecided"


def _kind(line: Line) -> str:
    if line.control:
        return "control"
    return "policy" if line.is_policy else "baseline" if line.arm == line.baseline else ""


def _settings(
    arms: Sequence[ArmResults],
) -> tuple[dict[str, str], tuple[list[str], list[tuple[str, list[str]]]]]:
    """Settings that all arms share; and names of the others, with each arm's values."""
    names = list(dict.fromkeys(name for arm in arms for name in arm.settings))
    words = {name: [_word(arm.settings.get(name)) for arm in arms] for name in names}
    same = {name: values[0] for name, values in words.items() if len(set(values)) == 1}
    other = [name for name in names if name not in same]
    rows = [(arm.name, [words[name][row] for name in other]) for row, arm in enumerate(arms)]
    return same, (other, rows)


def _word(value: object) -> str:
    return "-" if value is None or value == "" else str(value)
