"""More of what callers bring trains as plain torch does, or is refused by name."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dataio.source.shards import write_tar
from tests.trainer.run.test_contracts import (  # noqa: F401 (fixtures)
    CLASSES,
    ROWS,
    WIDTH,
    Numbers,
    cross,
    data,
    make,
    start,
)
from tonari.trainer import Adapted, ConfigError
from tonari.trainer.mesh import pipeline
from tonari.trainer.run.ema import WeightAverage
from tonari.trainer.run.tasks import Classify

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a model that is made": ({"model": make()}, r"model= is a Sequential that is made, .*lambda: "),
    "an optimizer that is made": (
        {"optimizer": torch.optim.SGD(make().parameters(), lr=0.1)},
        r"optimizer= is a SGD that is made, .*lambda parameters: SGD\(parameters",
    ),
    "a class of tasks": ({"task": Numbers}, "task= is the class Numbers, expected an object"),
    "other weights": (
        {"optimizer": lambda parameters: torch.optim.SGD(make().parameters(), lr=0.1)},
        "made a SGD of weights that are not the model's",
    ),
    "no weights": ({"model": nn.Flatten}, "Flatten has no weights that are trained"),
    "frozen weights": (
        {"model": lambda: make().requires_grad_(False)},
        "Sequential has no weights that are trained",
    ),
    "sparse steps": (
        {"optimizer": lambda parameters: torch.optim.SparseAdam([*parameters])},
        "steps on sparse gradients alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_the_wrong_door_is_named_before_data_is_staged(
    tmp_path: Path,
    data: object,  # noqa: F811
    unstaged: None,
    kind: str,
) -> None:
    given, said = WRONG[kind]
    with pytest.raises(ConfigError, match=said):
        start(tmp_path, **given)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_ends_the_run(
    tmp_path: Path,
    data: object,  # noqa: F811
    without: Callable[[], Any],
) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, x: Tensor) -> Tensor:
            with without():
                return torch.mul(self.inner(x), 1.0)

    with pytest.raises(ConfigError, match="Frozen: no loss of the first 8 had a gradient"):
        start(tmp_path, "run.epochs=12", model=Frozen)


def test_draws_may_leave_out_all_weights_for_some_steps(
    tmp_path: Path,
    data: object,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.passes = make(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return self.inner(x) if self.passes > 4 else x[:, :CLASSES] * 1.0

    monkeypatch.setattr(pipeline, "MOST_WITHOUT_GRADIENT", 6)
    assert len(start(tmp_path, "run.epochs=12", model=Drawn)) == 12


def pairs(out: Tensor, target: Tensor) -> Tensor:
    """Rank rows of another class below: no loss among rows that are all of one class."""
    apart = target[:, None] != target[None, :]
    return (F.softplus(out[:, None, 0] - out[None, :, 0]) * apart).sum(1)


@pytest.mark.parametrize("cut", ["mesh.microbatches=2", "optimizer.accumulate=2"])
def test_a_loss_of_pairs_is_refused_where_the_batch_is_cut(
    tmp_path: Path,
    data: object,  # noqa: F811
    unstaged: None,
    cut: str,
) -> None:
    with pytest.raises(ConfigError, match="depends on the other rows"):
        start(tmp_path, cut, task=Numbers(pairs))


@pytest.mark.parametrize("label", [-100, -1, CLASSES, 255])
def test_a_label_that_is_no_class_is_named(label: int) -> None:
    target = torch.tensor([0, label, 1])
    with pytest.raises(ConfigError, match=rf"label holds {label}, expected a class from 0 to 2"):
        Classify().losses(torch.zeros(3, CLASSES), target)


def test_a_label_of_minus_100_is_not_left_out_of_any_loss() -> None:
    from tonari.trainer.run.tasks import cross_entropy

    with pytest.raises(IndexError):
        cross_entropy(torch.zeros(2, CLASSES), torch.tensor([0, -100]))


def test_whole_numbers_have_no_mean_and_are_copied() -> None:
    module = nn.Linear(2, 2)
    module.register_parameter("codes", nn.Parameter(torch.tensor([1, 2], dtype=torch.int8), False))
    average = WeightAverage([module], decay=0.5)
    before = module.weight.detach().clone()
    with torch.no_grad():
        module.get_parameter("codes").add_(1)
        module.weight.zero_()
    average.update(1)
    assert average.state["0.codes"].tolist() == [2, 3]
    torch.testing.assert_close(average.state["0.weight"], before * (2 / 11))


class Stopped(nn.Module):
    """Layers of which the one numbered ``at`` stops the gradient of what it takes."""

    class Layer(nn.Module):
        def __init__(self, stops: bool) -> None:
            super().__init__()
            self.inner, self.stops = nn.Linear(8, 8), stops

        def forward(self, hidden: Tensor) -> Tensor:
            return torch.tanh(self.inner(hidden.detach() if self.stops else hidden))

    def __init__(self, at: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.layers = nn.ModuleList(self.Layer(n == at) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.head(hidden)
        return out


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_a_gradient_that_stops_is_refused_where_it_would_have_to_pass(at: int) -> None:
    model = Adapted(Stopped(at), layers="layers")
    model.describe_inputs(lambda rows: torch.empty(rows, WIDTH, device="meta"))
    for cut in (1, 2, 3):
        # Weights behind the cut that the gradient reaches, and none before it: the layer at the
        # cut, or a later one, stops it.
        if 0 < cut <= at < 4:
            with pytest.raises(ConfigError, match=rf"stops the gradient in layer {cut}"):
                model.traced().crossing(cut)
        else:
            model.traced().crossing(cut)


class Answer:
    """What torch does not look into, unlike a tuple or a dict."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Answers(Stopped):
    def forward(self, x: Tensor) -> Answer:  # type: ignore[override]
        return Answer(super().forward(x))


def test_logits_within_an_object_of_ones_own_are_gone_back_from() -> None:
    model = Adapted(Answers(at=4), layers="layers", output=lambda answer: answer.logits)
    model.describe_inputs(lambda rows: torch.empty(rows, WIDTH, device="meta"))
    for cut in (1, 2, 3):
        model.traced().crossing(cut)


def test_rows_that_fill_up_a_batch_of_batch_statistics_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    for rows in (ROWS, ROWS + 5):
        root = tmp_path / str(rows)
        root.mkdir()
        numbers = rng.standard_normal((rows, WIDTH)).astype("<f4")
        members = [
            member
            for n, each in enumerate(numbers)
            for member in ((f"{n:03d}.bin", each.tobytes()), (f"{n:03d}.cls", b"1"))
        ]
        write_tar(root / "t.tar", members)
    normed = lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))  # noqa: E731
    said = []
    for rows, overrides, model in (
        (ROWS, (), normed), (ROWS + 5, (), make), (ROWS + 5, ("data.drop_last=true",), normed),
        (ROWS + 5, (), normed), (ROWS, ("importance.kind=random",), normed),
    ):  # fmt: skip
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            start(tmp_path / str(rows), "run.epochs=1", *overrides, model=model)
        said.append("count in its statistics; give data.drop_last=true" in caplog.text)
        shutil.rmtree(tmp_path / str(rows) / "run")
    assert said == [False, False, False, True, True]
