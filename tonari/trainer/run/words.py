"""A run in words, as its rank 0 prints them: a line an epoch, and one at its end."""

from typing import TYPE_CHECKING

from tonari.trainer.watch.metrics import Line
from tonari.trainer.watch.parts import off_words

if TYPE_CHECKING:
    from tonari.trainer.run.loop import Summary

RESULTS = ("loss", "evaluation_loss", "accuracy")


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


def summary_words(summary: "Summary", directory: str) -> str:
    """Say what a run did, and where its results are."""
    done = "trained" if summary.finished else f"stopped by {summary.stopped_by} after"
    return (
        f"{done} {summary.progress.epochs} epochs, {summary.progress.steps} steps on "
        f"{summary.num_replicas} replicas{_skipped_words(summary.progress.skipped)}"
        f"{_result_words(summary.last)}; results in {directory}"
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
