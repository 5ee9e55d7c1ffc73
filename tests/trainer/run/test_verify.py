"""A mesh that is wrong is found, and named; one that is right passes."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataio.rows.samples import Batch
from tests.multirank import RunRanks
from tests.trainer.digits import write_config
from tests.trainer.foreign_models import Doubled, PlainImages
from tests.trainer.run.runs import lines
from tonari.cli import main
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.config.optimizer import OptimizerConfig
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import Adapted
from tonari.trainer.run.ema import WeightAverage
from tonari.trainer.run.loop import train
from tonari.trainer.run.tasks import Classify
from tonari.trainer.run.verify.checking import Verdict, verify
from tonari.trainer.run.verify.first_step import MARKER
from tonari.trainer.run.verify.recording import Cut, Held

OWN = "model.kind=tests.trainer.foreign_models:"
PLAIN = (f"{OWN}PlainImages", "model.args.num_classes=2", "model.layers=middle")
WRONG = (f"{OWN}DoublesOnAStage", *PLAIN[1:])
DOUBLE = ("mesh.dtype=float64", "data.image_size=8", "data.channels=3")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run on small pictures."""
    path = write_config(tmp_path, num_samples=40)
    text = path.read_text().replace("channels = 1\n", "channels = 3\nimage_size = 8\n")
    path.write_text(text.replace("num_classes = 2\nimage_size = 8\n", ""))
    return path


def settings(config: Path, *overrides: str) -> Config:
    """Read the settings of a run in double precision that names no model."""
    return load_config(config, ("model.kind=own", *DOUBLE, *overrides))


class VerifiedNet(nn.Module):
    """Some of everything, and one thing that may be otherwise in one process.

    Args:
        wrong: What is otherwise; empty: nothing.
    """

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)])
        self.head = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        """Map images to logits."""
        if self.training:
            self.calls += 1
            self.get_buffer("steps").add_(2 if self.wrong == "buffer" else 1)
        hidden = self.stem(images)
        for number, layer in enumerate(self.body):
            assert isinstance(layer, nn.Conv2d)
            bias = layer.bias
            if self.wrong == "gradient" and number == 1:
                bias = Doubled.apply(bias)
            hidden = F.conv2d(hidden, layer.weight, bias, padding=1) + hidden
        logits: Tensor = self.head(hidden.mean((2, 3)))
        if self.wrong == "evaluation" and not self.training:
            logits = logits * 1.01
        if self.wrong == "late" and self.training and float(self.get_buffer("steps")) > 5:
            logits = logits * 1.01
        if self.wrong == "loss":
            logits = logits * 1.01
        if self.wrong == "resume" and self.calls % 2:
            logits = logits * 1.01
        return logits


def on_one_rank(config: Config, wrong: str, **options: Any) -> Verdict:
    """Verify a net that is wrong in both starts of the run, and right in plain torch."""
    # The first is looked at for its size.
    made = itertools.count()
    return verify(
        config, model=lambda: VerifiedNet(wrong if next(made) < 3 else ""), **options
    )  # fmt: skip


def test_one_rank_trains_as_plain_torch(config: Path) -> None:
    found = on_one_rank(settings(config, "optimizer.kind=adamw", "optimizer.clip=1.0"), "")
    assert found.equal, found.differences[:3]
    named = {"losses", "gradient norms", "weights", "buffers", "optimizer", "evaluation", "resume"}
    assert all(found.figures[figure].startswith("equal") for figure in named)
    assert found.compared > 60
    assert not (config.parent / "runs").exists()


def test_averaged_weights_are_those_of_plain_torch_after_a_resume_too(config: Path) -> None:
    own = settings(config, "optimizer.ema=0.2", "optimizer.lr=0.5")
    found = on_one_rank(own, "")
    assert found.equal, found.differences[:3]
    assert found.figures["average"].startswith("equal")
    assert found.compared > on_one_rank(replace(own, optimizer=SGD), "").compared


SGD = OptimizerConfig(kind="sgd", lr=0.5)


def test_an_average_that_is_otherwise_is_named_alone(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = WeightAverage.update
    monkeypatch.setattr(WeightAverage, "update", lambda its, steps: update(its, steps + 1))
    found = on_one_rank(settings(config, "optimizer.ema=0.9"), "")
    assert {each.figure for each in found.differences} == {"average", "evaluation"}
    first = found.differences[0]
    assert (first.when, first.name) == ("step 1", "average of stem.0.weight")
    judged = [each.name for each in found.differences if each.figure == "evaluation"]
    assert "the averaged weights' loss" in judged
    assert not any(name.startswith("its") for name in judged)


def test_more_steps_find_what_shows_late(config: Path) -> None:
    own = settings(config)
    assert on_one_rank(own, "late").equal
    found = on_one_rank(own, "late", steps=7)
    assert (found.differences[0].when, found.differences[0].figure) == ("step 6", "losses")
    assert on_one_rank(own, "", steps=9).equal
    with pytest.raises(ValueError, match="steps is 3, expected at least 4"):
        verify(own, model=VerifiedNet, steps=3)


class Inverting(Classify):
    """Inverts a batch's images where they lie."""

    def input(self, batch: Batch) -> Tensor:
        """Take the images."""
        return super().input(batch).bitwise_not_()


def test_a_batch_that_is_changed_in_place_is_compared_as_it_came(config: Path) -> None:
    found = verify(settings(config), model=VerifiedNet, task=Inverting())
    assert found.equal, found.differences[:3]


@pytest.mark.parametrize(
    ("wrong", "figure", "name"),
    [
        ("loss", "losses", "the loss of each row"),
        ("gradient", "gradient norms", "the norm of all gradients"),
        ("buffer", "buffers", "steps"),
        ("evaluation", "evaluation", "its loss"),
    ],
)
def test_what_differs_first_is_named(config: Path, wrong: str, figure: str, name: str) -> None:
    found = on_one_rank(settings(config), wrong)
    first = found.differences[0]
    assert (first.figure, first.name) == (figure, name)
    assert first.apart > found.tolerance
    if wrong in ("buffer", "evaluation"):
        assert {each.figure for each in found.differences} <= {figure, "resume"}


def test_a_tensor_is_named_by_its_module_and_rank(config: Path) -> None:
    found = on_one_rank(settings(config), "gradient")
    weights = [each for each in found.differences if each.figure == "weights"]
    assert [weights[0].name, weights[0].when] == ["body.1.bias", "step 1"]
    assert weights[0].where == "Conv2d, stage 0, rank 0: alone"


def test_what_a_checkpoint_forgets_is_found_after_the_resume(config: Path) -> None:
    # Plain torch counts its calls to the end; the second start begins to count anew.
    found = verify(settings(config), model=lambda: VerifiedNet("resume"))
    assert found.differences[0].when == "step 4"
    assert found.differences[0].figure == "losses"


def linear() -> nn.Module:
    """Make a model that draws nothing and has no batch statistics."""
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))


def test_a_loss_over_the_whole_batch_is_found(config: Path) -> None:
    def centred(logits: Tensor, target: Tensor) -> Tensor:
        if len(logits) % 2:  # else it would be refused before, by some rows that are made up
            raise ValueError("an odd number of rows")
        return F.cross_entropy(logits - logits.mean(0), target, reduction="none")

    cut = settings(config, "mesh.microbatches=2")
    assert verify(cut, model=linear).equal
    found = verify(cut, model=linear, loss=centred)
    # An evaluation goes by microbatches too.
    assert "whole batch" in {each.figure for each in found.differences} <= {
        "whole batch", "evaluation",
    }  # fmt: skip


class Reseeds(nn.Dropout):
    """Draws the same numbers each time."""

    def forward(self, values: Tensor) -> Tensor:
        """Drop some."""
        torch.manual_seed(7)
        return super().forward(values)


def test_draws_are_compared_and_no_block_is_to_draw_the_same_twice(config: Path) -> None:
    def reseeding() -> nn.Module:
        made = PlainImages(2)
        made.middle[1] = nn.Sequential(made.middle[1], Reseeds())
        return Adapted(made, layers="middle")

    cut = settings(config, "mesh.microbatches=2")
    found = verify(cut, model=lambda: Adapted(PlainImages(2), layers="middle"))
    assert found.equal
    found = verify(cut, model=reseeding)
    assert {each.figure for each in found.differences} == {"draws"}
    assert "uses of block 1 that draw" in found.differences[0].name


def test_a_part_is_cut_as_tp_and_fsdp_cut_it() -> None:
    whole = torch.arange(16.0).view(8, 2)
    # FSDP cuts what tp left: rows 4 to 7 are of tp 1, and of these 6 and 7 of dp_shard 1.
    cuts = (Cut("dp_shard", 0, True, 1, 2), Cut("tp", 0, False, 1, 2))
    held = Held("weight", "w", "Linear", 0, whole[6:], cuts)
    assert torch.equal(held.part_of(whole), held.value)
    assert "tp 1 of 2 (cut by dimension 0)" in held.shown


@pytest.mark.multirank
def test_the_command_passes_a_right_mesh_and_names_what_a_wrong_one_trains(
    config: Path, capsys: pytest.CaptureFixture[str], forks: None
) -> None:
    given = ["verify", str(config), *DOUBLE[1:]]
    assert main([*given, *PLAIN, "pp2", "optimizer.ema=0.5", "--steps", "6", "--json"]) == 0
    (mesh,) = json.loads(capsys.readouterr().out)["meshes"]
    assert mesh["line"].startswith("pp=2 1f1b: equal: ")
    assert mesh["figures"]["average"].startswith("equal")
    assert main([*given, *WRONG, "pp2", "--json"]) == 1
    (mesh,) = json.loads(capsys.readouterr().out)["meshes"]
    assert mesh["figures"]["gradient norms"].endswith("differ")
    first = next(each for each in mesh["differences"] if each["figure"] == "weights")
    assert (first["name"], first["when"]) == ("stem.weight", "step 1")
    assert first["where"].startswith("Conv2d, stage 0, rank 0: pp 0 of 2")
    assert not (config.parent / "runs").exists()


def test_a_mesh_of_no_such_name_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(config), *PLAIN, "dp2", "--steps", "3"]) == 2
    assert "--steps is 3, expected at least 4" in capsys.readouterr().err
    assert main(["verify", str(config), *PLAIN, "xp2"]) == 1
    assert "mesh 'xp2': found 'xp2', expected an axis" in capsys.readouterr().err


def test_the_first_step_of_a_layer_that_does_otherwise_when_computed_again_is_refused(
    config: Path,
) -> None:
    def started(name: str, model: str, checkpointing: str) -> None:
        directory = config.parent / name
        given = [
            f"{OWN}{model}", *PLAIN[1:], *DOUBLE, f"run.directory={directory}", "run.epochs=1",
            f"data.cache={directory}/cache", f"mesh.checkpointing={checkpointing}",
        ]  # fmt: skip
        train(load_config(config, given))

    started("right", "PlainImages", "full")
    assert (config.parent / "right" / MARKER).exists()
    started("kept", "CountsInALayer", "none")
    assert not (config.parent / "kept" / MARKER).exists()
    with pytest.raises(ConfigError, match=r"mesh \(mesh.checkpointing=full\) .* do the same twice"):
        started("again", "CountsInALayer", "full")


@pytest.mark.multirank
def test_the_first_step_on_a_mesh_is_compared_once_and_refused_where_it_differs(
    config: Path, run_ranks: RunRanks
) -> None:
    def case(name: str, *its: str) -> str:
        directory = config.parent / name
        return "|".join([
            f"run.directory={directory}", f"data.cache={directory}/cache", "mesh.pp=2",
            "run.epochs=1", *DOUBLE, *its,
        ])  # fmt: skip

    right = case("right", *PLAIN)
    cases = (right, right, case("unasked", *WRONG, "run.verify=false"), case("wrong", *WRONG))
    ended = run_ranks("trainer/own_train", 2, str(config), *cases, check=False)
    assert len(json.loads((config.parent / "right" / MARKER).read_text())) == 1
    assert lines(config.parent / "unasked")
    assert ended.returncode != 0
    assert "the first step on this mesh (mesh.pp=2) is not what one process" in ended.output
    assert "`tonari verify CONFIG mesh.pp=2` names the first tensor" in ended.output
    assert not (config.parent / "wrong" / MARKER).exists()
    assert not (config.parent / "wrong" / "checkpoints").exists()
