"""Results as one page that needs nothing else, and as one picture."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from tonari.bench.storage.report.drawing import WAY_WORDS, Draw, words
from tonari.bench.storage.report.epoch_plots import (
    draw_epochs,
    draw_predictions,
    draw_sums,
    predictions,
)  # fmt: skip
from tonari.bench.storage.report.plots import (
    best_phases,
    draw_fairness,
    draw_latencies,
    draw_links,
    draw_patterns,
    draw_scaling,
    fairness_phases,
    latency_rows,
    phases_with_bytes,
    rates,
)  # fmt: skip
from tonari.bench.storage.results.results import (
    EndToEnd,
    Operation,
    Phase,
    Results,
    Scaling,
    TrainingWay,
)  # fmt: skip
from tonari.bench.storage.site.layouts import ALL_OSTS, StripeLayout
from tonari.bench.storage.site.site import Site
from tonari.report.pages import lay_out, picture
from tonari.report.pictures import write_picture
from tonari.report.tables import UNKNOWN, Table, figure
from tonari.report.units import duration, rate
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_suffix(".jinja")

READERS = "pattern, clients x threads"
PHASES = (
    READERS, "wanted", "nodes", "request", "bandwidth", "repeats", "seconds", "notes"
)  # fmt: skip
LATENCIES = (
    READERS, "wanted", "operation", "count", "mean", "p50", "p90", "p99", "p99.9", "max"
)  # fmt: skip
WAYS = (
    "way", "staging", "first epoch", "later epochs", "predicted", "utilisation", "from DIR",
    "network", "node's disk", "staged from DIR", "paid after", "paid, predicted",
)  # fmt: skip

UNFOLDED = 14
"""Phases whose verdicts are shown at once; more are folded."""


@dataclass(frozen=True)
class Plot:
    """What one plot shows, and how large it is.

    Attributes:
        key: Names it in the page.
        inches: Width and height.
    """

    key: str
    title: str
    caption: str
    draw: Draw
    inches: tuple[float, float]


@dataclass(frozen=True)
class Strip:
    """Verdicts of a phase: by node, a state for each repeat.

    Attributes:
        phase: Its name.
        wanted: What was tried.
        cells: By node; empty where it took no part.
        why: What decided, for each different reason.
        is_as_wanted: Whether no verdict is the opposite of what was tried for, and some is that.
        rows: How many phases from this one on have the same reasons; 0 where an earlier one counts
            it.
    """

    phase: str
    wanted: str
    cells: Sequence[Sequence[str]]
    why: Sequence[str]
    is_as_wanted: bool
    rows: int = 1


def write_html(results: Results, path: Path) -> None:
    """Write the page; needs the `report` extra."""
    path.write_text(page(results))


def write_png(results: Results, path: Path) -> None:
    """Draw all plots below one another; needs the `report` extra."""
    plots = plots_of(results)
    heights = [plot.inches[1] + 0.5 for plot in plots]

    def draw(figure: "Figure") -> None:
        parts = figure.subfigures(len(plots), 1, height_ratios=heights, squeeze=False)
        for part, plot in zip(parts.flat, plots, strict=True):
            part.suptitle(plot.title, x=0.01, ha="left", fontsize=14, fontweight="bold")
            plot.draw(part)

    write_picture(path, draw, inches=(10, sum(heights) or 1))


def page(results: Results) -> str:
    """Lay out the page."""
    nodes = list(
        dict.fromkeys(node for p in results.phases for r in p.repeats for node in r.verdict_of_node)
    )
    strips = joined([strip(phase, nodes) for phase in results.phases if phase.repeats])
    return lay_out(
        TEMPLATE,
        results=results,
        findings=findings(results),
        plots={
            plot.key: picture(plot.title, plot.caption, plot.draw, plot.inches)
            for plot in plots_of(results)
        },
        nodes=nodes,
        strips=strips,
        folded=len(strips) > UNFOLDED,
        sites=[("DIR", _site(results.site)), ("the node's directory", _site(results.local))],
        ways=ways_table(results.end_to_end) if results.end_to_end else None,
        phases=Table(PHASES, [_phase_line(phase) for phase in results.phases if phase.repeats]),
        latencies=Table(
            LATENCIES, [_latency_line(p, one) for p in results.phases for one in p.operations]
        ),
        environment=[(name, _value(value)) for name, value in results.environment.items()],
    )


def plots_of(results: Results) -> list[Plot]:
    """Choose the plots that there is something to draw of."""
    patterns = len({phase.pattern for phase in phases_with_bytes(results)})
    curves = len({scaling.pattern for scaling in results.scalings})
    latencies, fair = len(latency_rows(results)), len(fairness_phases(results))
    found = [
        (patterns, Plot(
            "patterns", "What each pattern gets",
            "The largest bandwidth over all numbers of readers; lines are smallest to largest "
            "repeat.",
            partial(draw_patterns, results=results), (9, 1.7 + 0.62 * patterns),
        )),
        (curves, Plot(
            "scaling", "How it grows with readers",
            "Dots are medians, dashes repeats; the curve is most x n / (n + half), fitted to "
            "the medians. The ring is the knee: the fewest readers with 90 % of the largest.",
            partial(draw_scaling, results=results), (10, 0.9 + 3.2 * -(-curves // 3)),
        )),
        (latencies, Plot(
            "latencies", "How long an operation takes",
            "On DIR, cold. Filled: with the fewest readers; outlined: with the most.",
            partial(draw_latencies, results=results), (9, 1.7 + 0.62 * latencies),
        )),
        (fair, Plot(
            "fairness", "Whether clients get the same",
            "Cold, the most clients; a dot is a client in a repeat. Jain's index is 1 where "
            "all get the same, and 1/n where one of n gets all.",
            partial(draw_fairness, results=results), (9, 1.2 + 0.62 * fair),
        )),
        (len(results.links), Plot(
            "links", "Between nodes", "One rank of each node, both ways at once, medians.",
            partial(draw_links, results=results), (9, 3.9),
        )),
    ]  # fmt: skip
    plots = [plot for has_any, plot in found if has_any]
    return plots + (_epoch_plots(results.end_to_end) if results.end_to_end else [])


def _epoch_plots(run: EndToEnd) -> list[Plot]:
    found = [
        Plot(
            "epochs", "What an epoch costs",
            f"A bar is an epoch. Step {duration(run.step_s)} ({run.step_from}), batches of "
            f"{run.batch_size} a rank. Waiting is what an epoch takes beyond null storage, which "
            "has its samples in memory.",
            partial(draw_epochs, run=run), (9, 4.2),
        ),
        Plot(
            "sums", "When staging has paid",
            "Staging is where a line begins. It has paid where the line goes below the "
            "DataLoader's.",
            partial(draw_sums, run=run), (9, 4.6),
        ),
    ]  # fmt: skip
    rows = len(predictions(run))
    if rows:
        found.append(
            Plot(
                "predictions", "Predicted beside measured",
                "Predicted from the phases above, before anything was trained.",
                partial(draw_predictions, run=run), (9, 1.5 + 0.42 * rows),
            )
        )  # fmt: skip
    return found


def findings(results: Results) -> list[str]:
    """Describe the most important results in a few sentences: what DIR costs training first."""
    found = _cost(results.end_to_end, results) if results.end_to_end else _beside_node(results)
    found += [_growth(scaling) for scaling in results.scalings if scaling.wanted == "cold"]
    unproved = [
        phase for phase in results.phases if phase.repeats and not strip(phase, []).is_as_wanted
    ]
    if unproved:
        found.append(
            f"{len(unproved)} of {len(results.phases)} phases are not proved to be as cold or warm "
            "as wanted: see the verdicts before using their figures."
        )
    return found


def _cold_rates(results: Results) -> tuple[float, float] | None:
    """Find bytes per second of samples in random order, cold: from DIR, and from the node."""
    best = {phase.tier: rates(phase) for phase in best_phases(results).get("random_record", ())
            if phase.wanted == "cold"}  # fmt: skip
    return (median(best["shared"]), median(best["local"])) if len(best) == 2 else None


def _beside_node(results: Results) -> list[str]:
    """Compare DIR with the node's directory in reading samples in random order, cold."""
    found = _cold_rates(results)
    if found is None:
        return [
            "Is DIR slower than the node's directory? Cannot tell: random_record was not read cold "
            "from both; raise --time-limit, or give --patterns random_record."
        ]
    shared, local = found
    ways = ("DIR", "the node's directory") if shared >= local else ("the node's directory", "DIR")
    times = max(shared, local) / min(shared, local)
    faster = (
        f"{ways[0]} is {times:.1f} times as fast as {ways[1]}"
        if times >= 1.05
        else "DIR is as fast as the node's directory"
    )
    return [
        f"Cold, in random order, {faster}: {rate(shared)} from DIR, {rate(local)} from the node. "
        "--step-ms MS says what that costs training."
    ]


def _growth(scaling: Scaling) -> str:
    most = max(scaling.bytes_per_s)
    knee = f"{scaling.knee} reader{'s' if scaling.knee > 1 else ''}"
    name = words(scaling.pattern).capitalize()
    return f"{name}, cold: {rate(most)} at most, 90 % of it from {knee}."


ALIKE = 1.3
"""Rates of two disks that differ by less explain no epoch that takes longer than that."""
CONFLICT = 2.0
"""A measured epoch that is farther from the predicted one has another cause than was measured."""


def _cost(run: EndToEnd, results: Results) -> list[str]:
    """Answer whether staging pays, by the two epochs that decide, or what to run to know."""
    ways = {way.name: way for way in run.ways if len(way.epoch_s) > 1}
    if not ways.keys() >= {"dataloader", "staged"}:
        return [
            "Does staging pay? Cannot tell: the time limit left no two epochs with a DataLoader "
            "and from the node's disk; raise --time-limit, or lower --samples."
        ]
    loaded, staged = ways["dataloader"], ways["staged"]
    slow_s, fast_s = median(loaded.epoch_s[1:]), median(staged.epoch_s[1:])
    paid, times = staged.paid_after, slow_s / fast_s
    doubts = _doubts(loaded, times, results) if times >= 1.05 else []
    alone = " (one epoch was measured)" if len(loaded.epoch_s) == 2 else ""
    decides = (
        f"an epoch takes {duration(slow_s)} with a DataLoader from DIR{alone}, and "
        f"{duration(fast_s)} with Tonari from the node's disk"
    )
    if doubts:
        because = "; ".join(why for why, _ in doubts)
        return [
            f"Does staging pay? Cannot tell: {decides}, but DIR is not shown to be why, because "
            f"{because}. To know, {'; '.join(cure for _, cure in doubts)}."
        ]
    if paid is None or times < 1.05:
        return [f"Does staging pay? No: {decides}."]
    return [
        f"Does staging pay? Yes, after {paid} epoch{'s' * (paid != 1)}: {decides}. Staging takes "
        f"{duration(staged.staging_s)}."
    ]


def _doubts(loaded: TrainingWay, times: float, results: Results) -> list[tuple[str, str]]:
    """Give what speaks against DIR as the cause of a DataLoader's longer epochs, and the cure."""
    found, cold, said_s = [], _cold_rates(results), loaded.predicted_epoch_s
    if results.site.mount == results.local.mount:
        found.append(("the node's disk is the same filesystem", "give --scratch on another"))
    elif cold is not None and max(cold) < ALIKE * min(cold) and times >= ALIKE:
        found.append(("it is as fast as the node's disk", "raise --workers until it helps no more"))
    later = loaded.verdict_of_epoch[1:]
    if later and all(one.state == "warm" for one in later):
        found.append(("its files were in memory", "train on more data than memory holds"))
    measured_s = median(loaded.epoch_s[1:])
    if said_s and not said_s / CONFLICT < measured_s < said_s * CONFLICT:
        found.append((f"at its speed an epoch takes {duration(said_s)}", "repeat when idle"))
    return found


def strip(phase: Phase, nodes: Sequence[str]) -> Strip:
    """Put a phase's verdicts in the order of nodes."""
    cells = [
        [r.verdict_of_node[node].state for r in phase.repeats if node in r.verdict_of_node]
        for node in nodes
    ]
    verdicts = [one for r in phase.repeats for one in r.verdict_of_node.values()]
    wrong = "warm" if phase.wanted == "cold" else "cold"
    # Figures differ between repeats: a reason for each state is enough.
    why = {one.state: f"{one.state}: {one.why}" for one in reversed(verdicts)}
    return Strip(
        _name(phase), phase.wanted, cells, sorted(why.values()),
        all(one.state != wrong for one in verdicts)
        and any(one.state == phase.wanted for one in verdicts),
    )  # fmt: skip


def joined(strips: Sequence[Strip]) -> list[Strip]:
    """Show once what neighbours of one pattern have for reasons, their figures apart."""
    reasons = [
        (one.phase.partition(",")[0], re.sub(r"[\d.]+%", "%", " ".join(one.why))) for one in strips
    ]
    starts = [n for n in range(len(strips)) if n == 0 or reasons[n] != reasons[n - 1]]
    rows = dict(zip(starts, np.diff([*starts, len(strips)]).tolist(), strict=True))
    return [replace(one, rows=rows.get(n, 0)) for n, one in enumerate(strips)]


def _name(phase: Phase) -> str:
    where = "" if phase.tier == "shared" else ", node's directory"
    direct = ", direct" if phase.direct else ""
    readers = f"{phase.clients}\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}{phase.threads}"
    return f"{words(phase.pattern)}, {readers}{where}{direct}"


def _site(site: Site) -> list[tuple[str, str]]:
    options = ",".join(site.mount.options)
    files = "" if site.free_files is None else f", {site.free_files:,} files"
    return [
        ("path", site.path),
        ("filesystem", f"{site.name} (statfs {site.magic:#010x})"),
        ("seen by other nodes", "yes" if site.is_shared else "no"),
        ("server", site.mount.server or "none"),
        ("mounted", f"{site.mount.source} on {site.mount.point} ({options})"),
        (
            "room",
            f"{format_bytes(site.free_bytes)} free of {format_bytes(site.total_bytes)}{files}",
        ),
        ("block", format_bytes(site.block_bytes)),
        ("client keeps data in", site.client_cache),
        ("layout", _layout(site.layout)),
        *(("note", note) for note in site.notes),
    ]


def _layout(layout: StripeLayout | None) -> str:
    if layout is None:
        return "unknown"
    parts = []
    if layout.stripe_count is not None and layout.stripe_bytes is not None:
        count = "all" if layout.stripe_count == ALL_OSTS else str(layout.stripe_count)
        of = f" of {layout.num_osts}" if layout.num_osts else ""
        parts.append(f"stripes of {layout.stripe_bytes:,} bytes over {count}{of} OSTs")
    if layout.osts:
        parts.append(f"OSTs {', '.join(map(str, layout.osts))}")
    if len(layout.components) > 1:
        parts.append(f"{len(layout.components)} components")
    if layout.dom_bytes:
        parts.append(f"the first {layout.dom_bytes:,} bytes on the MDT")
    if layout.block_bytes is not None:
        parts.append(f"blocks of {layout.block_bytes:,} bytes")
    if layout.pool:
        parts.append(f"pool {layout.pool}")
    return f"{'; '.join(parts) or 'as by default'} (said by {layout.said_by})"


def ways_table(run: EndToEnd) -> Table:
    """Lay out what each way to feed training cost."""
    rows = [
        [
            WAY_WORDS[way.name].replace("\n", " "),
            duration(way.staging_s) if way.staging_s else UNKNOWN,
            duration(way.epoch_s[0]) if way.epoch_s else UNKNOWN,
            duration(median(way.epoch_s[1:])) if len(way.epoch_s) > 1 else UNKNOWN,
            duration(way.predicted_epoch_s) if way.predicted_epoch_s is not None else UNKNOWN,
            figure(way.utilisation_fraction, ".0%"),
            *(_bytes(way.moved_bytes.get(tier)) for tier in ("shared", "network", "local")),
            _bytes(way.staging_bytes),
            str(way.paid_after or UNKNOWN),
            str(way.predicted_paid_after or UNKNOWN),
        ]
        for way in run.ways
    ]
    return Table(WAYS, rows)


def _bytes(count: int | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def _phase_line(phase: Phase) -> list[str]:
    values = rates(phase)
    has_bytes = any(sum(repeat.bytes_of_client) for repeat in phase.repeats)
    return [
        _name(phase),
        phase.wanted,
        str(phase.nodes),
        format_bytes(phase.request_bytes) if phase.request_bytes else UNKNOWN,
        rate(median(values)) if has_bytes else UNKNOWN,
        f"{rate(min(values))} to {rate(max(values))}" if has_bytes else UNKNOWN,
        duration(median(repeat.seconds for repeat in phase.repeats)),
        "; ".join(phase.notes),
    ]


def _latency_line(phase: Phase, one: Operation) -> list[str]:
    figures = (one.mean_s, one.p50_s, one.p90_s, one.p99_s, one.p999_s, one.max_s)
    return [_name(phase), phase.wanted, one.name, f"{one.count:,}", *map(duration, figures)]


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(one)}" for name, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_value, value))
    return UNKNOWN if value is None else str(value)
