"""What a simulation found, as tables and as a picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shuffle.traffic import ExchangeTraffic
from tonari.sizes import format_bytes

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
class Cost:
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
    cost: Cost | None


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


def print_report(out: Console, report: Report) -> None:
    """Print all tables."""
    part = "whole pools" if report.rows_per_node >= report.pool_rows else "a sample of the slots"
    out.print(
        f"{report.num_ranks:,} ranks on {report.num_nodes:,} nodes, {report.num_samples:,} samples "
        f"of {format_bytes(report.sample_bytes)} in {report.num_classes:,} classes "
        f"({report.initial}), {report.steps:,} steps of {report.batch_size:,} an epoch\n"
        f"looked at: {len(report.nodes)} nodes, {report.rows_per_node:,} of "
        f"{report.pool_rows:,} rows each ({part}); as many random rows are at distance "
        f"{report.random_distance:.4f}",
        highlight=False,
    )
    out.print(_costs(report))
    epochs = shown_epochs(report.num_epochs)
    for title, cell in (
        (
            f"distance from the dataset's classes: mean{_error(report)}",
            lambda c, e: _number(c.distance, e, 4),
        ),
        ("distance: worst node looked at", lambda c, e: _number(c.distance_worst, e, 4)),
        ("nodes visited: mean", lambda c, e: _number(c.nodes_visited, e, 2)),
        ("correlation of consecutive steps", lambda c, e: _number(c.step_correlation, e, 3)),
        ("correlation of consecutive epochs", lambda c, e: _number(c.epoch_correlation, e, 3)),
    ):
        out.print(_by_epoch(title, report, epochs, cell))


def _error(report: Report) -> str:
    errors = [error for line in report.lines for error in line.curves.distance_error if error]
    return f" +- {max(errors):.4f} at most" if errors else ""


def shown_epochs(num_epochs: int) -> list[int]:
    """Choose the epochs that a table has room for; the last is always one."""
    some = [epoch for epoch in (0, 1, 2, 5, 10, 20, 50, 100) if epoch < num_epochs - 1]
    return [*some, num_epochs - 1]


def needed_rate(cost: Cost, step_s: float | None) -> float | None:
    """MB/s that the exchange needs of a node's link, each way, to end with the epoch."""
    if step_s is None:
        return None
    return cost.traffic.node_bytes / (cost.traffic.steps * step_s) / 1e6


def _costs(report: Report) -> Table:
    """Figures as lines, policies as columns: that fits a terminal of 80 columns."""
    table = Table(title="an epoch's exchange, each way", title_justify="left")
    table.add_column("", no_wrap=True)
    for line in report.lines:
        table.add_column(line.name, justify="right")
    names = ["rows a rank", "bytes a rank", "bytes a node", "MB/s a node", "crosses nodes"]
    names += ["messages a rank", "largest message", "storage a node", "planned in", "memory"]
    columns = [_cells(line.cost, report) for line in report.lines]
    for name, *cells in zip(names, *columns, strict=True):
        table.add_row(name, *cells)
    near = [line.curves.epochs_to_random for line in report.lines]
    table.add_row("as random from", *("-" if e is None else f"epoch {e}" for e in near))
    return table


def _cells(cost: Cost | None, report: Report) -> list[str]:
    if cost is None:
        return [*["-"] * 7, format_bytes(report.global_storage_bytes), "-", "-"]
    traffic, rate = cost.traffic, needed_rate(cost, report.step_s)
    return [
        f"{traffic.num_leaving:,}",
        format_bytes(traffic.rank_bytes),
        format_bytes(traffic.node_bytes),
        "-" if rate is None else f"{rate:,.3g}",
        f"{traffic.crossing_fraction:.0%}" if traffic.num_leaving else "-",
        f"{traffic.num_messages:,}",
        format_bytes(traffic.message_bytes),
        format_bytes(traffic.storage_bytes),
        f"{cost.plan_s:.2g} s",
        format_bytes(cost.plan_bytes),
    ]


def _by_epoch(
    title: str, report: Report, epochs: Sequence[int], cell: Callable[[Curves, int], str]
) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("epoch", no_wrap=True)
    for epoch in epochs:
        table.add_column(str(epoch), justify="right")
    for line in report.lines:
        table.add_row(line.name, *(cell(line.curves, epoch) for epoch in epochs))
    return table


def _number(curve: Curve, epoch: int, digits: int) -> str:
    value = curve[epoch]
    return "-" if value is None else f"{value:.{digits}f}"


def plot(report: Report, path: Path) -> None:
    """Draw the curves of all policies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: list[tuple[str, Callable[[Curves], Curve]]] = [
        ("distance from the dataset's classes", lambda curves: curves.distance),
        ("nodes visited by a sample", lambda curves: curves.nodes_visited),
        ("correlation of consecutive steps", lambda curves: curves.step_correlation),
        ("correlation of consecutive epochs", lambda curves: curves.epoch_correlation),
    ]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True, layout="constrained")
    for axis, (title, curve) in zip(axes.flat, panels, strict=True):
        for line in report.lines:
            values = [float("nan") if value is None else value for value in curve(line.curves)]
            style = "--" if line.exchange is None else "-"
            axis.plot(values, style, marker="." if len(values) < 40 else "", label=line.name)
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[0, 0].set_yscale("log")
    axes[0, 0].legend()
    for axis in axes[1]:
        axis.set_xlabel("epoch")
    figure.suptitle(
        f"{report.num_ranks:,} ranks, {report.num_samples:,} samples, {report.initial} start"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
