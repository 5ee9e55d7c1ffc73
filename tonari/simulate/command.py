"""`tonari simulate`: what a run's exchange would do, at any scale, without moving data."""

import json as json_module
import math
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dataio.base.seeding import key
from dataio.plan.layout import Layout
from shuffle.mixing import (
    Labels,
    Mixing,
    SampledNodes,
    Visits,
    choose_look,
    count_visits,
    given_labels,
    mix,
    mix_globally,
    random_distance,
    random_labels,
    random_visits,
    sorted_labels,
)
from shuffle.traffic import ReplicaPlan, count_traffic, plan_replica
from tonari.errors import CommandError
from tonari.outputs import PLOTS, check_plot
from tonari.report.pictures import write_picture
from tonari.simulate.report import (
    NEAR,
    Curves,
    EpochCost,
    Report,
    SimulatedLine,
    draw_curves,
    report_words,
)
from tonari.sizes import parse_bytes

MAX_CLASSES = 10_000_000

NUM_FOLLOWED = 20_000
"""Samples whose nodes are counted: a standard error of 0.01 nodes or so."""


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Compute what a run's exchange would do, moving no data: mixing, traffic, storage, planning.

    Calls the functions that training calls, for ranks and samples that this machine need not have.
    Every fraction given with --exchange is one line, between Local (rows never move) and Global
    (every node holds all rows). Example, some minutes on two cores:

      tonari simulate --ranks 4096 --samples 1.3e9 --exchange 0.05 0.1 0.3

    distance: how far the class shares among a node's rows are from those of the dataset (total
    variation, 0 to 1), as mean and as worst of the nodes looked at. Global's line is what rows
    drawn at random would give, not 0: a mean near it is as good as a global shuffle.

    nodes visited: different nodes on which a sample has been trained by the end of an epoch.

    correlation: with d a batch's class shares less the dataset's, the mean of d . d' over pairs of
    batches, divided by the mean of d . d. 1: a batch shows the classes of the other. 0: it shows
    nothing of it, as with batches drawn at random. Pairs are consecutive steps of one rank, or
    the same step of one rank in consecutive epochs.

    MB/s a node: what a node's link has to carry, each way, for the exchange to end with the epoch.

    Errors: whole pools are followed where --rows suffice, so only nodes are a sample; "+-" is the
    standard error that this leaves. More: docs/simulate.md.
    """

    ranks: int
    """Ranks of the job, each a replica of the model."""
    samples: float | None = None
    """Samples of the dataset, such as 1.3e9. Needed unless there are --labels."""
    exchange: tuple[float, ...] = (0.1,)
    """Fractions of its rows that a rank gives and takes each epoch, in [0, 1]."""
    ranks_per_node: int = 4
    """Ranks on a node; the last node has what is left."""
    epochs: int = 30
    """Epochs to follow."""
    classes: int = 1000
    """Classes of equal size."""
    initial: Literal["sorted", "random"] = "sorted"
    """How samples lie in the source: sorted by class, which is the hardest case, or at random."""
    labels: Path | None = None
    """A .npy file with the label of every sample, >= 0, in the order of the source, instead."""
    sample_bytes: str = "100kB"
    """Size of a sample."""
    batch_size: int = 32
    """Rows of a batch of one rank."""
    steps: int | None = None
    """Steps of an epoch; makes the batches as large as that needs."""
    step_s: float | None = None
    """Seconds that a step takes: then the MB/s that the exchange needs are stated."""
    nodes: int = 8
    """Nodes to look at, drawn at random."""
    rows: float = 1.2e7
    """Rows to follow on these together, at most. Memory is some 40 bytes for each."""
    seed: int = 0
    """The run's seed."""
    json: bool = False
    """Print one JSON document and nothing else on stdout."""
    plot: Path | None = None
    """Draw the curves into this .png, .svg or .pdf file (needs the `report` extra)."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node", "epochs", "batch_size", "nodes", "classes"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}, expected >= 1"
                )
        for name, value in (("samples", self.samples), ("rows", self.rows)):
            if value is not None and not (1 <= value < 2**60 and value == int(value)):
                raise ValueError(
                    f"--{name} is {value:g}, expected a whole number >= 1, such as 1.3e9"
                )
        if self.samples is None and self.labels is None:
            raise ValueError("--samples is missing; give it, or the labels of all samples")
        if not self.exchange or not all(0 <= fraction <= 1 for fraction in self.exchange):
            raise ValueError(f"--exchange is {self.exchange}, expected fractions in [0, 1]")
        if self.classes > MAX_CLASSES:
            raise ValueError(f"--classes is {self.classes}, expected at most {MAX_CLASSES}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps is {self.steps}, expected >= 1")
        if self.step_s is not None and not 0 < self.step_s < math.inf:
            raise ValueError(f"--step-s is {self.step_s}, expected a time > 0")
        if self.plot is not None and self.plot.suffix not in PLOTS:
            raise ValueError(
                f"--plot is {self.plot}, expected a name that ends in {', '.join(PLOTS)}"
            )
        try:
            parse_bytes(self.sample_bytes)
        except ValueError as error:
            raise ValueError(f"--sample-bytes: {error}") from error


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        CommandError: If samples, ranks and labels do not fit together.
        ExchangeError: If the exchange would have too many messages.
    """
    options = tyro.cli(
        Simulate, args=argv, prog="tonari simulate", config=(tyro.conf.FlagCreatePairsOff,)
    )
    check_plot("--plot", options.plot)
    layout, labels = make_inputs(options)
    report = simulate(options, layout, labels)
    if options.plot is not None:
        write_picture(options.plot, partial(draw_curves, report=report), inches=(11, 8))
    if options.json:
        print(json_module.dumps(asdict(report)))
    else:
        print(report_words(report))
    return 0


def make_inputs(options: Simulate) -> tuple[Layout, Labels]:
    """Stand the ranks on nodes, and find every sample's class."""
    given = _read_labels(options.labels) if options.labels is not None else None
    num_samples = int(options.samples) if options.samples is not None else 0
    if given is not None and num_samples not in (0, len(given)):
        raise CommandError(
            f"--labels {options.labels}: found {len(given):,} labels for --samples "
            f"{num_samples:,}; leave --samples out"
        )
    num_samples = num_samples if given is None else len(given)
    full, left = divmod(options.ranks, options.ranks_per_node)
    try:
        layout = Layout((options.ranks_per_node,) * full + ((left,) if left else ()), num_samples)
    except ValueError as error:
        raise CommandError(f"--ranks {options.ranks}: {error}") from error
    if given is not None:
        return layout, given_labels(given)
    if options.initial == "sorted":
        return layout, sorted_labels(num_samples, options.classes)
    stream = key(options.seed, "simulated labels")
    return layout, random_labels(num_samples, options.classes, stream)


def simulate(options: Simulate, layout: Layout, labels: Labels) -> Report:
    """Follow every policy, and plan an epoch of one rank."""
    row_bytes = parse_bytes(options.sample_bytes)
    batch_size = options.batch_size
    if options.steps is not None:
        batch_size = -(-layout.share_rows(0) // options.steps)
    fractions = sorted({0.0, *options.exchange})
    # All plans before any curve: what cannot run at all is known at once
    costs = [
        measure_plan(
            layout, exchange=q, batch_size=batch_size, row_bytes=row_bytes, seed=options.seed
        )
        # The one with the most messages first: it is the one that may be refused
        for q in reversed(fractions)
    ][::-1]
    look = choose_look(
        layout, num_nodes=options.nodes, num_rows=int(options.rows), seed=options.seed
    )
    expected = statistics.fmean(random_distance(labels.sizes, len(h)) for h in look.homes)
    with _progress(options.epochs * (len(fractions) + 1)) as shown:
        lines = []
        for fraction, cost in zip(fractions, costs, strict=True):
            mixings = mix(
                layout, look, labels, exchange=fraction, seed=options.seed,
                num_epochs=options.epochs, batch_size=batch_size,
            )  # fmt: skip
            visits = count_visits(
                layout, exchange=fraction, seed=options.seed, num_epochs=options.epochs,
                num_samples=NUM_FOLLOWED,
            )  # fmt: skip
            name = f"Partial {fraction:g}" if fraction else "Local"
            curves = summarise(shown(mixings), visits, expected, look, layout)
            lines.append(SimulatedLine(name, fraction, curves, cost))
        mixings = mix_globally(
            layout, look, labels, seed=options.seed, num_epochs=options.epochs,
            batch_size=batch_size,
        )  # fmt: skip
        visits = Visits(random_visits(layout, options.epochs), np.zeros(options.epochs))
        lines.append(
            SimulatedLine(
                "Global", None, summarise(shown(mixings), visits, expected, look, layout), None
            )
        )
    return Report(
        num_ranks=layout.num_replicas,
        num_nodes=layout.num_nodes,
        num_samples=layout.num_samples,
        num_classes=len(labels.sizes),
        initial=str(options.labels or options.initial),
        num_epochs=options.epochs,
        batch_size=batch_size,
        steps=costs[0].traffic.steps,
        step_s=options.step_s,
        sample_bytes=row_bytes,
        seed=options.seed,
        nodes=look.nodes.tolist(),
        rows_per_node=len(look.homes[0]),
        pool_rows=layout.pool_rows(int(look.nodes[0])),
        random_distance=expected,
        global_storage_bytes=layout.num_samples * row_bytes,
        lines=lines,
    )


def measure_plan(
    layout: Layout, *, exchange: float, batch_size: int, row_bytes: int, seed: int
) -> EpochCost:
    """Plan an epoch of the rank in the middle twice: for its time, and for its memory."""

    def plan() -> tuple[Layout, ReplicaPlan]:
        # A layout of its own: what one remembers of an earlier plan would flatter the next
        fresh = Layout(layout.replicas, layout.num_samples)
        return fresh, plan_replica(
            fresh,
            replica=fresh.num_replicas // 2,
            exchange=exchange,
            seed=seed,
            epoch=1,
            batch_size=batch_size,
            mean_row_bytes=row_bytes,
        )

    started = time.perf_counter()
    plan()
    plan_s = time.perf_counter() - started
    tracemalloc.start()
    try:
        fresh, made = plan()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return EpochCost(count_traffic(fresh, made, row_bytes=row_bytes), plan_s, peak_bytes)


def summarise(
    mixings: Iterable[Mixing], visits: Visits, expected: float, look: SampledNodes, layout: Layout
) -> Curves:
    """Put what was followed epoch by epoch into curves."""
    found = list(mixings)
    distances = np.array([mixing.distances for mixing in found])
    means = distances.mean(axis=1)
    count = len(look.nodes)
    near = np.flatnonzero(means <= expected * (1 + NEAR))
    # Of all nodes there is no error; of a single one nobody knows it
    error = np.full(len(found), math.nan if count < layout.num_nodes else 0.0)
    if 1 < count < layout.num_nodes:
        unseen = math.sqrt(1 - count / layout.num_nodes)
        error = distances.std(axis=1, ddof=1) / math.sqrt(count) * unseen
    return Curves(
        distance=means.tolist(),
        distance_error=_known(error.tolist()),
        distance_worst=distances.max(axis=1).tolist(),
        epochs_to_random=int(near[0]) if len(near) else None,
        nodes_visited=visits.mean.tolist(),
        nodes_visited_error=visits.error.tolist(),
        step_correlation=_known([mixing.step_correlation for mixing in found]),
        epoch_correlation=_known([mixing.epoch_correlation for mixing in found]),
    )


def _known(values: list[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


def _read_labels(path: Path) -> NDArray[np.integer]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"--labels {path}: {error}; expected a .npy file of one whole number a sample"
        ) from error
    if (
        not isinstance(found, np.ndarray)
        or found.ndim != 1
        or found.dtype.kind not in "iu"
        or not len(found)
    ):
        shown = f"{found.dtype}{list(found.shape)}" if isinstance(found, np.ndarray) else "an .npz"
        raise CommandError(
            f"--labels {path}: found {shown}, expected one whole number a sample, such as "
            f"int32[num_samples]; save the labels with numpy.save"
        )
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= MAX_CLASSES:
        raise CommandError(
            f"--labels {path}: found labels from {low} to {high}, expected [0, {MAX_CLASSES}); "
            f"number the classes from 0"
        )
    return found


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Iterator[Mixing]], Iterator[Mixing]]]:
    """Show how many epochs have been followed, where stderr is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    )
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        task = bar.add_task("epochs followed", total=total)

        def counted(mixings: Iterator[Mixing]) -> Iterator[Mixing]:
            for mixing in mixings:
                yield mixing
                bar.advance(task)

        yield counted
