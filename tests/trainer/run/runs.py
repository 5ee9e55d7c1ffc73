"""Small runs in this process, and their metrics."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dataio.base.lines import read_checked_lines
from tonari.trainer.config.config import load_config
from tonari.trainer.run.loop import train
from tonari.trainer.run.step import Step, train_step
from tonari.trainer.run.words import Summary
from tonari.trainer.watch.meter import BY_CAUSE

KAKURENBO = ("importance.kind=kakurenbo", "importance.fraction=0.5", "importance.tau=0")


MEASURED = {
    "tokens_per_s", "mfu",
    "epoch_s", "wait_s", "staging_s", "evaluation_s", "train_samples_per_s", "source_bytes",
    "samples_per_s", "wait_fraction", "exchange_overlap_fraction", "train_s", "exchange_s",
    "epoch_end_s", "refresh_s", "checkpoint_s", "other_s", "measured_s", *BY_CAUSE,
}  # fmt: skip


def lines(directory: Path) -> list[dict[str, Any]]:
    """Read a run's metrics, without what no two runs share."""
    return [
        {k: v for k, v in line.items() if k not in MEASURED}
        for line in read_checked_lines(directory / "metrics.jsonl")
    ]


def run(config: Path, name: str, *overrides: str, resume: str = "auto") -> Summary:
    """Train in this process, into a directory of its own."""
    directory = config.parent / name
    return train(load_config(config, (f"run.directory={directory}", *overrides)), resume=resume)


def stop_after(
    monkeypatch: pytest.MonkeyPatch, steps: int, *, number: signal.Signals = signal.SIGTERM
) -> None:
    """Send this process a signal in a step; ranks ask for signals after every one."""
    monkeypatch.setattr("tonari.trainer.watch.stop.ASK_S", 0)
    taken: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Step:
        taken.append(1)
        if len(taken) == steps:
            os.kill(os.getpid(), number)
        return train_step(*args, **kwargs)

    monkeypatch.setattr("tonari.trainer.run.loop.train_step", counted)
