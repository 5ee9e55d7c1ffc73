"""A plan as one page, as all reports are: `tonari plan --report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tonari.plan.choice import choice_notes, choice_table
from tonari.plan.explain import explanation_table, tile_table
from tonari.plan.picture import Drawing, part_name, plan_bars, search_bars
from tonari.plan.search import (
    fastest_words,
    search_notes,
    search_table,
    table_of_choices,
    unfit_words,
    what_next,
)
from tonari.report.pages import Picture, drawn, lay_out
from tonari.report.tables import Table
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from tonari.oracle.epoch import PlannedEpoch
    from tonari.oracle.plan import StepPlan
    from tonari.oracle.search.search import Plans
    from tonari.plan.choice import Choice
    from tonari.plan.explain import ExplainedRow
    from tonari.trainer.config.config import Config

TEMPLATE = Path(__file__).with_suffix(".jinja")
PARTS = ("part", "s", "share")
NO_WAIT = 0.02
"""Share of the time below which waiting is not worth a sentence."""


def plan_page(choices: Sequence["Choice"], terms: Sequence["ExplainedRow"], command: str) -> str:
    """Lay out the plan of a probe, or of several to choose among; needs the `report` extra.

    Args:
        choices: The fastest first; it is the one that is shown in its parts.
        terms: Of its step by equations; none: they were not asked for.
        command: That made it.
    """
    best = choices[0]
    plan, epoch, epochs = best.plan, best.plan.epoch, best.config.run.epochs
    whole_s = sum(plan.parts_s.values())
    parts = [(part_name(name), seconds, whole_s) for name, seconds in _longest(plan.parts_s)]
    tables = [Table(PARTS, [_part(*part) for part in parts], "A step")]
    if epoch:
        rows = [_part(name, s, epoch.epoch_s) for name, s in _longest(epoch.parts_s) if s]
        tables.append(Table(PARTS, rows, "An epoch"))
    if plan.tiles:
        tables.append(tile_table(plan.tiles))
    if terms:
        tables.append(explanation_table(terms))
    several = len(choices) > 1
    return lay_out(
        TEMPLATE,
        heading="What the job takes",
        subtitle=f"{best.probe.world_size} rank{'s' * (best.probe.world_size > 1)}; simulated from "
        "what was probed on a node",
        findings=_findings(plan, epoch, epochs),
        pictures=[_picture(plan_bars(plan))],
        choices=(choice_table(choices), choice_notes(choices)) if several else None,
        tables=tables,
        facts=[
            ("command", command),
            ("settings", " ".join(best.overrides) or "as in the file"),
            ("memory of tensors", ", ".join(map(format_bytes, plan.peak_bytes))
             or f"not known: {plan.untraced}"),
            ("torch", best.probe.torch),
        ],
        note="",
    )  # fmt: skip


def search_page(found: "Plans", config: "Config", command: str) -> str:
    """Lay out what a search found; needs the `report` extra.

    Args:
        found: With one candidate at least.
        config: The settings of the job.
        command: That made it.
    """
    notes = search_notes(found, config)
    return lay_out(
        TEMPLATE,
        heading="Which settings are the fastest",
        subtitle=f"{found.legal:,} configurations are legal for {found.global_batch_size:,} samples"
        f" a step: {found.priced:,} were priced",
        findings=[
            fastest_words(found.candidates[0], notes[0][0]),
            *([f"{found.unfit:,} configurations do not fit."] if found.unfit else []),
            *(f"{words}." for words in unfit_words(found)),
        ],
        pictures=[_picture(search_bars(found))],
        choices=(search_table(found), notes),
        tables=(
            [table_of_choices(found.choices, "The best of each choice")] if found.choices else []
        ),
        facts=[("command", command)],
        note=what_next(found),
    )


def _findings(plan: "StepPlan", epoch: "PlannedEpoch | None", epochs: int) -> list[str]:
    step = f"{plan.step_s:.3f} s ({plan.low_s:.3f} to {plan.high_s:.3f})"
    speed = f"{plan.samples_per_s:,.1f} samples a second"
    waits = {name: seconds for name, seconds in plan.parts_s.items() if name != "compute"}
    longest = max(waits, key=waits.__getitem__, default="")
    whole_s = sum(plan.parts_s.values())
    wait = f"{sum(waits.values()) / whole_s:.0%} of a step"
    where = (
        f"A rank waits for {wait}, most of it for {part_name(longest).removeprefix('waiting: ')}."
        if longest and waits[longest] > NO_WAIT * whole_s
        else "A rank hardly waits."
    )
    if epoch is None:
        return [f"A step takes {step}, {speed}, without loading data.", where]
    low_s, high_s = epoch.range_s
    run_s = epoch.run_s(epochs)
    found = [
        f"An epoch takes {epoch.epoch_s:.1f} s ({low_s:.1f} to {high_s:.1f}), and {epochs} "
        f"epoch{'s' * (epochs > 1)} {run_s / 3600:.2f} h, "
        f"{run_s * epoch.num_nodes / 3600:.2f} node hours.",
        f"A step takes {step}, {speed}. {where}",
    ]
    if epoch.unstaged_s:
        after = epoch.pays_after
        paid = "never pays" if after is None else f"has paid after epoch {after}"
        found.append(f"Staging takes {epoch.staging_s:.1f} s, before the first, and {paid}.")
    return found


def _picture(drawing: Drawing) -> Picture:
    light, dark = drawing.svg("light", titled=False), drawing.svg("dark", titled=False)
    return drawn(
        drawing.title, "Parts of less than a hundredth may be too narrow to see.", light, dark
    )


def _longest(parts_s: "dict[str, float]") -> list[tuple[str, float]]:
    return sorted(parts_s.items(), key=lambda part: -part[1])


def _part(name: str, seconds: float, whole_s: float) -> list[str]:
    return [name, f"{seconds:.3f}", f"{seconds / whole_s:.1%}"]
