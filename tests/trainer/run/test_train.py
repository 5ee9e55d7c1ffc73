"""Whole runs in this process: they learn, stop and go on."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataio.base.lines import read_checked_lines
from dataio.loader import Loader
from tests.cases import diagonal
from tests.trainer.run.runs import KAKURENBO, lines, run, stop_after
from tonari import cli
from tonari.trainer.checkpoint.export import read_checkpoint
from tonari.trainer.run.schedule import learning_rate
from tonari.trainer.run.step import Step, train_step
from tonari.trainer.watch.meter import BY_CAUSE

VARIANTS = {
    "full": (),
    "kakurenbo": KAKURENBO,
    "random": ("importance.kind=random", "optimizer.schedule_by=step"),
    "weighted": ("importance.kind=weighted", "importance.balance=label", "run.epochs=2"),
    "batch norm": ("model.kind=resnet", "model.depth=8", "model.norm=batch", "run.epochs=2"),
}


EPOCH_KEYS = {
    "kind", "epoch", "step", "loss", "accuracy", "epoch_s", "wait_s", "staging_s", "evaluation_s",
    "evaluation_loss", "train_samples_per_s", "lr", "hidden_fraction", "exchanged_rows",
    "exchange_overlap_fraction", "source_bytes", "order_hash", "train_s", "exchange_s",
    "epoch_end_s", "refresh_s", "checkpoint_s", "other_s", "measured_s", *BY_CAUSE,
}  # fmt: skip


STEP_KEYS = {
    "kind", "epoch", "step", "loss", "lr", "samples_per_s", "wait_fraction", "hidden_fraction",
    "exchange_overlap_fraction", "mfu", "gradient_norm",
}  # fmt: skip


TEXT = """
[data]
kind = "text"
train = "{text}"
test_fraction = 0.2
sequence_length = 16
batch_size = 8
workers.threads = 0
[shuffle]
exchange = 0.1
[model]
kind = "gpt"
width = 16
depth = 1
heads = 2
[optimizer]
kind = "adamw"
lr = 0.02
clip = 1.0
accumulate = 2
schedule_by = "step"
[run]
epochs = 3
log_steps = 1
device = "cpu"
checkpoint_async = true
peak_tflops = 1.0
profile_steps = [2, 2]
"""


def test_a_run_learns_and_tells_what_it_did(config: Path) -> None:
    summary = run(config, "run")
    told = [*read_checked_lines(config.parent / "run/metrics.jsonl")]
    epochs = [line for line in told if line["kind"] == "epoch"]
    assert summary.finished
    assert (summary.progress.epochs, summary.progress.steps) == (3, 21)
    assert [line["step"] for line in told if line["kind"] == "step"] == list(range(1, 22))
    assert all(set(line) == EPOCH_KEYS for line in epochs)
    assert all(set(line) == STEP_KEYS for line in told if line["kind"] == "step")
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    assert epochs[-1]["accuracy"] == 1
    assert epochs[0]["source_bytes"] > 0
    assert [line["source_bytes"] for line in epochs[1:]] == [0, 0]
    assert len({line["order_hash"] for line in epochs}) == 3
    assert [p.name for p in sorted((config.parent / "run/checkpoints").iterdir())] == [
        "step-00000014",
        "step-00000021",
    ]


def test_the_epoch_s_loss_is_the_mean_of_its_steps(config: Path) -> None:
    run(config, "run", "run.epochs=1")
    *steps, epoch = lines(config.parent / "run")
    assert epoch["loss"] == pytest.approx(sum(step["loss"] for step in steps) / len(steps))


@diagonal(variant=VARIANTS, steps=[3, 7, 12])
def test_stopped_and_resumed_equals_uninterrupted(
    config: Path, monkeypatch: pytest.MonkeyPatch, variant: str, steps: int
) -> None:
    run(config, "whole", *VARIANTS[variant])
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        stopped = run(config, "cut", *VARIANTS[variant])
    assert not stopped.finished
    assert stopped.stopped_by == "SIGTERM"
    assert stopped.progress.steps == steps
    finished = run(config, "cut", *VARIANTS[variant])
    assert finished.finished
    whole, cut = lines(config.parent / "whole"), lines(config.parent / "cut")
    # Of the interrupted epoch too: two sums make one.
    assert cut == [line | {"loss": pytest.approx(line["loss"])} for line in whole]


@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_saves_and_ends_the_command_as_an_interrupted_one(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 3, number=signal.SIGINT)
        command = ["train", str(config), f"run.directory={config.parent / 'run'}"]
        assert cli.main(command) == 130
    assert "stopped by SIGINT after 0 epochs, 3 steps" in capsys.readouterr().out
    assert [p.name for p in (config.parent / "run/checkpoints").iterdir()] == ["step-00000003"]


def test_a_signal_that_came_before_the_first_step_lets_each_start_make_one(config: Path) -> None:
    for steps in (1, 2):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        signal.raise_signal(signal.SIGUSR1)
        stopped = run(config, "run")
        assert (stopped.stopped_by, stopped.progress.steps) == ("SIGUSR1", steps)
    written = sorted(path.name for path in (config.parent / "run/checkpoints").iterdir())
    assert written == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("variant", ["kakurenbo", "random"])
def test_a_run_that_dies_within_an_epoch_goes_on_from_the_last_steps_that_were_kept(
    config: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    run(config, "whole", *VARIANTS[variant])
    kept = (*VARIANTS[variant], "run.checkpoint_steps=3", "run.checkpoint_epochs=0")
    taken: list[int] = []

    def dies(*args: Any, **kwargs: Any) -> Step:
        taken.append(1)
        if len(taken) == 12:
            raise RuntimeError("killed")
        return train_step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("tonari.trainer.run.loop.train_step", dies)
        with pytest.raises(RuntimeError, match="killed"):
            run(config, "cut", *kept)
    assert [p.name for p in sorted((config.parent / "cut/checkpoints").iterdir())] == [
        "step-00000006", "step-00000009",
    ]  # fmt: skip
    assert run(config, "cut", *kept).finished
    whole, cut = lines(config.parent / "whole"), lines(config.parent / "cut")
    # Of the interrupted epoch too: two sums make one.
    assert cut == [line | {"loss": pytest.approx(line["loss"])} for line in whole]


def test_a_finished_run_has_nothing_left_to_do(config: Path) -> None:
    run(config, "run", "run.epochs=1")
    before = lines(config.parent / "run")
    again = run(config, "run", "run.epochs=1")
    assert (again.progress.epochs, again.finished, again.last) == (1, True, None)
    assert lines(config.parent / "run") == before


def test_an_importance_policy_hides_rows_raises_the_rate_and_gets_new_scores(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshed: list[int] = []
    refresh = Loader.refresh

    def counted(loader: Loader) -> Iterator[dict[str, torch.Tensor]]:
        refreshed.append(loader.epoch)
        return refresh(loader)

    monkeypatch.setattr(Loader, "refresh", counted)
    run(config, "run", *KAKURENBO)
    epochs = [line for line in lines(config.parent / "run") if line["kind"] == "epoch"]
    assert epochs[0]["hidden_fraction"] == 0
    assert epochs[1]["hidden_fraction"] > 0.1
    assert epochs[1]["lr"] > 1.2 * learning_rate(1, length=3, lr=0.05)
    assert refreshed == [0, 1, 2]


@pytest.mark.parametrize("kind", ["selective_backprop", "weighted", "full"])
def test_a_run_trains_under_every_other_policy(config: Path, kind: str) -> None:
    more = {
        "full": ('importance.columns=["loss"]',),
        "weighted": ("importance.balance=label", "importance.num_samples=30"),
    }
    run(config, "run", f"importance.kind={kind}", *more.get(kind, ()))
    epochs = [line for line in lines(config.parent / "run") if line["kind"] == "epoch"]
    assert (epochs[1]["hidden_fraction"] > 0.2) == (kind != "full")
    assert epochs[-1]["loss"] < epochs[0]["loss"]


def test_a_run_that_goes_back_to_an_older_checkpoint_keeps_those_of_its_own_course(
    config: Path,
) -> None:
    run(config, "run", "run.epochs=3", "run.keep_checkpoints=3")
    checkpoints = config.parent / "run/checkpoints"
    changed = ("run.epochs=3", "run.keep_checkpoints=1", "optimizer.weight_decay=0.1")
    run(config, "run", *changed, resume=str(checkpoints / "step-00000007"))
    assert {path.name for path in checkpoints.iterdir()} == {
        "step-00000021", "step-00000014.later", "step-00000021.later",
    }  # fmt: skip
    losses = [line["loss"] for line in lines(config.parent / "run") if line["kind"] == "epoch"]
    weights = read_checkpoint(checkpoints / "step-00000021")["model"]
    again = read_checkpoint(checkpoints / "step-00000021.later")["model"]
    assert len(losses) == 3
    equal = (torch.as_tensor(weights[name]).equal(torch.as_tensor(again[name])) for name in weights)
    assert not any(equal)


def test_a_gpt_learns_text_by_steps_of_two_batches_and_a_cut_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text(150 * "the cat sat on the mat. ")
    config = tmp_path / "run.toml"
    config.write_text(TEXT.format(text=tmp_path / "text"))
    run(config, "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 15)
        assert not run(config, "cut").finished
    assert run(config, "cut").finished
    whole, cut = lines(tmp_path / "whole"), lines(tmp_path / "cut")
    steps = [line for line in whole if line["kind"] == "step"]
    # 225 samples, 45 of them held out: 23 batches of 8 are 12 steps, the last of one batch.
    assert len(steps) == 36
    assert [line for line in cut if line["kind"] == "step"] == steps
    assert steps[-1]["loss"] < 0.3 * steps[0]["loss"]
    told = json.loads((tmp_path / "whole/metrics.jsonl").read_text().splitlines()[0])
    assert told["tokens_per_s"] == pytest.approx(16 * told["samples_per_s"])
    assert 0 < told["mfu"] < 1
    assert whole[-1]["evaluation_loss"] < 0.3 * steps[0]["loss"]
    assert (tmp_path / "whole/profile/trace-0.json").exists()
