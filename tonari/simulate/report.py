"""What a simulation found, as tables and as a picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shuffle.traffic import ExchangeTraffic
from tonari.report.tables import UNKNOWN, Table, figure
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEAR = 0.05
"""A distance at most this much above that of random rows counts as as good."""

Curve = Sequence[float | None]


@dataclass(frozen=True)
class Curves:
    """How a policy mixes, epoch by epoch; None where there is no such figure.

    Attributes:
        distance: Mean over the nodes looked at.
        distance_error: Its standard error, from having looked at only some nodes.
        distance_worst: Of the nodes looked at.
        epochs_to_random: First epoch whose mean distance is near that of random rows.
        nodes_visited: Mean over the samples followed.
        nodes_visited_error: Its standard error.
        step_correlation: Of the batches of consecutive steps.
        epoch_correlation: Of the batches of one step in consecutive epochs.
    """

    distance: list[float]
    distance_error: list[float | None]
    distance_worst: list[float]
    epochs_to_random: int | None
    nodes_visited: list[float]
    nodes_visited_error: list[float]
    step_correlation: list[float | None]
    epoch_correlation: list[float | None]


@dataclass(frozen=True)
class EpochCost:
    """What an epoch of a policy costs a rank.

    Attributes:
        traffic: What it moves and stores.
        plan_s: Seconds that planning it took here.
        plan_bytes: Peak memory of planning it.
    """

    traffic: ExchangeTraffic
    plan_s: float
    plan_bytes: int


@dataclass(frozen=True)
class SimulatedLine:
    """One policy.

    Attributes:
        name: To show.
        exchange: Its fraction; None of Global.
        curves: How it mixes.
        cost: None of Global, which exchanges nothing.
    """

    name: str
    exchange: float | None
    curves: Curves
    cost: EpochCost | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """A simulation: what was asked, what was looked at, and a line for each policy."""

    num_ranks: int
    num_nodes: int
    num_samples: int
    num_classes: int
    initial: str
    num_epochs: int
    batch_size: int
    steps: int
    step_s: float | None
    sample_bytes: int
    seed: int
    nodes: list[int]
    rows_per_node: int
    pool_rows: int
    random_distance: float
    global_storage_bytes: int
    lines: list[SimulatedLine]


def report_words(report: Report) -> str:
    """Write what was simulated, and all tables."""
    part = "whole pools" if report.rows_per_node >= report.pool_rows else "a sample of the slots"
    lines = [
        f"{report.num_ranks:,} ranks on {report.num_nodes:,} nodes, {report.num_samples:,} samples "
        f"of {format_bytes(report.sample_bytes)} in {report.num_classes:,} classes "
        f"({report.initial}), {report.steps:,} steps of {report.batch_size:,} an epoch",
        f"looked at: {len(report.nodes)} nodes, {report.rows_per_node:,} of "
        f"{report.pool_rows:,} rows each ({part}); as many random rows are at distance "
        f"{report.random_distance:.4f}",
        "",
        *_costs(report).text(),
    ]
    for title, digits, curve in (
        (f"distance from the dataset's classes: mean{_error(report)}", 4, lambda c: c.distance),
        ("distance: worst node looked at", 4, lambda c: c.distance_worst),
        ("nodes visited: mean", 2, lambda c: c.nodes_visited),
        ("correlation of consecutive steps", 3, lambda c: c.step_correlation),
        ("correlation of consecutive epochs", 3, lambda c: c.epoch_correlation),
    ):
        lines += ["", *_by_epoch(title, digits, report, curve).text()]
    return "\n".join(lines)


def _error(report: Report) -> str:
    errors = [error for line in report.lines for error in line.curves.distance_error if error]
    return f" +- {max(errors):.4f} at most" if errors else ""


def shown_epochs(num_epochs: int) -> list[int]:
    """Choose the epochs that a table has room for; the last is always one."""
    some = [epoch for epoch in (0, 1, 2, 5, 10, 20, 50, 100) if epoch < num_epochs - 1]
    return [*some, num_epochs - 1]


def needed_rate(cost: EpochCost, step_s: float | None) -> float | None:
    """MB/s that the exchange needs of a node's link, each way, to end with the epoch."""
    if step_s is None:
        return None
    return cost.traffic.node_bytes / (cost.traffic.steps * step_s) / 1e6


def _costs(report: Report) -> Table:
    """Figures as lines, policies as columns: that fits a terminal of 80 columns."""
    names = ["rows a rank", "bytes a rank", "bytes a node", "MB/s a node", "crosses nodes"]
    names += ["messages a rank", "largest message", "storage a node", "planned in", "memory"]
    columns = [_cells(line.cost, report) for line in report.lines]
    near = [figure(line.curves.epochs_to_random, ".0f") for line in report.lines]
    rows = [*zip(names, *columns, strict=True), ("as random from epoch", *near)]
    heads = ("", *(line.name for line in report.lines))
    return Table(heads, rows, "an epoch's exchange, each way")


def _cells(cost: EpochCost | None, report: Report) -> list[str]:
    if cost is None:
        storage = format_bytes(report.global_storage_bytes)
        return [*[UNKNOWN] * 7, storage, UNKNOWN, UNKNOWN]
    traffic = cost.traffic
    return [
        f"{traffic.num_leaving:,}",
        format_bytes(traffic.rank_bytes),
        format_bytes(traffic.node_bytes),
        figure(needed_rate(cost, report.step_s), ",.3g"),
        f"{traffic.crossing_fraction:.0%}" if traffic.num_leaving else UNKNOWN,
        f"{traffic.num_messages:,}",
        format_bytes(traffic.message_bytes),
        format_bytes(traffic.storage_bytes),
        f"{cost.plan_s:.2g} s",
        format_bytes(cost.plan_bytes),
    ]


def _by_epoch(title: str, digits: int, report: Report, curve: Callable[[Curves], Curve]) -> Table:
    epochs = shown_epochs(report.num_epochs)
    rows = [
        [line.name, *(figure(curve(line.curves)[epoch], f".{digits}f") for epoch in epochs)]
        for line in report.lines
    ]
    return Table(("epoch", *map(str, epochs)), rows, title)


def draw_curves(drawn: "Figure", report: Report) -> None:
    """Draw the curves of all policies."""
    panels: list[tuple[str, Callable[[Curves], Curve]]] = [
        ("distance from the dataset's classes", lambda curves: curves.distance),
        ("nodes visited by a sample", lambda curves: curves.nodes_visited),
        ("correlation of consecutive steps", lambda curves: curves.step_correlation),
        ("correlation of consecutive epochs", lambda curves: curves.epoch_correlation),
    ]
    grid = drawn.subplots(2, 2, sharex=True)
    for axes, (title, curve) in zip(grid.flat, panels, strict=True):
        for line in report.lines:
            values = [float("nan") if value is None else value for value in curve(line.curves)]
            style = "--" if line.exchange is None else "-"
            axes.plot(values, style, marker="." if len(values) < 40 else "", label=line.name)
        axes.set_title(title)
    grid[0, 0].set_yscale("log")
    grid[0, 0].legend()
    for axes in grid[1]:
        axes.set_xlabel("epoch")
    drawn.suptitle(
        f"{report.num_ranks:,} ranks, {report.num_samples:,} samples, {report.initial} start"
    )
