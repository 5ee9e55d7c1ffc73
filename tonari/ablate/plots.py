"""A study's plots: accuracy by arm, accuracy against training time, and the curves to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tonari.ablate.controls import CONTROLS, control_line
from tonari.ablate.lines import Line
from tonari.ablate.measure import ACCURACY, Measure
from tonari.ablate.results import ArmResults
from tonari.ablate.stats import Difference, mean_over_seeds
from tonari.report.pictures import COLOURS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "oDv^P>Xph"
BASELINE_COLOUR = "#7f7f7f"
CONTROL_STYLES = {
    "epochs": ("#6b8fb5", "--", "s"),
    "random": ("#b5896b", ":", "<"),
    "highest": ("#a89a4e", (0, (5, 2)), ">"),
    "ema": ("#7fa67f", "-.", "d"),
    "robust": ("#a58ab8", (0, (3, 1, 1, 1)), "h"),
}
FRONT_COLOUR = "#e8c547"

Draw = Callable[["Figure"], None]


@dataclass(frozen=True)
class Place:
    """Where an arm lies: mean and deviation of seconds of training, and of its result in points."""

    seconds: float
    seconds_spread: float
    accuracy: float
    accuracy_spread: float


def place(arm: ArmResults) -> Place | None:
    """Find where an arm lies; None where its cells have no time."""
    seconds = arm.figures("train_s")
    if not seconds:
        return None
    time = mean_over_seeds(list(seconds.values()))
    accuracy = mean_over_seeds([arm.final[seed] for seed in seconds])
    return Place(time.mean, time.deviation or 0.0, accuracy.mean, accuracy.deviation or 0.0)


def front(places: Mapping[str, Place]) -> list[str]:
    """Name the arms that no other beats in accuracy and time at once, the cheapest first."""
    found: list[str] = []
    best = -np.inf
    for name, one in sorted(places.items(), key=lambda item: (item[1].seconds, -item[1].accuracy)):
        if one.accuracy > best:
            found.append(name)
            best = one.accuracy
    return found


def draw_pareto(figure: "Figure", arms: Sequence[ArmResults]) -> None:
    """Draw accuracy against training time, the front, and each control as a line."""
    axes = figure.subplots()
    places = {arm.name: found for arm in arms if (found := place(arm))}
    handles = _draw_front(axes, places)
    for baseline in dict.fromkeys(arm.baseline for arm in arms):
        handles |= _draw_controls(axes, arms, baseline, places)
    for arm, (colour, marker) in _styles(arms):
        if arm.name in places and not arm.control:
            handles[_plain(arm.name)] = _draw_place(axes, places[arm.name], colour, marker)
    _label_results(axes, arms, xlabel="training time, s (tests left out)")
    wholes = [places.get(name) for name in {arm.baseline for arm in arms}]
    if len(wholes) == 1 and (whole := wholes[0]):
        _draw_ratio_scale(axes, whole.seconds)
    _legend(figure, handles)


def draw_curves(figure: "Figure", arms: Sequence[ArmResults]) -> None:
    """Draw each arm's test accuracy against the seconds trained so far, mean and spread."""
    axes = figure.subplots()
    handles: dict[str, Artist] = {}
    for arm, (colour, _) in _styles(arms):
        seconds, accuracies = _mean_curve(arm)
        if not seconds.size:
            continue
        dash = CONTROL_STYLES[arm.control][1] if arm.control in CONTROLS else "-"
        middle, spread = accuracies.mean(axis=0), accuracies.std(axis=0, ddof=len(accuracies) > 1)
        (line,) = axes.plot(
            seconds, middle, linestyle=dash, color=colour, linewidth=1.2 if arm.control else 2.2,
            marker="." if len(seconds) < 12 else None, alpha=0.8,
        )  # fmt: skip
        if not arm.control:
            axes.fill_between(
                seconds, middle - spread, middle + spread, color=colour, alpha=0.13, linewidth=0
            )
        handles.setdefault(CONTROLS.get(arm.control) or _plain(arm.name), line)
    _label_results(axes, arms, xlabel="training time so far, s (tests left out)")
    _legend(figure, handles)


def draw_accuracy(
    figure: "Figure", arms: Sequence[ArmResults], lines: Sequence[Line], margin: float
) -> None:
    """Draw every seed's accuracy and the mean of each arm, and the paired differences."""
    left, right = figure.subplots(1, 2, sharey=True)
    right.axvspan(-margin, margin, color="#2ca02c", alpha=0.15, linewidth=0)
    right.axvline(0, color=BASELINE_COLOUR, linewidth=0.8)
    for row, (arm, line) in enumerate(zip(arms, lines, strict=True)):
        values = [arm.measure.shown(points) for points in arm.final.values()]
        left.plot(values, [row] * len(values), "o", color=COLOURS[1], alpha=0.45, markersize=4)
        if values:
            left.plot(sum(values) / len(values), row, "|", color=COLOURS[0], markersize=14)
        if line.difference:
            _draw_difference(right, row, line.difference)
    left.set_yticks(range(len(lines)), [_plain(line.arm) for line in lines])
    left.invert_yaxis()
    left.set(xlabel=f"{_measure(arms).axis} (dots: seeds, bar: mean)")
    right.set(xlabel=f"points against its baseline,\n95 % interval (green: within {margin:g})")


def _measure(arms: Sequence[ArmResults]) -> Measure:
    return arms[0].measure if arms else ACCURACY


def _label_results(axes: "Axes", arms: Sequence[ArmResults], *, xlabel: str) -> None:
    """Name the axes; results lie by their points, so that up is better, whatever is shown."""
    measure = _measure(arms)
    axes.set(xlabel=xlabel, ylabel=measure.axis)
    if measure is not ACCURACY:
        axes.yaxis.set_major_formatter(lambda points, _: f"{measure.shown(points):g}")


def _draw_difference(axes: "Axes", row: int, difference: Difference) -> None:
    if difference.low is not None and difference.high is not None:
        axes.plot([difference.low, difference.high], [row, row], color=COLOURS[1], linewidth=2)
    axes.plot(difference.mean, row, "o", color=COLOURS[1])


def _draw_front(axes: "Axes", places: Mapping[str, Place]) -> "dict[str, Artist]":
    named = [places[name] for name in front(places)]
    if not named:
        return {}
    (line,) = axes.plot(
        [one.seconds for one in named], [one.accuracy for one in named],
        color=FRONT_COLOUR, linewidth=9, alpha=0.45, solid_capstyle="round", zorder=1,
    )  # fmt: skip
    return {"Pareto front": line}


def _draw_controls(
    axes: "Axes", arms: Sequence[ArmResults], baseline: str, places: Mapping[str, Place]
) -> "dict[str, Artist]":
    handles: dict[str, Artist] = {}
    for control, name in CONTROLS.items():
        line = control_line(arms, control, baseline=baseline)
        if not line:
            continue
        colour, dash, marker = CONTROL_STYLES[control]
        joined = [places[arm.name] for arm in line]
        (drawn,) = axes.plot(
            [one.seconds for one in joined], [one.accuracy for one in joined], linestyle=dash,
            color=colour, linewidth=2, marker=marker, markersize=6, zorder=2,
        )  # fmt: skip
        for one in joined:
            _draw_bars(axes, one, colour, faint=True)
        handles[f"control: {name}"] = drawn
    return handles


def _draw_ratio_scale(axes: "Axes", seconds: float) -> None:
    scale = axes.secondary_xaxis(
        "top",
        functions=(
            lambda place: np.asarray(place, np.float64) / seconds,
            lambda share: np.asarray(share, np.float64) * seconds,
        ),
    )
    scale.set_xlabel("x the baseline's time")
    scale.spines["top"].set_visible(False)
    scale.tick_params(length=0)


def _draw_place(axes: "Axes", one: Place, colour: str, marker: str) -> "Artist":
    _draw_bars(axes, one, colour, faint=False)
    return axes.scatter(
        one.seconds, one.accuracy, s=95, color=colour, marker=marker,
        edgecolors=axes.get_facecolor(), linewidths=1.2, zorder=5,
    )  # fmt: skip


def _draw_bars(axes: "Axes", one: Place, colour: str, *, faint: bool) -> None:
    axes.errorbar(
        one.seconds, one.accuracy, xerr=one.seconds_spread, yerr=one.accuracy_spread,
        fmt="none", ecolor=colour, elinewidth=0.8 if faint else 1.6, alpha=0.4 if faint else 0.75,
        zorder=2 if faint else 4,
    )  # fmt: skip


def _mean_curve(arm: ArmResults) -> tuple[np.ndarray, np.ndarray]:
    """float[tests]: mean seconds; float[seeds, tests]: accuracies; of the tests that all have."""
    curves = [curve for seed in sorted(arm.cells) if (curve := arm.curve(seed))]
    if not curves:
        return np.zeros(0), np.zeros((0, 0))
    tests = min(map(len, curves))
    # [seeds, tests, 2]
    stacked = np.array([curve[:tests] for curve in curves])
    return stacked[..., 0].mean(axis=0), stacked[..., 1]


def _styles(arms: Sequence[ArmResults]) -> list[tuple[ArmResults, tuple[str, str]]]:
    """Each arm's colour and marker: baselines grey, controls as their lines, others in turn."""
    baselines = {arm.baseline for arm in arms}
    found, turn = [], 0
    for arm in arms:
        if arm.control in CONTROLS:
            colour, _, marker = CONTROL_STYLES[arm.control]
        elif arm.name in baselines:
            colour, marker = BASELINE_COLOUR, "o"
        else:
            colour, marker = COLOURS[turn % len(COLOURS)], MARKERS[turn % len(MARKERS)]
            turn += 1
        found.append((arm, (colour, marker)))
    return found


def _legend(figure: "Figure", handles: Mapping[str, "Artist"]) -> None:
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center",
            ncols=2 if len(handles) > 2 else len(handles), fontsize=10, markerscale=0.9,
        )  # fmt: skip


def _plain(name: str) -> str:
    """An arm's name for a legend, which would leave out one that begins with an underscore."""
    return f" {name}" if name.startswith("_") else name
