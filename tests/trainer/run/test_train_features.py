"""What a run offers, with the real models: each on two ranks equals the same run of one process.

The slow tests are the whole table; here is a case of each row and each column of it.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dataio.base.lines import read_checked_lines
from tests.multirank import RunRanks
from tests.trainer.digits import write_config
from tonari.trainer.checkpoint.directory import latest
from tonari.trainer.checkpoint.export import read_checkpoint
from tonari.trainer.config.config import load_config
from tonari.trainer.mesh.place import SPLIT
from tonari.trainer.run.build import make_model
from tonari.trainer.run.loop import train

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(600)]

BASE = (
    "mesh.dtype=float64", "optimizer.kind=adamw", "optimizer.lr=0.01", "optimizer.clip=0.5",
    "importance.kind=kakurenbo", "importance.fraction=0.4", "importance.tau=0", "run.epochs=2",
    "run.checkpoint_epochs=2",
)  # fmt: skip
IMAGES = ("model.num_classes=2", "model.image_size=8")
MODELS = {
    "gpt": (
        "data.kind=text", "data.test=", "data.test_fraction=0.2", "data.sequence_length=16",
        "model.kind=gpt", "model.width=8", "model.depth=4", "model.heads=2",
    ),
    "vit": (*IMAGES, "model.kind=vit", "model.patch=4", "model.width=8", "model.depth=4",
            "model.heads=2"),
    "resnet": (*IMAGES, "model.kind=resnet", "model.depth=14", "model.norm=group"),
    "cnn": ("model.num_classes=2", "data.image_size=64", "model.image_size=64"),
}  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
FULL, SELECTIVE = "mesh.checkpointing=full", "mesh.checkpointing=selective"
OFFLOAD, HALF = "mesh.offload=true", "mesh.dtype=bfloat16"
BY_TWO = "optimizer.accumulate=2"
DP = ("mesh.dp_shard=2", "data.batch_size=8")
TP = ("mesh.tp=2",)
SPLIT_TP = (*TP, "mesh.sequence_parallel=true", "mesh.loss_parallel=true")

Case = tuple[str, tuple[str, ...]]
"""A model, and what else to set."""


def pp(schedule: str, *more: str) -> tuple[str, ...]:
    """Set a pipeline of two ranks."""
    return ("mesh.pp=2", f"mesh.schedule={schedule}", "mesh.microbatches=4", *more)


def halves(*mesh: str) -> tuple[str, ...]:
    """Take steps of two batches, each half as large."""
    rows = 4 if mesh == DP else 8
    return (*mesh, BY_TWO, f"data.batch_size={rows}")


FEW: list[Case] = [
    ("gpt", pp("zbv", FULL)),
    ("cnn", pp("interleaved", SELECTIVE)),
    ("gpt", halves(*pp("zero_bubble"))),
]
SOME: list[Case] = [
    ("vit", pp("dualpipev", FULL)),
    ("resnet", pp("zero_bubble", FULL)),
    ("resnet", halves(*DP)),
    ("cnn", SPLIT_TP),
]
EVERY: list[Case] = [
    *((model, pp(schedule)) for model, schedule in product(MODELS, SCHEDULES)),
    *(
        (model, pp(schedule, keeps))
        for model, schedule, keeps in product(MODELS, SCHEDULES, (FULL, SELECTIVE))
        if keeps == FULL or schedule not in SPLIT
    ),
    *((model, halves(*mesh)) for model, mesh in product(MODELS, (DP, TP, pp("zbv")))),
    *((model, mesh) for model, mesh in product(MODELS, (DP, TP, SPLIT_TP))),
    *((model, (*DP[:1], DP[1], FULL)) for model in MODELS),
    *((model, (*SPLIT_TP, SELECTIVE)) for model in MODELS),
    ("gpt", ("mesh.cp=2", FULL)),
]
"""Of the table in docs/train.md."""

Told = list[dict[str, Any]]
Weights = dict[str, Tensor]


def read_weights(directory: Path) -> Weights:
    """Read the newest checkpoint of a run as `tonari export` does, in the order of names."""
    newest = latest(directory / "checkpoints")
    assert newest is not None
    state = read_checkpoint(newest)["model"]
    return {name: value for name, value in sorted(state.items()) if isinstance(value, Tensor)}


def told(directory: Path) -> Told:
    """Read what a run told, without what no two runs share."""
    lines = [*read_checked_lines(directory / "metrics.jsonl")]
    names = ("loss", "gradient_norm", "accuracy", "evaluation_loss", "hidden_fraction", "lr")
    return [{name: line[name] for name in names if name in line} for line in lines]


class FeatureRuns:
    """Makes runs in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._count = directory, 0
        config = write_config(directory, num_samples=48)
        text = config.read_text()
        config.write_text(text.replace("num_classes = 2\nimage_size = 8\n", ""))
        letters = "".join(chr(97 + (n * n * 7 + n // 3) % 26) for n in range(16 * 48 + 17))
        (directory / "text").write_text(letters)
        self.config = config

    def settings(self, model: str, *more: str, name: str = "") -> tuple[Path, list[str]]:
        """Set a run, in a directory of its own."""
        self._count += 1
        directory = self._directory / (name or str(self._count))
        train_on = (f"data.train={self._directory / 'text'}",) if model == "gpt" else ()
        where = (f"run.directory={directory}", f"data.cache={directory / str(self._count)}")
        return directory, [*BASE, *MODELS[model], *train_on, *more, *where]

    def alone(self, model: str, *more: str) -> tuple[Told, Weights]:
        """Train in this process; what it told, and the weights as the plain model has them."""
        directory, given = self.settings(model, *more)
        config = load_config(self.config, given)
        train(config)
        weights = read_weights(directory)
        plain = make_model(config).to(next(iter(weights.values())).dtype)
        plain.load_state_dict(weights)
        return told(directory), {name: weights[name] for name in sorted(plain.state_dict())}

    def together(self, run_ranks: RunRanks, cases: list[list[str]]) -> list[Any]:
        """Train on two ranks, one run after the other; what rank 0 reports of each."""
        joined = ["|".join([str(self.config), *case]) for case in cases]
        reports: Any = run_ranks("trainer/meshes", 2, *joined, timeout_s=550).reports
        return list(reports[0])


@pytest.fixture
def runs(tmp_path: Path) -> FeatureRuns:
    """Runs of a small dataset of images, and of a text."""
    return FeatureRuns(tmp_path)


def check_equal(runs: FeatureRuns, run_ranks: RunRanks, cases: list[Case]) -> None:
    """Run all cases, and their models alone."""
    set_up = [runs.settings(model, *more) for model, more in cases]
    runs.together(run_ranks, [given for _, given in set_up])
    alone: dict[tuple[str, bool], tuple[Told, Weights]] = {}
    for (model, more), (directory, _) in zip(cases, set_up, strict=True):
        # Steps of two half batches know the mean of two losses, as one batch does, but their order.
        key = (model, BY_TWO in more)
        if key not in alone:
            alone[key] = runs.alone(model, *(halves() if key[1] else ()))
        found, (expected, weights) = told(directory), alone[key]
        assert len(found) == len(expected) >= 5, (model, more)
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-9), (model, more)
        # Fewer than a whole batch are not hidden; and a GPT guesses no text in two epochs.
        if BY_TWO in more and model != "gpt":
            assert expected[-1]["hidden_fraction"] > 0, "or scores are not looked at"
        exported = read_weights(directory)
        assert list(exported) == list(weights), (model, more)
        for name, value in weights.items():
            # AdamW's first steps divide gradients by themselves: noise of 1e-16 of one that is
            # nearly nothing is seen.
            torch.testing.assert_close(exported[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(SOME, marks=pytest.mark.nightly)], ids=["few", "some"]
)
def test_schedules_recomputation_and_steps_of_two_batches_equal_one_process(
    runs: FeatureRuns, run_ranks: RunRanks, cases: list[Case]
) -> None:
    check_equal(runs, run_ranks, cases)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_everything_equals_one_process(runs: FeatureRuns, run_ranks: RunRanks, model: str) -> None:
    check_equal(runs, run_ranks, [case for case in EVERY if case[0] == model])


def check_resumes(runs: FeatureRuns, run_ranks: RunRanks, cases: list[Case]) -> list[Told]:
    """Run each case whole, and stopped in its fourth step and gone on with; what each told."""
    pairs, given = [], []
    for number, (model, more) in enumerate(cases):
        whole, one = runs.settings(model, *more)
        cut, other = runs.settings(model, *more, name=f"cut {number}")
        pairs.append((whole, cut))
        given += [one, [*other, "stop=4"], other]
    reports = runs.together(run_ranks, given)
    for report in reports[1::3]:
        assert (report["finished"], report["num_steps"]) == (False, 4), "or nothing goes on"
    for case, (whole, cut) in zip(cases, pairs, strict=True):
        found, expected = told(cut), told(whole)
        # Rates are sums over a start: their last digit is not.
        for mine, alone in zip(found, expected, strict=True):
            assert mine == pytest.approx(alone, rel=1e-12), case
    return [told(whole) for whole, _ in pairs]


OFFLOADED: list[Case] = [("gpt", (*DP, OFFLOAD)), ("vit", pp("zbv", OFFLOAD))]
HALVED: list[Case] = [("gpt", (*SPLIT_TP, HALF)), ("vit", pp("zero_bubble", HALF))]


@pytest.mark.parametrize(
    ("offloaded", "halved"),
    [
        (OFFLOADED[:1], HALVED[1:]),
        pytest.param(OFFLOADED[1:], HALVED[:1], marks=pytest.mark.nightly),
    ],
    ids=["offloaded gpt, half a vit", "offloaded vit, half a gpt"],
)
def test_offloaded_and_half_precision_runs_go_on_exactly(
    runs: FeatureRuns, run_ranks: RunRanks, offloaded: list[Case], halved: list[Case]
) -> None:
    found = check_resumes(runs, run_ranks, offloaded + halved)
    for (model, _), run in zip(offloaded, found, strict=False):
        for one, other in zip(run, runs.alone(model)[0], strict=True):
            assert one == pytest.approx(other, rel=1e-9), model
    for (model, _), run in zip(halved, found[len(offloaded) :], strict=True):
        single, _ = runs.alone(model, "mesh.dtype=float32")
        # Of the first epoch: later ones may hide other rows.
        for one, other in zip(run[:3], single, strict=False):
            assert one["loss"] == pytest.approx(other["loss"], rel=0.01), model
            assert one["loss"] != other["loss"], model
        assert run[-1]["loss"] < run[0]["loss"], model


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_offloaded_or_half_precision_run_goes_on_exactly(
    runs: FeatureRuns, run_ranks: RunRanks, model: str
) -> None:
    meshes = (DP, TP, pp("1f1b"), pp("dualpipev"))
    check_resumes(runs, run_ranks, [(model, (*m, how)) for m in meshes for how in (OFFLOAD, HALF)])
