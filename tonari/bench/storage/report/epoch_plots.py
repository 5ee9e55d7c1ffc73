"""Plots of training end to end: epochs by way, their sum with staging, and predictions."""

from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from tonari.bench.storage.report.drawing import (
    COMPUTE,
    STAGING,
    STATES,
    WAIT,
    WAY_WORDS,
    WAYS,
    name_rows,
)
from tonari.bench.storage.results.results import EndToEnd, TrainingWay
from tonari.report.pictures import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase


def compute_s(run: EndToEnd, way: TrainingWay) -> list[float]:
    """List, by epoch, the time of null storage for as many samples, at most the epoch's own."""
    if way.name == "null":
        return [*way.epoch_s]
    null = next((one for one in run.ways if one.name == "null"), None)
    if null is None:
        return [0.0] * len(way.epoch_s)
    later = slice(1, None) if len(null.epoch_s) > 1 else slice(None)
    pairs = zip(null.epoch_s[later], null.samples_of_epoch[later], strict=True)
    of_sample = median(took / max(samples, 1) for took, samples in pairs)
    return [
        min(of_sample * samples, took)
        for samples, took in zip(way.samples_of_epoch, way.epoch_s, strict=True)
    ]


def draw_epochs(figure: "FigureBase", run: EndToEnd) -> None:
    """Draw every epoch as a bar by way: compute below, waiting for storage above."""
    axes = figure.subplots()
    places = []
    start = 0.0
    for way in run.ways:
        epochs = len(way.epoch_s)
        at = start + np.arange(epochs)
        compute = np.array(compute_s(run, way))
        wait = np.asarray(way.epoch_s) - compute
        axes.bar(at, compute, 0.86, color=COMPUTE)
        axes.bar(at, wait, 0.86, bottom=compute, color=WAIT)
        places.append(start + (epochs - 1) / 2)
        start += epochs + 1.5
    for label, colour in (("compute (null storage's)", COMPUTE), ("waiting for storage", WAIT)):
        axes.bar([0], [0], color=colour, label=label)
    axes.set_xticks(places, [WAY_WORDS[way.name] for way in run.ways])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("an epoch, s")
    figure.legend(loc="outside lower center", ncols=2)


def draw_sums(figure: "FigureBase", run: EndToEnd) -> None:
    """Draw the time since the start, staging included, and where staging has paid."""
    axes = figure.subplots()
    for way in run.ways:
        sums = way.staging_s + np.concatenate([[0.0], np.cumsum(way.epoch_s)])
        axes.plot(
            range(len(sums)), sums, color=WAYS[way.name], marker=".", linewidth=2,
            linestyle="--" if way.name == "null" else "-",
            label=WAY_WORDS[way.name].replace("\n", " "),
        )  # fmt: skip
    paid = [way.paid_after for way in run.ways if way.name == "staged" and way.paid_after]
    for epoch in paid:
        axes.axvline(epoch, color=LIGHT["text"], linewidth=1.2, linestyle=":")
        axes.annotate(
            f"staging has paid after epoch {epoch}", (epoch, axes.get_ylim()[1]), (7, -6),
            textcoords="offset points", va="top", fontweight="bold",
        )  # fmt: skip
    axes.set_xlim(0)
    axes.set_ylim(0)
    longest = max((len(way.epoch_s) for way in run.ways), default=0)
    axes.set_xticks(range(0, longest + 1, max(1, longest // 12)))
    axes.set_xlabel("epochs trained")
    axes.set_ylabel("since the start, staging included, s")
    figure.legend(loc="outside lower center", ncols=3)


def predictions(run: EndToEnd) -> list[tuple[str, float, float]]:
    """List predictions beside measurements: name, predicted and measured seconds."""
    found = []
    for way in run.ways:
        name = WAY_WORDS[way.name].replace("\n", " ")
        if way.predicted_epoch_s is not None and len(way.epoch_s) > 1:
            measured = median(way.epoch_s[1:])
            found.append((f"{name}: a later epoch", way.predicted_epoch_s, measured))
        if way.predicted_staging_s is not None and way.staging_s > 0:
            found.append((f"{name}: staging", way.predicted_staging_s, way.staging_s))
    return found


def draw_predictions(figure: "FigureBase", run: EndToEnd) -> None:
    """Draw each prediction beside what was measured, with its error."""
    axes = figure.subplots()
    rows = predictions(run)
    for row, (_, predicted, measured) in enumerate(rows):
        axes.plot([predicted, measured], [row, row], color=LIGHT["text"], linewidth=1.5, zorder=1)
        axes.plot(
            predicted, row, "D", color=STAGING, markersize=10, fillstyle="none",
            markeredgewidth=2.2, label=None if row else "predicted",
        )  # fmt: skip
        axes.plot(
            measured, row, "o", color=STATES["cold"], markersize=9,
            label=None if row else "measured",
        )  # fmt: skip
        error = (measured - predicted) / measured
        axes.annotate(
            f"{error:+.0%}", (max(predicted, measured), row), (13, 0), va="center",
            textcoords="offset points",
        )  # fmt: skip
    name_rows(axes, [name for name, _, _ in rows])
    axes.set_xlim(0, 1.12 * max(max(one[1:]) for one in rows))
    axes.set_xlabel("seconds; figures: (measured - predicted) / measured")
    figure.legend(loc="outside lower center", ncols=2)
