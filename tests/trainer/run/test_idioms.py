"""One process trains a caller's module to the bits of a plain loop, evaluations or not."""

import io
import tarfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dataio
from dataio.job.launch import join
from dataio.rows.samples import Batch
from tests.trainer.idioms import HIDDEN, IDIOMS, WIDTH, Two, forget
from tests.trainer.run.alone import Told
from tonari.trainer.checkpoint.export import read_checkpoint
from tonari.trainer.config.config import load_config
from tonari.trainer.errors import CheckpointError
from tonari.trainer.mesh.pipeline import MOST_BATCHES
from tonari.trainer.mesh.randomness import Randomness
from tonari.trainer.models import Adapted, seeded
from tonari.trainer.run.build import build_parallel
from tonari.trainer.run.ema import WeightAverage
from tonari.trainer.run.loop import train
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import evaluate, train_step
from tonari.trainer.run.tasks import Classify, Columns

ROWS, STEPS = 12, 4
FIELDS: dict[str, dataio.Field] = {
    "x": dataio.Array("bin", (WIDTH,), "float32"),
    "y": dataio.Int("cls"),
}
SETTINGS = """
[data]
train = "{rows}"
test = "{rows}"
batch_size = {num_rows}
workers.threads = 0
cache.path = "{directory}/cache"
[shuffle]
exchange = 0.1
[optimizer]
kind = "sgd"
lr = 0.05
momentum = 0.9
weight_decay = 0.0
schedule = "steps"
clip = 1e9
[run]
epochs = {steps}
log_steps = 1
checkpoint_epochs = {steps}
device = "cpu"
directory = "{directory}/run"
"""


class ClassifyNumbers(Classify):
    """Rows of numbers and their class; notes the batches that are trained, in their order."""

    def __init__(self) -> None:
        self.columns = Columns(("x",), ("y",))
        self.trained: list[tuple[Tensor, Tensor]] = []

    def input(self, batch: Batch) -> Tensor:
        """Take the numbers."""
        self.taken = batch["x"].clone()
        return batch["x"]

    def target(self, batch: Batch) -> Tensor:
        """Take the classes; note a batch that is trained."""
        if torch.is_grad_enabled():
            self.trained.append((self.taken, batch["y"].long()))
        return batch["y"].long()


def numbers(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Make rows of numbers, and a class for each."""
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
    return values, torch.arange(rows) % 3


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """A shard of numbers, and settings to train on it."""
    with tarfile.open(tmp_path / "rows.tar", "w") as out:
        for number, (values, label) in enumerate(zip(*numbers(), strict=True)):
            for ending, data in (("bin", values.numpy().tobytes()), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:05d}.{ending}")
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))
    path = tmp_path / "run.toml"
    path.write_text(
        SETTINGS.format(rows=tmp_path / "rows.tar", directory=tmp_path, num_rows=ROWS, steps=STEPS)
    )
    return path


def make_plainly(kind: str) -> nn.Module:
    """Make a module as the trainer does, the same weights each time."""
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return seeded(IDIOMS[kind], seed=0)


def plain_loop(kind: str, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Train by a plain loop, with the trainer's draws."""
    model = make_plainly(kind)
    if kind in ("keeps eval", "all in eval"):
        model.train()
    draws = Randomness(seed=0, replica=0, microbatches=1, apart=0, device=torch.device("cpu"))
    draws.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(batches):
        with draws.drawing(step * MOST_BATCHES + 1):
            draws.begin(0)
            F.cross_entropy(model(x.clone()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether two states have the same names and bits."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", IDIOMS)
def test_one_process_gives_the_bits_of_a_plain_loop_whatever_is_evaluated(
    settings: Path, kind: str
) -> None:
    x, y = numbers()
    expected = plain_loop(kind, [(x, y)] * STEPS)
    forget()
    batch = {"x": x, "y": y, "weight": torch.ones(ROWS), "sample_id": torch.arange(ROWS)}
    own = Own(model=IDIOMS[kind], task=ClassifyNumbers(), fields=FIELDS)
    with join(device="cpu") as job:
        pipeline = build_parallel(load_config(settings), job, own).pipeline
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
        average = WeightAverage(pipeline.parts, decay=0.9)
        evaluated = {**batch, "x": 2 * x, "valid": torch.ones(ROWS, dtype=torch.bool)}
        for step in range(STEPS):
            given = {**batch, "x": x.clone()}
            train_step(pipeline, optimizer, Told(batch_size=ROWS), [given], clip=1e9, step=step)
            average.update(step + 1)
            kept = torch.random.get_rng_state()
            before = {name: value.clone() for name, value in average.state.items()}
            losses = [evaluate(pipeline, [evaluated | {"x": 2 * x}]).loss for _ in range(2)]
            assert losses[0] == losses[1] > 0
            with average.applied():
                evaluate(pipeline, [evaluated | {"x": 2 * x}])
            assert same(average.state, before)
            assert torch.equal(torch.random.get_rng_state(), kept)
        (part,) = pipeline.parts
        assert isinstance(part, Adapted)
        assert same(part.wrapped.state_dict(), expected)


@pytest.mark.parametrize("kind", ["anneals", "caches in lru_cache", "drops"])
def test_so_does_a_run_that_evaluates_saves_and_goes_on(settings: Path, kind: str) -> None:
    forget()
    task = ClassifyNumbers()

    def start(*overrides: str) -> Path:
        config = load_config(settings, overrides)
        train(config, model=IDIOMS[kind], task=task, fields=FIELDS)
        return max(Path(config.run.directory, "checkpoints").glob("step-????????"))

    if kind != "anneals":  # nothing saves an attribute of Python's
        start("run.epochs=2")
    found = read_checkpoint(start())["model"]
    assert len(task.trained) == STEPS
    assert same(found, plain_loop(kind, task.trained))


class TiesInForward(Two):
    """Puts one layer's weight into another as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def between(self, hidden: Tensor) -> Tensor:
        """Tie, and use both."""
        self.other.weight = self.one.weight
        return F.relu(self.other(self.one(hidden)))


def test_weights_that_forward_ties_are_named_with_the_cure(settings: Path) -> None:
    own: dict[str, Any] = {"model": TiesInForward, "task": ClassifyNumbers(), "fields": FIELDS}
    with pytest.raises(CheckpointError, match=r"\(other\.weight has .* in its __init__"):
        train(load_config(settings), **own, quiet=True)
