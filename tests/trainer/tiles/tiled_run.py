"""A run on made-up weather: a recipe for the settings, with fields that are cut or whole."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dataio
from examples.tiles.unet2d import PictureUNet, group_norm
from tonari.trainer.run.tasks import Classify, Columns

NUM_SAMPLES, SHAPE = 48, (2, 13, 10)
SETTINGS = """
[data]
train = "{data}"
test = "{data}"
batch_size = {batch_size}
workers.threads = 0
cache.path = "{cache}"
[model]
kind = "tests.trainer.tiles.tiled_run:{model}"
[recipe]
kind = "tests.trainer.tiles.tiled_run:recipe"
args.model = "{model}"
args.parts = {tiles}
[shuffle]
exchange = 0.3
[optimizer]
kind = "sgd"
lr = 0.05
momentum = 0.9
schedule = "steps"
clip = 1.0
[mesh]
dtype = "float64"
tiles = {tiles}
[run]
log_steps = 1
epochs = 3
device = "cpu"
directory = "{directory}"
"""


def make_data(sizes: tuple[int, ...] = SHAPE[1:], num_samples: int = NUM_SAMPLES) -> dict[str, Any]:
    """Make fields, what they move to, and a class of each sample."""
    rng = np.random.default_rng(0)
    now = rng.standard_normal((num_samples, SHAPE[0], *sizes)).astype(np.float32)
    then = np.roll(now, 1, 3)[:, :1] + now[:, 1:].mean((2, 3), keepdims=True)
    label = (now[:, 0, :4].mean((1, 2)) > 0).astype(np.int64)
    return {"now": now, "then": then, "label": label}


class Regress:
    """The mean square error of each sample."""

    columns = Columns(("now",), ("then",))

    def input(self, batch: Any) -> Tensor:
        return batch["now"].double()  # type: ignore[no-any-return]

    def target(self, batch: Any) -> Tensor:
        return batch["then"].double()  # type: ignore[no-any-return]

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(logits, target, reduction="none").mean((1, 2, 3))

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(target)), torch.zeros(len(target))


class PooledClasses(nn.Module):
    """Classes, by convolutions and global pooling, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
            nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(8, 2),
        )  # fmt: skip

    def forward(self, now: Tensor) -> Tensor:
        return self.layers(now)  # type: ignore[no-any-return]


def unet() -> nn.Module:
    """Make the model of `Regress`."""
    return PictureUNet(2, 1, width=4, norm=group_norm, bilinear=True)


def classes() -> nn.Module:
    """Make the model of classes."""
    return PooledClasses()


class ClassifyFloats(Classify):
    """Classes of fields that are no pictures."""

    def input(self, batch: Any) -> Tensor:
        return batch["now"].double()  # type: ignore[no-any-return]


def recipe(model: str, parts: list[int], sizes: Sequence[int] = SHAPE[1:]) -> dict[str, Any]:
    """Give fields and task."""

    def array(key: str, channels: int) -> dataio.Array:
        tiles = dataio.Tiles((1, 2), tuple(parts)) if parts else None
        return dataio.Array(key, (channels, *sizes), "float32", tiles=tiles)

    if model == "classes":
        fields = {"now": array("now", 2), "label": dataio.Int("label")}
        return {"fields": fields, "task": ClassifyFloats(image="now")}
    return {"fields": {"now": array("now", 2), "then": array("then", 1)}, "task": Regress()}
