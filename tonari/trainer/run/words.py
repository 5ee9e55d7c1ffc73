"""A run in words, as its rank 0 says them: what is trained, a line an epoch, and one at its end."""

from collections.abc import Mapping
from dataclasses import dataclass

from tonari.trainer.checkpoint.directory import Progress
from tonari.trainer.config.config import Config
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.mesh.mesh import name_axes
from tonari.trainer.mesh.place import Place
from tonari.trainer.watch.metrics import Line
from tonari.trainer.watch.parts import off_words
from tonari.trainer.watch.totals import source_words, time_words, wait_words

RESULTS = ("loss", "evaluation_loss", "accuracy")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended, the same on every rank.

    Attributes:
        progress: Epochs and steps that are done, all starts of the run together.
        num_replicas: Replicas that trained.
        rank: Of this process.
        world_size: Ranks of the job.
        finished: False if a signal ended it early; the same command goes on.
        stopped_by: Which one; empty if none did.
        last: The line of the last epoch that this start ended; None if it ended none.
        totals: What this start read and waited for on all ranks: see `Totals.sum_up`.
        parts_s: Seconds of this rank by part of an epoch: see `EpochParts`.
    """

    progress: Progress
    num_replicas: int
    rank: int
    world_size: int
    finished: bool
    stopped_by: str
    last: Line | None
    totals: Mapping[str, float]
    parts_s: Mapping[str, float]


def begin_words(config: Config, loader: ReplicaLoader, *, place: Place, num_steps: int) -> str:
    """Say what is about to be trained.

    Args:
        config: The run's settings.
        loader: Its data.
        place: Of this rank.
        num_steps: That are done.
    """
    data, run, mesh = config.data, config.run, config.mesh
    names = name_axes(tiles=place.tiles)
    axes = [f"{axis} {size}" for axis, size in zip(names, place.sizes, strict=True) if size > 1]
    ways = [*axes, mesh.dtype, *(["compiled"] if mesh.compile else [])]
    rows = data.batch_size * place.num_replicas * config.optimizer.accumulate
    cut = f"{run.max_steps:,} steps" if run.max_steps else ""
    length = f"at most {cut}" if cut else f"{run.epochs} epochs"
    goes_on = f"; goes on after step {num_steps}" if num_steps else ""
    return (
        f"training {config.model.kind} ({', '.join(ways)}) on {loader.num_samples:,} samples"
        f"{loader.excluded}, {rows:,} a step, {length}; results in {run.directory}{goes_on}"
    )


def epoch_words(line: Line, num_epochs: int) -> str:
    """Say what an epoch took and gave.

    Args:
        line: The epoch's.
        num_epochs: Of the run.
    """
    hidden, wait_s = line["hidden_fraction"], line["wait_s"]
    return (
        f"epoch {line['epoch']} of {num_epochs}: {line['epoch_s']:.1f} s, of it waiting for data "
        f"{wait_s:.1f} s{_result_words(line)}, {hidden:.0%} hidden{off_words(line)}"
    )


def evaluation_words(line: Line) -> str:
    """Say what another process found of a step."""
    late = f", {line['late_steps']} steps later" if line["late_steps"] else ""
    return f"step {line['step']} evaluated{_result_words({'loss': None, **line})}{late}"


def summary_words(summary: Summary, directory: str) -> str:
    """Say what a run did, what it read and waited for, and where its results are."""
    totals = summary.totals
    hidden = f", {totals['hidden_fraction']:.0%} hidden" if totals["hidden_fraction"] else ""
    done = "trained" if summary.finished else f"stopped by {summary.stopped_by} after"
    return (
        f"{done} {summary.progress.epochs} epochs, {summary.progress.steps} steps on "
        f"{summary.num_replicas} replicas{_skipped_words(summary.progress.skipped)}"
        f"{_result_words(summary.last)}{hidden}\n"
        f"{source_words(totals)}\n{time_words(totals, summary.parts_s)}"
        f"{wait_words(totals, summary.parts_s)}\n"
        f"results in {directory}"
        + ("" if summary.finished else "; the same command goes on from here")
    )


def _skipped_words(skipped: list[list[int]]) -> str:
    number = sum(stop - first for first, stop in skipped)
    return f", {number} of the steps skipped" if number else ""


def _result_words(line: Line | None) -> str:
    shown = [(name, line[name]) for name in RESULTS] if line else []
    return "".join(
        f", {name.replace('_', ' ')} {value:.4f}" for name, value in shown if value is not None
    )
