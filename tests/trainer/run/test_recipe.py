"""Whole runs with accumulation, averaged weights and lengths in steps, on several meshes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dataio.job.launch import join
from tests.multirank import RunRanks
from tests.trainer.digits import write_config
from tests.trainer.run.alone import Told, one_stage
from tests.trainer.run.runs import lines, run, stop_after
from tests.trainer.run.test_step import make_model, sgd
from tests.trainer.watch.watched import train_watched
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import Progress
from tonari.trainer.checkpoint.restore import restore
from tonari.trainer.config.config import load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import ResNet, seeded
from tonari.trainer.run.ema import WeightAverage
from tonari.trainer.run.step import train_step

# 75 rows are 5 batches of 16, the last with padding: 2 steps, of 3 batches and of 2.
RECIPE = (
    "mesh.dtype=float64", "model.kind=vit", "model.patch=4", "model.width=8", "model.depth=4",
    "model.heads=2", "optimizer.kind=adamw", "optimizer.lr=0.01", "optimizer.min_lr=0.001",
    "optimizer.weight_decay=0.3", "optimizer.clip=1.0", "optimizer.accumulate=3",
    "optimizer.schedule=wsd", "optimizer.decay_fraction=0.5", "optimizer.warmup_steps=3",
    "optimizer.ema=0.8", "run.epochs=6", "run.max_steps=11", "run.evaluate_steps=3",
    "run.checkpoint_epochs=0", "augment.label_smoothing=0.1",
)  # fmt: skip
MESHES = {
    "1": (1, ()),
    "dp2": (2, ()),
    "fsdp2": (2, ("mesh.dp_shard=2",)),
    "pp2": (1, ("mesh.pp=2",)),
    "tp2": (1, ("mesh.tp=2", "mesh.loss_parallel=true")),
    "fsdp2 pp2": (2, ("mesh.dp_shard=2", "mesh.pp=2", "mesh.microbatches=4")),
    "hsdp": (4, ("mesh.dp_replicate=2", "mesh.dp_shard=2")),
    "fsdp2 tp2": (2, ("mesh.dp_shard=2", "mesh.tp=2")),
}
COMPARED = {
    "loss", "gradient_norm", "lr", "accuracy", "evaluation_loss",
    "ema_accuracy", "ema_evaluation_loss",
}  # fmt: skip


def settings(config: Path, mesh: str, name: str, *more: str) -> list[str]:
    """Give a run its mesh, a directory and a cache."""
    replicas, given = MESHES[mesh]
    directory = config.parent / name
    return [
        *RECIPE, *given, f"data.batch_size={16 // replicas}", f"run.directory={directory}",
        f"data.cache={directory}/cache {mesh}", *more,
    ]  # fmt: skip


def check(config: Path, name: str, expected: list[dict[str, Any]]) -> None:
    """Compare a run's lines with one process'."""
    found = lines(config.parent / name)
    assert [line["step"] for line in found] == [line["step"] for line in expected], name
    for line, whole in zip(found, expected, strict=True):
        assert (line.keys(), line["kind"]) == (whole.keys(), whole["kind"]), name
        # An epoch's loss is a mean over batches, which are others where it goes on on other ranks.
        for key in whole.keys() & COMPARED - {"loss" if line["kind"] == "epoch" else ""}:
            assert line.get(key) == pytest.approx(whole.get(key), rel=1e-9), (name, key, line)


@pytest.mark.multirank
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "chain",
    [
        {4: ("fsdp2 pp2", "stop=8")},
        pytest.param({2: ("tp2", "stop=7"), 4: ("fsdp2 pp2", "stop=8")}, marks=pytest.mark.nightly),
    ],
    ids=["four", "two and four"],
)
def test_every_mesh_trains_and_averages_as_one_process_and_goes_on_where_another_stopped(
    tmp_path: Path, run_ranks: RunRanks, chain: dict[int, tuple[str, str]]
) -> None:
    config = write_config(tmp_path, num_samples=75)
    train_watched(config, *settings(config, "1", "one"))
    expected = lines(tmp_path / "one")
    evaluated = [line["step"] for line in expected if line["kind"] == "evaluation"]
    assert evaluated == [3, 9, 11], "at the others an epoch ends"
    last = expected[-1]
    assert last["ema_evaluation_loss"] != last["evaluation_loss"]
    cases = {2: ("dp2", "fsdp2", "pp2", "tp2"), 4: ("fsdp2 pp2", "fsdp2 tp2", "hsdp")}
    for num_ranks, (mesh, stop) in chain.items():
        meshes = cases[num_ranks]
        given = ["|".join([str(config), *settings(config, each, each)]) for each in meshes]
        given.append("|".join([str(config), *settings(config, mesh, "chain", stop)]))
        run_ranks("trainer/meshes", num_ranks, *given, timeout_s=300)
    train_watched(config, *settings(config, "1", "chain"))
    for name in (*(mesh for num_ranks in chain for mesh in cases[num_ranks]), "chain"):
        check(config, name, expected)


@pytest.mark.multirank
def test_ranks_of_a_replica_mix_its_rows_alike(tmp_path: Path, run_ranks: RunRanks) -> None:
    config = write_config(tmp_path, num_samples=75)
    mixes = (
        "augment.mixup=0.4", "augment.cutmix=1.0", "augment.erase=0.5", "augment.size=8",
        "data.drop_last=true", "run.max_steps=7",
    )  # fmt: skip
    train_watched(config, *settings(config, "1", "one", *mixes))
    meshes = ("pp2", "tp2")
    given = ["|".join([str(config), *settings(config, each, each, *mixes)]) for each in meshes]
    run_ranks("trainer/meshes", 2, *given, timeout_s=300)
    for name in meshes:
        check(config, name, lines(tmp_path / "one"))


def test_a_run_that_stops_at_every_kind_of_point_is_the_run_that_did_not(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (
        "run.max_steps=10", "run.epochs=2", "run.evaluate_steps=3", "run.checkpoint_steps=2",
        "optimizer.ema=0.5",
    )  # fmt: skip
    run(config, "whole", *steps)
    whole = lines(config.parent / "whole")
    # Where it evaluates, in the middle of nothing, at the end of an epoch, and at the run's end.
    for stop in (3, 5, 7, 10):
        with monkeypatch.context() as patch:
            stop_after(patch, stop)
            assert run(config, f"run {stop}", *steps).finished == (stop == 10)
        assert run(config, f"run {stop}", *steps).finished
        assert lines(config.parent / f"run {stop}") == whole, stop
    assert whole[-1]["kind"] == "evaluation"
    # The same run goes on where it is made longer.
    run(config, "whole", *steps, "run.max_steps=12")
    assert [line["step"] for line in lines(config.parent / "whole")[len(whole) :]] == [11, 12, 12]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("run.max_steps=5", "run.max_tokens=5"), "expected one of them"),
        (("run.max_tokens=5",), 'data.kind is "images"; give run.max_steps'),
        (("run.max_steps=5", "optimizer.warmup_epochs=1"), "give optimizer.warmup_steps"),
        (("optimizer.warmup_epochs=0.5",), "give optimizer.schedule_by=step"),
        (("optimizer.warmup_steps=5",), "give optimizer.schedule_by=step"),
        (("run.evaluate_steps=5", "data.test="), "nothing to evaluate on; give data.test"),
        (
            ("run.max_steps=5", "importance.kind=kakurenbo", "importance.drops=lr"),
            "give the epochs of the drops",
        ),
    ],
)
def test_lengths_that_do_not_fit_each_other_are_refused(
    config: Path, given: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(config, given)


def test_the_average_is_that_of_all_steps_and_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    with join(device="cpu"):
        loader = Told(batch_size=12)
        model = seeded(lambda: ResNet(4, depth=8, norm="batch"), seed=0).double()
        optimizer, pipeline = sgd(model), one_stage(model, batch_size=12)
        average = WeightAverage([model], decay=0.3)
        means = {name: value.clone() for name, value in model.state_dict().items()}
        for step in range(1, 6):
            train_step(pipeline, optimizer, loader, [loader.batch(step)])
            average.update(step)
            kept = min(0.3, (1 + step) / (10 + step))
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    means[name] = kept * means[name] + (1 - kept) * value
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        with average.applied():
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    torch.testing.assert_close(value, means[name], rtol=1e-12, atol=1e-15)
        assert all(torch.equal(weights[name], its) for name, its in model.state_dict().items())
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            path = checkpoints.save(
                [model], optimizer, loader, Progress(0, 5), average=average.state
            )
        kept_state = {name: value.clone() for name, value in average.state.items()}
        fresh = WeightAverage([make_model().double()], decay=0.3)
        assert fresh.state.keys() != kept_state.keys()
        for value in average.state.values():
            value.zero_()
        restore(path, [model], optimizer, loader, average=average.state)
        assert all(torch.equal(kept_state[name], its) for name, its in average.state.items())


def test_text_ends_at_a_number_of_tokens(tmp_path: Path) -> None:
    text, config = tmp_path / "text", tmp_path / "run.toml"
    text.write_text(90 * "the cat. ")
    config.write_text(
        f"""
        data = {{kind = "text", train = "{text}", sequence_length = 8, batch_size = 4}}
        model = {{kind = "gpt", width = 8, depth = 2, heads = 2}}
        run = {{device = "cpu", max_tokens = 900, log_steps = 1}}
        optimizer = {{accumulate = 2, warmup_steps = 4, schedule = "linear", lr = 0.5}}
        """
    )
    # A step has 2 x 4 x 8 tokens.
    assert run(config, "run").progress.steps == 15
    rates = [line["lr"] for line in lines(tmp_path / "run") if line["kind"] == "step"]
    expected = [0.1, 0.2, 0.3, 0.4] + [0.5 * (11 - step) / 11 for step in range(11)]
    assert rates == pytest.approx(expected)


def test_the_run_is_refused_where_its_epochs_are_too_few(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"22 steps, .* are 21; give run.epochs=4"):
        run(config, "run", "run.max_steps=22")
