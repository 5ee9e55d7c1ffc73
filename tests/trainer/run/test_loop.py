"""What the loop does beside its steps: what it writes, when it averages, and when it may rest."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dataio.base.lines import read_checked_lines
from dataio.epochs import Conductor
from dataio.job.launch import LATER_S
from dataio.job.watchdog import Watchdog
from tests.trainer.digits import write_config
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import read_progress
from tonari.trainer.config.config import load_config
from tonari.trainer.run import loop
from tonari.trainer.run.loop import train
from tonari.trainer.run.optimizers import make_optimizer
from tonari.trainer.watch import parts


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def run(config: Path, *overrides: str, **how: Any) -> Path:
    """Train in this process; the run's directory."""
    directory = config.parent / "run"
    train(load_config(config, (f"run.directory={directory}", *overrides)), **how)
    return directory


def lines(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_checked_lines(path) if line["kind"] == kind]


def noting(act: Callable[..., Any], words: str, told: list[str]) -> Callable[..., Any]:
    """Do the same, and note it."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        told.append(words)
        return act(*args, **kwargs)

    return noted


def test_statistics_are_averaged_before_they_are_evaluated_and_before_they_are_saved(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(loop, "average_buffers", noting(lambda *_: None, "average", told))
    for name in ("train_step", "rescore", "evaluate"):
        monkeypatch.setattr(loop, name, noting(getattr(loop, name), name, told))
    monkeypatch.setattr(Checkpoints, "save", noting(Checkpoints.save, "save", told))
    run(config, "run.epochs=1", "run.checkpoint_steps=4")
    assert told == [
        *4 * ["train_step"], "average", "save", *3 * ["train_step"],
        "average", "rescore", "evaluate", "average", "save",
    ]  # fmt: skip


def test_the_watchdog_expects_steps_after_steps_alone(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expects = False
    seen: list[tuple[str, bool]] = []

    def progress(watchdog: Watchdog, step: int) -> None:
        nonlocal expects
        expects = True

    def rest(watchdog: Watchdog) -> None:
        nonlocal expects
        expects = False

    def seeing(act: Callable[..., Any], name: str) -> Callable[..., Any]:
        def does(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, expects))
            return act(*args, **kwargs)

        return does

    monkeypatch.setattr(Watchdog, "progress", progress)
    monkeypatch.setattr(Watchdog, "rest", rest)
    for name in ("train_step", "rescore", "evaluate"):
        monkeypatch.setattr(loop, name, seeing(getattr(loop, name), name))
    monkeypatch.setattr(Checkpoints, "save", seeing(Checkpoints.save, "save"))
    run(config, "run.epochs=2", "run.checkpoint_steps=4")
    first = [("train_step", False), *3 * [("train_step", True)], ("save", False)]
    ends = [("rescore", False), ("evaluate", False), ("save", False)]
    # Of seven steps an epoch the fourth is saved, then the first of the next epoch.
    assert seen[:11] == [*first, ("train_step", False), *2 * [("train_step", True)], *ends]
    assert seen[11:] == [
        ("train_step", False), ("save", False), ("train_step", False), *3 * [("train_step", True)],
        ("save", False), ("train_step", False), ("train_step", True), *ends,
    ]  # fmt: skip


def test_groups_made_later_wait_no_longer_than_the_first(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    found: list[timedelta] = []

    def noted(*given: Any) -> Any:
        made = dist.new_group()
        assert isinstance(made, dist.ProcessGroup)
        found.append(made._get_backend(torch.device("cpu")).options._timeout)
        return make_optimizer(*given)

    monkeypatch.setattr(loop, "make_optimizer", noted)
    run(config, "run.epochs=1", "run.timeout_s=5")
    assert found == [timedelta(seconds=5.0 + LATER_S)]


def test_every_so_many_epochs_are_saved_and_the_last_of_all(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[tuple[int, int]] = []
    save = Checkpoints.save

    def noted(
        checkpoints: Checkpoints, parts: Any, optimizer: Any, loader: Any, done: Any, **more: Any
    ) -> Path:
        saved.append((done.epochs, done.steps))
        return save(checkpoints, parts, optimizer, loader, done, **more)

    monkeypatch.setattr(Checkpoints, "save", noted)
    run(config, "run.epochs=5", "run.checkpoint_epochs=2")
    assert saved == [(2, 14), (4, 28), (5, 35)]


def test_lines_are_written_where_and_as_often_as_they_are_asked_for(config: Path) -> None:
    told: list[Any] = []
    elsewhere = config.parent / "elsewhere.jsonl"
    directory = run(
        config, "run.epochs=2", "run.log_steps=3", metrics_path=elsewhere, on_epoch=told.append
    )
    assert not (directory / "metrics.jsonl").exists()
    steps, epochs = lines(elsewhere, "step"), lines(elsewhere, "epoch")
    assert [line["step"] for line in steps] == [3, 6, 9, 12]
    assert [line["gradient_norm"] for line in steps] == 4 * [None]
    assert epochs == told
    for number, line in enumerate(epochs):
        assert (line["epoch"], line["step"]) == (number, 7 * (number + 1))
        # The last batch of an epoch has four samples, and padding.
        assert line["train_samples_per_s"] * line["epoch_s"] == pytest.approx(100)
        assert 0 < line["evaluation_s"] < 300
        assert 0 <= line["wait_s"] <= line["epoch_s"]


def test_a_step_of_several_batches_is_measured_told_and_counted_as_one(config: Path) -> None:
    directory = run(config, "run.epochs=1", "optimizer.accumulate=3", "optimizer.clip=0.5")
    (epoch,) = lines(directory / "metrics.jsonl", "epoch")
    steps = lines(directory / "metrics.jsonl", "step")
    # Batches 3, 3 and 1.
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["gradient_norm"] > 0 for line in steps)
    assert epoch["train_samples_per_s"] * epoch["epoch_s"] == pytest.approx(100)
    assert read_progress(directory / "checkpoints/step-00000003").steps == 3


def test_what_an_epoch_cost_is_not_what_those_before_it_did(config: Path) -> None:
    told = lines(run(config) / "metrics.jsonl", "epoch")
    assert told[0]["staging_s"] > 0
    assert [line["staging_s"] for line in told[1:]] == [0, 0]


def test_what_the_loop_does_is_timed_as_the_part_that_it_is(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part takes seconds of its own, of a clock that nothing else moves."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def taking(seconds: float, act: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            clock.now += seconds
            return act(*args, **kwargs)

        return timed

    for name, seconds in {"train_step": 1, "rescore": 100, "evaluate": 1000}.items():
        monkeypatch.setattr(loop, name, taking(seconds, getattr(loop, name)))
    monkeypatch.setattr(Checkpoints, "save", taking(10_000, Checkpoints.save))
    ends = taking(100_000, Conductor.end_and_begin)
    monkeypatch.setattr(Conductor, "end_and_begin", ends)
    directory = run(config, "run.epochs=2", "run.evaluate_steps=10")
    first, second = lines(directory / "metrics.jsonl", "epoch")
    expected = {
        "train_s": 7, "epoch_end_s": 0, "refresh_s": 100, "evaluation_s": 1000, "other_s": 0,
    }  # fmt: skip
    assert {name: first[name] for name in (*expected, "checkpoint_s")} == {
        **expected, "checkpoint_s": 0,
    }  # fmt: skip
    # The checkpoint of the first epoch, the turn, and an evaluation after the tenth step too
    assert {name: second[name] for name in (*expected, "checkpoint_s")} == {
        **expected, "epoch_end_s": 100_000, "evaluation_s": 2000, "checkpoint_s": 10_000,
    }  # fmt: skip
