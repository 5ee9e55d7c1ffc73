"""`tonari runs`: which runs lie below a directory, how far they are, and a page of one."""

import json as json_module
import sys
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from dataio.metrics import replace_text
from tonari.errors import CommandError
from tonari.outputs import check_page
from tonari.runs.find import FoundRun, find_runs, make_page, read_found
from tonari.trainer.watch.page import PAGE
from tonari.trainer.watch.record import NAME


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """List the runs of tonari train below a directory, newest first; of one run say all.

    A run is running, complete, stopped (the same command goes on) or failed. Its page, run.html,
    lies in its directory, and is written as it trains.
    """

    directory: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Where to look; or a run's own directory."""
    html: Path | None = None
    """Of one run: write its page anew into this file."""
    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        CommandError: If there is no such directory, or it is a run that cannot be read.
    """
    options = tyro.cli(
        RunsOptions, args=argv, prog="tonari runs", config=(tyro.conf.FlagCreatePairsOff,)
    )
    directory = options.directory
    is_run = (directory / NAME).exists()
    if not directory.is_dir():
        raise CommandError(f"{directory}: found no such directory; give one that runs lie below")
    if options.html is not None:
        if not is_run:
            raise CommandError(f"--html: {directory} is no run, expected one; give its directory")
        check_page("--html", options.html)
        replace_text(options.html, make_page(directory))
    runs, unread = ([read_found(directory)], []) if is_run else find_runs(directory)
    for why in unread:
        print(f"tonari runs: {why}", file=sys.stderr)
    if options.json:
        print(json_module.dumps([run.to_json() for run in runs]))
    elif is_run:
        print("\n".join(_details(runs[0])))
    elif runs:
        Console().print(_table(runs, directory))
    else:
        print(f"{directory}: no run of tonari train lies here or below")
    if options.html is not None and not options.json:
        print(f"wrote {options.html}")
    return 0


def _table(runs: list[FoundRun], below: Path) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, leading=1)
    table.add_column("run", overflow="fold", ratio=1)
    table.add_column("state")
    for name in ("started", "done", "loss", "test", "ranks"):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            f"{run.directory.relative_to(below)}\n{run.model}, {run.data}", _state(run),
            f"{_when(run)}\n{_took(run.duration_s)}",
            f"{run.epochs}/{run.planned_epochs}\n{run.steps:,}/{run.planned_steps:,}",
            _loss(run), _test(run), f"{run.ranks:,}",
        )  # fmt: skip
    return table


def _details(run: FoundRun) -> list[str]:
    page = run.directory / PAGE
    facts = {
        "state": _state(run).replace("\n", " ") + (f": {run.how}" if run.how != run.state else ""),
        "started": f"{_when(run)}, took {_took(run.duration_s)}; ranks: {run.ranks:,}",
        "done": f"{run.epochs} of {run.planned_epochs} epochs, {run.steps:,} of "
        f"{run.planned_steps:,} steps",
        "last": f"loss {_loss(run)}, test {_test(run)}",
        "model": run.model,
        "data": run.data,
        **run.ids,
        "page": str(page) if page.exists() else "none; --html FILE writes one",
    }
    width = max(map(len, facts))
    return [str(run.directory), *(f"  {name:<{width}}  {words}" for name, words in facts.items())]


def _state(run: FoundRun) -> str:
    return "stopped,\ncan go on" if run.state == "stopped" else run.state


def _when(run: FoundRun) -> str:
    return f"{datetime.fromtimestamp(run.started_s):%m-%d %H:%M}"


def _took(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _loss(run: FoundRun) -> str:
    return f"{run.last['loss']:.4g}" if "loss" in run.last else "-"


def _test(run: FoundRun) -> str:
    if "accuracy" in run.last:
        return f"{run.last['accuracy']:.1%}"
    return f"{run.last['evaluation_loss']:.4g}" if "evaluation_loss" in run.last else "-"
