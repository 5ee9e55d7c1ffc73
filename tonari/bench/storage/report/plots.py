"""Plots of phases and links: bandwidths, how they grow, latencies, fairness."""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from tonari.bench.storage.report.drawing import (
    LOCAL,
    STATES,
    name_rows,
    words,
    write_units,
)
from tonari.bench.storage.results.results import MeasuredLink, Operation, Phase, Results, Scaling
from tonari.bench.storage.results.scaling import jain
from tonari.report.pictures import LIGHT
from tonari.report.units import duration, rate

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

WIDE = 20
"""Where the largest bandwidth is so many times the smallest, its axis is logarithmic."""

MOST_ANNOTATED = 12
"""Nodes in a matrix whose cells still hold a figure."""


def phases_with_bytes(results: Results) -> list[Phase]:
    """Choose the phases that moved data."""
    return [
        phase
        for phase in results.phases
        if any(sum(repeat.bytes_of_client) for repeat in phase.repeats)
    ]


def rates(phase: Phase) -> list[float]:
    """List a phase's bandwidths, by repeat."""
    return [repeat.bytes_per_s for repeat in phase.repeats if repeat.seconds > 0]


def best_phases(results: Results) -> dict[str, list[Phase]]:
    """Choose, by pattern, the fastest phase of each tier and temperature."""
    found: dict[str, dict[tuple[str, str], Phase]] = {}
    for phase in phases_with_bytes(results):
        kinds = found.setdefault(phase.pattern, {})
        kind = (phase.tier, phase.wanted)
        if kind not in kinds or median(rates(phase)) > median(rates(kinds[kind])):
            kinds[kind] = phase
    return {pattern: list(kinds.values()) for pattern, kinds in found.items()}


def draw_patterns(figure: "FigureBase", results: Results) -> None:
    """Draw the largest bandwidth of each pattern: DIR cold and warm, and the node's directory."""
    axes = figure.subplots()
    best = best_phases(results)
    labels: set[str] = set()
    for row, phases in enumerate(best.values()):
        middles = [median(rates(phase)) for phase in phases]
        axes.plot(
            [min(middles), max(middles)], [row, row], color=LIGHT["grid"], linewidth=5, zorder=1
        )
        # Names alternate above and below, because neighbours may be near.
        for place, middle in enumerate(sorted(middles)):
            phase = phases[middles.index(middle)]
            colour, marker, label = _style(phase)
            values = rates(phase)
            axes.plot([min(values), max(values)], [row, row], color=colour, linewidth=2, zorder=2)
            axes.plot(
                middle, row, marker, color=colour, markersize=11, zorder=3, linestyle="none",
                fillstyle="full" if phase.wanted == "cold" else "none", markeredgewidth=2.2,
                label=None if label in labels else label,
            )  # fmt: skip
            axes.annotate(
                rate(middle), (middle, row), (0, 15 - 30 * (place % 2)), ha="center", va="center",
                textcoords="offset points", fontsize=9.5,
            )  # fmt: skip
            labels.add(label)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    name_rows(axes, [words(pattern) for pattern in best])
    write_units(axes.xaxis, rate)
    axes.set_xlabel("bandwidth of all clients, at the best number of them")
    figure.legend(loc="outside lower center", ncols=4)


def _style(phase: Phase) -> tuple[str, str, str]:
    if phase.tier == "local":
        return LOCAL, "s", f"node's directory, {phase.wanted}"
    return STATES[phase.wanted], "o", f"DIR, {phase.wanted}"


def draw_scaling(figure: "FigureBase", results: Results) -> None:
    """Draw bandwidth against readers, a panel a pattern: repeats, fitted curve and knee."""
    patterns = list(dict.fromkeys(scaling.pattern for scaling in results.scalings))
    columns = min(len(patterns), 3)
    grid = figure.subplots(-(-len(patterns) // columns), columns, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(patterns):
            axes.set_visible(False)
            continue
        curves = [one for one in results.scalings if one.pattern == patterns[place]]
        for scaling in curves:
            _draw_curve(axes, scaling, results.phases)
        _scale(axes, curves)
        axes.set_title(words(patterns[place]), pad=12)
    for axes in grid[-1]:
        axes.set_xlabel("readers (clients x threads)")
    handles: dict[str, Artist] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)


def _draw_curve(axes: "Axes", scaling: Scaling, phases: Sequence[Phase]) -> None:
    colour = STATES[scaling.wanted]
    if scaling.fitted_most_bytes_per_s is not None and scaling.fitted_half is not None:
        n = np.geomspace(scaling.readers[0], scaling.readers[-1], 80)
        fitted = scaling.fitted_most_bytes_per_s * n / (n + scaling.fitted_half)
        axes.plot(n, fitted, "-", color=colour, alpha=0.45, linewidth=3, label="fitted curve")
    for phase in phases:
        if (phase.pattern, phase.wanted, phase.tier) == (scaling.pattern, scaling.wanted, "shared"):
            values = rates(phase)
            axes.plot(
                [phase.clients * phase.threads] * len(values), values, "_", color=colour,
                markersize=9, alpha=0.8,
            )  # fmt: skip
    axes.plot(
        scaling.readers, scaling.bytes_per_s, "o", color=colour, markersize=6,
        label=f"{scaling.wanted}, median",
    )  # fmt: skip
    if scaling.knee in scaling.readers:
        at = scaling.bytes_per_s[list(scaling.readers).index(scaling.knee)]
        axes.plot(
            scaling.knee, at, "o", markersize=14, markerfacecolor="none", markeredgewidth=1.8,
            color=LIGHT["text"], label="knee: 90 % of the most",
        )  # fmt: skip


def _scale(axes: "Axes", curves: Sequence[Scaling]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    readers = sorted({n for scaling in curves for n in scaling.readers})
    values = [value for scaling in curves for value in scaling.bytes_per_s if value > 0]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(readers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if values and max(values) > WIDE * min(values):
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.6, max(values) * 1.6)
    else:
        axes.set_ylim(0, max(values, default=1) * 1.15)
    write_units(axes.yaxis, rate)


def latency_rows(results: Results) -> list[tuple[Phase, Phase, str]]:
    """Choose what latencies are drawn of: on DIR, with fewest and with most readers, cold first."""
    rows = []
    kinds = dict.fromkeys((phase.pattern, phase.direct) for phase in results.phases)
    for pattern, direct in kinds:
        same = [
            phase
            for phase in results.phases
            if (phase.pattern, phase.direct, phase.tier) == (pattern, direct, "shared")
        ]
        cold = [phase for phase in same if phase.wanted == "cold"] or same
        if cold:
            cold.sort(key=lambda phase: phase.clients * phase.threads)
            names = dict.fromkeys(one.name for one in cold[0].operations)
            rows += [(cold[0], cold[-1], name) for name in names]
    return rows


def draw_latencies(figure: "FigureBase", results: Results) -> None:
    """Draw a histogram for each operation of each pattern, alone and crowded, with percentiles."""
    axes = figure.subplots()
    rows = latency_rows(results)
    for row, (alone, crowded, name) in enumerate(rows):
        _draw_hill(axes, row, _operation(alone, name), STATES["cold"], filled=True)
        if crowded is not alone:
            _draw_hill(axes, row, _operation(crowded, name), LIGHT["text"], filled=False)
    axes.plot([], [], color=STATES["cold"], alpha=0.5, linewidth=8, label="fewest readers")
    axes.plot([], [], color=LIGHT["text"], linewidth=1.6, label="most readers")
    for label, marker in (("p50", "|"), ("p99", "^"), ("p99.9", "D")):
        axes.plot(
            [], [], marker, color=STATES["cold"], linestyle="none", markersize=7,
            markeredgewidth=2 if marker == "|" else 0.8, label=label,
        )  # fmt: skip
    axes.set_xscale("log")
    name_rows(axes, [f"{words(alone.pattern)}: {name}" for alone, _, name in rows])
    axes.set_ylim(len(rows) - 0.7, -0.95)
    write_units(axes.xaxis, duration)
    axes.set_xlabel("time of an operation; heights: how many took as long")
    figure.legend(loc="outside lower center", ncols=5)


def _operation(phase: Phase, name: str) -> Operation | None:
    return next((one for one in phase.operations if one.name == name), None)


def _draw_hill(axes: "Axes", row: int, one: Operation | None, colour: str, *, filled: bool) -> None:
    if one is None or not sum(one.counts):
        return
    counts = np.asarray(one.counts, np.float64)
    seen = np.flatnonzero(counts)
    part = slice(seen[0], seen[-1] + 1)
    edges = np.asarray(one.edges_s, np.float64)[seen[0] : seen[-1] + 2]
    heights = row - 0.78 * counts[part] / counts.max()
    if filled:
        axes.stairs(heights, edges, baseline=row, fill=True, color=colour, alpha=0.4)
    else:
        axes.stairs(heights, edges, baseline=row, color=colour, linewidth=1.6)
    for value, marker in ((one.p50_s, "|"), (one.p99_s, "^"), (one.p999_s, "D")):
        axes.plot(
            value, row + (0.0 if filled else 0.13), marker, color=colour, markersize=7,
            markeredgewidth=2 if marker == "|" else 0.8, clip_on=False, zorder=4,
        )  # fmt: skip


def fairness_phases(results: Results) -> list[Phase]:
    """Choose, by pattern, the cold phase on DIR of most clients, if it has several."""
    found: dict[str, Phase] = {}
    for phase in phases_with_bytes(results):
        if phase.tier == "shared" and phase.clients > 1 and phase.wanted == "cold":
            known = found.get(phase.pattern)
            if known is None or phase.clients * phase.threads >= known.clients * known.threads:
                found[phase.pattern] = phase
    return list(found.values())


def draw_fairness(figure: "FigureBase", results: Results) -> None:
    """Draw each client's bandwidth over the clients' mean; a dot a client and repeat."""
    axes = figure.subplots()
    names = []
    for row, phase in enumerate(fairness_phases(results)):
        shares = []
        for repeat in phase.repeats:
            # [clients]
            own = np.asarray(repeat.bytes_of_client) / np.maximum(repeat.seconds_of_client, 1e-9)
            shares.append(own / own.mean() if own.mean() else own)
        # [repeats, clients]
        together = np.array(shares)
        axes.plot(
            together.ravel(), np.full(together.size, row), "o", color=STATES["cold"], alpha=0.3,
            markersize=7, markeredgewidth=0,
        )  # fmt: skip
        slowest = float(np.median(together.min(axis=1)))
        axes.plot(slowest, row, "|", color=STATES["warm"], markersize=20, markeredgewidth=2.5)
        fairness = median(jain(own.tolist()) for own in together)
        names.append(f"{words(phase.pattern)}\n{phase.clients} clients, Jain {fairness:.3f}")
    axes.axvline(1, color=LIGHT["text"], linewidth=0.8)
    name_rows(axes, names)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.75), max(high, 1.25))
    axes.set_xlabel("a client's bandwidth / mean of all clients (bar: the slowest client's median)")


def draw_links(figure: "FigureBase", results: Results) -> None:
    """Draw bandwidth and round trip between nodes as two matrices."""
    left, right = figure.subplots(1, 2)
    nodes = list(dict.fromkeys(node for link in results.links for node in link.nodes))
    _draw_matrix(left, results.links, nodes, is_rate=True)
    _draw_matrix(right, results.links, nodes, is_rate=False)


def _draw_matrix(
    axes: "Axes", links: Sequence[MeasuredLink], nodes: list[str], *, is_rate: bool
) -> None:
    values = np.full((len(nodes), len(nodes)), np.nan)
    for link in links:
        a, b = (nodes.index(node) for node in link.nodes)
        values[a, b] = values[b, a] = link.bytes_per_s if is_rate else link.round_trip_s
    low, high = np.nanmin(values), np.nanmax(values)
    # Near values look alike: the scale spans at least half to all of the largest.
    axes.imshow(
        values, cmap="cividis" if is_rate else "cividis_r", vmin=min(low, high / 2), vmax=high
    )
    for (a, b), value in np.ndenumerate(values):
        if np.isfinite(value) and len(nodes) <= MOST_ANNOTATED:
            is_bright = (value > 0.78 * high) == is_rate
            axes.text(
                b, a, rate(value) if is_rate else duration(value), ha="center", va="center",
                fontsize=9, color="#000000" if is_bright else "#fefefe",
            )  # fmt: skip
    shown = range(0, len(nodes), max(1, len(nodes) // 16))
    axes.set_xticks(shown, [nodes[n] for n in shown], rotation=30, ha="right")
    axes.set_yticks(shown, [nodes[n] for n in shown])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_title("bandwidth, each way" if is_rate else "round trip")
