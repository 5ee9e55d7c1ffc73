"""A run as one page: what it does now, its curves, where its time goes. Written as it trains."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from typing_extensions import Self

from dataio.metrics import replace_text
from tonari.report.chart import Chart, Scale
from tonari.report.pages import lay_out
from tonari.report.tables import Table
from tonari.report.units import duration
from tonari.trainer.checkpoint.directory import whole_checkpoints
from tonari.trainer.watch.history import SPIKE, History, read_history
from tonari.trainer.watch.metrics import Line
from tonari.trainer.watch.record import Noted, Record, Settings
from tonari.trainer.watch.spikes import Spike

logger = logging.getLogger(__name__)

PAGE = "run.html"
"""In a run's directory."""
TEMPLATE = Path(__file__).with_name("run.jinja")
EVERY_S = 60.0
"""Between two writings of a page."""
LOSS = "Loss"
CHARTS: tuple[tuple[str, Scale, tuple[tuple[str, str, str], ...]], ...] = (
    (LOSS, "log", (
        ("step", "loss", "training"), ("epoch", "loss", "training, an epoch's mean"),
        ("test", "evaluation_loss", "test"), ("test", "ema_evaluation_loss", "test, mean weights"),
    )),
    ("Accuracy on the test data", "share", (
        ("test", "accuracy", "weights"), ("test", "ema_accuracy", "averaged weights"),
    )),
    ("Learning rate", "linear", (("step", "lr", "learning rate"),)),
    ("Samples a second", "linear", (("step", "samples_per_s", "all replicas"),)),
    ("Tokens a second", "linear", (("step", "tokens_per_s", "all replicas"),)),
    ("Share of the devices' speed that is used (MFU)", "share", (("step", "mfu", "MFU"),)),
    ("Share of the time spent waiting for data", "share", (
        ("step", "wait_fraction", "mean of the replicas"),
    )),
    ("Hidden samples", "share", (("step", "hidden_fraction", "part of all"),)),
    ("Samples exchanged in an epoch", "linear", (("epoch", "exchanged_rows", "all replicas"),)),
    ("Exchange that was done before the epoch's end", "share", (
        ("step", "exchange_overlap_fraction", "part of all"),
    )),
    ("MB read from the source in an epoch", "linear", (("epoch", "source_mb", "all replicas"),)),
    ("Norm of the gradients", "log", (("step", "gradient_norm", "before clipping"),)),
)  # fmt: skip
"""Titles, scales, and the curves: of lines of which kind, a key, a name."""


def charts_of(history: History, *, marks: Sequence[float] = ()) -> list[Chart]:
    """Draw what a run measured; a figure that was 0 all the time, or not known, is left out.

    Args:
        history: Its metrics.
        marks: Steps to point at above the loss.
    """
    causes = tuple(("epoch", cause, cause) for cause in [*history.spent][1:])
    charts, until = [], history.last.get("step", 0)
    for title, scale, asked in (*CHARTS, ("Seconds of an epoch, steps left out", "linear", causes)):
        curves = [history.curve(*one) for one in asked]
        if curves := [curve for curve in curves if any(value for _, value in curve.points)]:
            charts.append(Chart(title, curves, scale, until, marks if title == LOSS else ()))
    return charts


def page_of(
    directory: Path, record: Record, settings: Settings, history: History, *, state: str
) -> str:
    """Lay a run out as a page that needs nothing beside it.

    Args:
        directory: Of the run.
        record: What it noted.
        settings: What its ``config.json`` holds.
        history: Its metrics.
        state: What it does, in words.
    """
    spikes, checkpoints = history.spikes(), whole_checkpoints(directory / "checkpoints")
    whole_s = sum(history.spent.values())
    spent = [
        (cause, duration(seconds), f"{seconds / whole_s:.1%}")
        for cause, seconds in history.spent.items()
        if seconds
    ]
    starts = [
        (_when(start.at_s), f"{start.ranks:,}", f"{start.from_step:,}", start.how or state)
        for start in record.starts
    ]
    return lay_out(
        TEMPLATE,
        heading=directory.absolute().name,
        subtitle=f"{settings['model']['kind']}, trained on {_words(settings['data']['train'])}",
        findings=[*_findings(directory, record, settings, history, state, spikes)],
        charts=charts_of(history, marks=[spike.logged.steps[-1] for spike in spikes]),
        tables=[
            Table(("part", "time", "share"), spent, "Where the epochs' time went"),
            Table(("started", "ranks", "after step", "ended"), starts, "Starts"),
        ],
        facts=[
            ("directory", str(directory.absolute())),
            ("checkpoints", ", ".join(path.name for path in checkpoints) or "none"),
            *((name, known) for name, known in record.ids.items()),
            ("page written", _when(time.time())),
        ],
        settings=[
            (f"{table}.{key}", _words(value))
            for table, keys in settings.items()
            for key, value in keys.items()
        ],
    )


def _findings(
    directory: Path,
    record: Record,
    settings: Settings,
    history: History,
    state: str,
    spikes: Sequence[Spike],
) -> Iterator[str]:
    step, last = history.last.get("step", 0), history.last
    planned = record.planned_steps
    share = f" ({step / planned:.0%})" if planned else ""
    epochs = len(history.of("epoch")) and last["epoch"] + (last["kind"] == "epoch")
    yield (
        f"{state[0].upper()}{state[1:]}: step {step:,} of {planned:,}{share}, {epochs} of "
        f"{settings['run']['epochs']} epochs done."
    )
    if known := [
        f"{words} {last[name]:{form}}"
        for name, words, form in (
            ("loss", "loss", ".4g"), ("evaluation_loss", "on test data", ".4g"),
            ("accuracy", "accuracy", ".1%"),
        )
        if name in last
    ]:  # fmt: skip
        yield f"Last: {', '.join(known)}."
    if spikes:
        worst = max(spikes, key=lambda spike: spike.excess)
        yield (
            f"Spikes: the loss rose far above that of the steps around, most by step "
            f"{worst.logged.steps[-1]:,}; {len(spikes)} in all. tonari rows {directory} --spikes "
            f"{SPIKE:g} lists their rows."
        )


def _when(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s):%Y-%m-%d %H:%M}"


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class RunPage:
    """Writes the page of a run, at a line of the log at most once a minute, and at its end.

    For one rank.

    Args:
        directory: Of the run.
        noted: What the run notes.
        settings: Of the run, as tables.
        clock: In seconds.
    """

    def __init__(
        self,
        directory: Path,
        noted: Noted,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._noted, self._settings = directory, noted, settings
        self._clock = clock
        self._next, self._failed = -math.inf, False

    def __enter__(self) -> Self:
        self._history = read_history(self._directory / self._noted.record.metrics)
        return self

    def __exit__(self, *_: object) -> None:
        self._draw(self._noted.record.starts[-1].how)

    def write(self, line: Line) -> None:
        """Show a line, at the latest with another one a minute later."""
        self._history.add(line)
        if self._clock() >= self._next:
            self._draw("running")

    def _draw(self, state: str) -> None:
        self._next = self._clock() + EVERY_S
        path, record = self._directory / PAGE, self._noted.record
        try:
            text = page_of(self._directory, record, self._settings, self._history, state=state)
            replace_text(path, text)
        except Exception as error:  # whatever it is: pages are to be looked at
            if not self._failed:
                logger.warning(
                    "[rank 0] %s: cannot be written (%s: %s); training goes on without it: `tonari "
                    "runs %s --html FILE` makes it later", path, type(error).__name__, error,
                    self._directory,
                )  # fmt: skip
            self._failed = True
