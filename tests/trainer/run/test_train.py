"""Whole runs: in this process, and by the command under both launchers."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataio.loader import Loader
from tests.multirank import launch_command, run_job
from tests.trainer.digits import write_config
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.checkpoint.export import read_checkpoint
from trainer.config.config import load_config
from trainer.errors import ConfigError
from trainer.run.loop import Summary, train
from trainer.run.schedule import learning_rate
from trainer.run.step import Step, train_step

ROOT = Path(__file__).parents[3]
KAKURENBO = ("importance.kind=kakurenbo", "importance.fraction=0.5", "importance.tau=0")
VARIANTS = {
    "full": (),
    "kakurenbo": KAKURENBO,
    "random": ("importance.kind=random", "optimizer.schedule_by=step"),
    "batch norm": ("model.kind=resnet", "model.depth=8", "model.norm=batch", "run.epochs=2"),
}
EPOCH_KEYS = {
    "kind", "epoch", "step", "loss", "accuracy", "epoch_s", "wait_s", "staging_s", "evaluation_s",
    "evaluation_loss", "train_samples_per_s", "lr", "hidden_fraction", "exchanged_rows",
    "exchange_overlap_fraction", "source_bytes", "order_hash",
}  # fmt: skip
STEP_KEYS = {
    "kind", "epoch", "step", "loss", "lr", "samples_per_s", "wait_fraction", "hidden_fraction",
    "exchange_overlap_fraction", "mfu", "gradient_norm",
}  # fmt: skip
MEASURED = {
    "tokens_per_s", "mfu",
    "epoch_s", "wait_s", "staging_s", "evaluation_s", "train_samples_per_s", "source_bytes",
    "samples_per_s", "wait_fraction", "exchange_overlap_fraction",
}  # fmt: skip

TEXT = """
[data]
kind = "text"
train = "{text}"
test_fraction = 0.2
sequence_length = 16
batch_size = 8
workers.threads = 0
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


def lines(directory: Path) -> list[dict[str, Any]]:
    """Read a run's metrics, without what no two runs share."""
    text = (directory / "metrics.jsonl").read_text()
    told = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in told]


def run(config: Path, name: str, *overrides: str, resume: str = "auto") -> Summary:
    """Train in this process, into a directory of its own."""
    directory = config.parent / name
    return train(load_config(config, (f"run.directory={directory}", *overrides)), resume=resume)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Send this process a SIGTERM in a step; ranks ask for signals after every one."""
    monkeypatch.setattr("trainer.watch.stop.ASK_S", 0)
    taken: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Step:
        taken.append(1)
        if len(taken) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*args, **kwargs)

    monkeypatch.setattr("trainer.run.loop.train_step", counted)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A small run's configuration, and its data."""
    return write_config(tmp_path)


def test_a_run_learns_and_tells_what_it_did(config: Path) -> None:
    summary = run(config, "run")
    text = (config.parent / "run/metrics.jsonl").read_text()
    told = [json.loads(line) for line in text.splitlines()]
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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps", [3, 7, 12])
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
        patch.setattr("trainer.run.loop.train_step", dies)
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
    assert epochs[1]["lr"] > 1.2 * learning_rate(1, num_epochs=3, lr=0.05)
    assert refreshed == [0, 1, 2]


def test_the_learning_rate_does_not_grow_while_it_warms_up(config: Path) -> None:
    run(config, "run", *KAKURENBO, "optimizer.warmup_epochs=2", "run.epochs=4")
    epochs = [line for line in lines(config.parent / "run") if line["kind"] == "epoch"]
    rates = [learning_rate(epoch, num_epochs=4, lr=0.05, warmup_epochs=2) for epoch in range(4)]
    assert epochs[1]["hidden_fraction"] > 0.1
    assert [line["lr"] for line in epochs[:2]] == pytest.approx(rates[:2])
    # 1 / (1 - 0.5 * alpha): of alphas 1, 0.8, 0.6, 0.4 the second, then the third
    grown = [rates[2] / (1 - 0.5 * 0.8), rates[3] / (1 - 0.5 * 0.6)]
    assert [line["lr"] for line in epochs[2:]] == pytest.approx(grown)


@pytest.mark.parametrize("policy", ["random", "infobatch"])
def test_by_step_the_schedule_ends_where_it_should_however_many_rows_are_hidden(
    config: Path, policy: str
) -> None:
    chosen = (f"importance.kind={policy}", "importance.fraction=0.5", "importance.delta=1")
    run(config, "run", *chosen, "optimizer.schedule_by=step")
    told = [line for line in lines(config.parent / "run") if line["kind"] == "step"]
    assert len(told) < 21, "hidden rows make epochs shorter"
    by_epoch = [[line["lr"] for line in told if line["epoch"] == epoch] for epoch in range(3)]
    for epoch, rates in enumerate(by_epoch):
        expected = [
            learning_rate(epoch + step / len(rates), num_epochs=3, lr=0.05)
            for step in range(len(rates))
        ]
        assert rates == pytest.approx(expected)


def test_by_step_the_schedule_goes_on_where_an_epoch_goes_on_in_other_batches(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_step = ("optimizer.schedule_by=step", "run.epochs=2")
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        run(config, "run", *by_step)
    run(config, "run", *by_step, "data.batch_size=8")
    told = [line for line in lines(config.parent / "run") if line["kind"] == "step"]
    # 64 of 100 rows in batches of 16; then 36 in batches of 8: 104 with the last one's padding.
    done = [step * 16 / 112 for step in range(4)] + [(64 + step * 8) / 104 for step in range(5)]
    expected = [learning_rate(epoch, num_epochs=2, lr=0.05) for epoch in done]
    assert [line["lr"] for line in told if line["epoch"] == 0] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["selective_backprop", "full"])
def test_a_run_trains_under_every_other_policy(config: Path, kind: str) -> None:
    columns = ('importance.columns=["loss"]', "shuffle.rows=scores") if kind == "full" else ()
    run(config, "run", f"importance.kind={kind}", *columns)
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


@pytest.mark.parametrize("moment", ["staging", "the last write"])
def test_a_signal_outside_of_the_steps_does_not_end_the_process(
    config: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    place, name = (Loader, "__init__") if moment == "staging" else (Checkpoints, "close")
    original = getattr(place, name)

    def signalled(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        original(*args, **kwargs)

    def kill(*_: object) -> None:
        raise AssertionError("nobody noted the signal")

    before = signal.signal(signal.SIGTERM, kill)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, signalled)
            summary = run(config, "run", "run.checkpoint_async=true", "run.epochs=1")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert summary.finished == (moment != "staging")
    assert (summary.stopped_by, summary.progress.steps) == (
        ("SIGTERM", 0) if moment == "staging" else ("", 7)
    )
    assert run(config, "run", "run.epochs=1").finished


def test_what_a_run_cannot_write_is_said_before_staging(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage(*args: object, **kwargs: object) -> None:
        raise AssertionError("staged")

    monkeypatch.setattr(Loader, "__init__", stage)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ConfigError, match=r"run.tensorboard is true, but tensorboard cannot be"):
        run(config, "run", "run.tensorboard=true")


def test_never_resuming_refuses_another_run_s_directory(config: Path) -> None:
    run(config, "run", "run.epochs=1")
    with pytest.raises(
        ConfigError, match=r"holds step-00000007 of an earlier run, .* give another"
    ):
        run(config, "run", resume="never")


def test_a_mesh_that_does_not_fit_is_refused_before_staging(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh: .* is 2 ranks, but the job has 1"):
        run(config, "run", "mesh.dp_replicate=2")
    assert not (config.parent / "run").exists()


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


@pytest.mark.smoke
@pytest.mark.multirank
def test_both_launchers_train_in_the_same_order(config: Path) -> None:
    told = {}
    for launcher in ("mpiexec", "torchrun"):
        end = [str(config), f"run.directory={config.parent / launcher}", "run.epochs=2"]
        status, output = run_job(
            [*launch_command(launcher, 4), "-m", "tonari", "train", *end],
            env={"TONARI_RANKS_PER_NODE": "2", "TONARI_CACHE": str(config.parent / launcher / "c")},
            timeout_s=120,
        )
        assert status == 0, output
        assert "trained 2 epochs, 4 steps on 4 replicas, loss" in output
        told[launcher] = lines(config.parent / launcher)
    assert told["mpiexec"] == told["torchrun"]
    assert told["mpiexec"][-1]["exchanged_rows"] > 0


@pytest.mark.slow
@pytest.mark.multirank
def test_both_launchers_train_cifar10_in_the_same_order(tmp_path: Path) -> None:
    data = ROOT.parent / "shared" / "data" / "cifar10-train.parquet"
    if not data.exists():
        pytest.skip(f"{data} is not here")
    told = {}
    for launcher in ("mpiexec", "torchrun"):
        end = [f"data.train={data}", f"run.directory={tmp_path / launcher}", "run.epochs=2"]
        config = str(ROOT / "examples" / "cifar10.toml")
        status, output = run_job(
            [*launch_command(launcher, 4), "-m", "tonari", "train", config, *end],
            env={"TONARI_RANKS_PER_NODE": "2", "TONARI_CACHE": str(tmp_path / launcher / "c")},
            timeout_s=280,
        )
        assert status == 0, output
        told[launcher] = lines(tmp_path / launcher)
    assert told["mpiexec"] == told["torchrun"]
    assert told["mpiexec"][-1]["exchanged_rows"] == 4 * (12_500 // 10)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.batch_size=60", "[data]: batch_size: 60 is more than a replica's share of 50 rows"),
        ("mesh.tp=3", "mesh: pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 3 is 3 ranks"),
        ("data.train=absent.parquet", "absent.parquet"),
    ],
)
def test_a_wrong_setting_ends_all_ranks(config: Path, override: str, message: str) -> None:
    command = [*launch_command("mpiexec", 2), "-m", "tonari", "train", str(config), override]
    status, output = run_job(command, env={}, timeout_s=30)
    assert status == 1, output
    assert message in output
    assert "Traceback" not in output


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"run\.directory is .*file/run, which cannot be made"):
        run(config, "file/run")
