"""Train one cell of a study."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dataio.layout import Layout
from dataio.seeding import generator, key
from trainer.errors import ConfigError
from trainer.models import seeded
from trainer.schedule import learning_rate
from trainer.study_config import SettingsConfig
from trainer.study_data import LabelledImages
from trainer.study_model import StudyResNet
from trainer.study_order import epoch_batches, number_samples
from trainer.study_replicas import ManyModels, OneModel, Replicas

TEST_ROWS = 1000
"""Images passed at once when testing."""


@dataclass(frozen=True)
class Point:
    """What is known after an epoch: its mean loss, and test accuracy in [0, 1] where measured."""

    epoch: int
    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class CellResult:
    """A trained cell.

    Attributes:
        points: Its epochs.
        wall_s: Seconds that they took, tests included.
        cpu_s: Of the processor: on a machine that is shared, what tells of the work.
    """

    points: tuple[Point, ...]
    wall_s: float
    cpu_s: float

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last epoch."""
        last = self.points[-1].accuracy
        assert last is not None, "the last epoch is always tested"
        return last


def train_cell(
    settings: SettingsConfig,
    train: LabelledImages,
    test: LabelledImages,
    *,
    num_classes: int,
    seed: int,
    device: str = "cpu",
    on_point: Callable[[Point], None] = lambda point: None,
) -> CellResult:
    """Train one arm with one seed.

    Args:
        settings: The arm's.
        train: The seed's samples.
        test: Images whose accuracy is reported.
        num_classes: Classes of the dataset.
        seed: Of weights, partition, order and flips; arms of one seed share what they can.
        device: Where to train.
        on_point: Called after each epoch.

    Raises:
        ConfigError: If a replica has fewer rows than a batch.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    layout = Layout(settings.nodes, len(train.labels))
    if settings.batch_size > layout.share_rows(layout.num_replicas - 1):
        raise ConfigError(
            f"settings.batch_size is {settings.batch_size}, more than the "
            f"{len(train.labels)} training samples over {layout.num_replicas} replicas; lower it, "
            f"or raise data.train_samples"
        )
    rows_of = number_samples(train.labels, settings.partition, seed=seed)
    images, labels = (torch.from_numpy(part).to(device) for part in train)
    replicas = _replicas(settings, num_classes, seed=seed, device=device)
    points = []
    for epoch in range(settings.epochs):
        for group in replicas.optimizer.param_groups:
            group["lr"] = learning_rate(
                epoch, num_epochs=settings.epochs, lr=settings.lr,
                warmup_epochs=settings.warmup_epochs,
            )  # fmt: skip
        batches = epoch_batches(
            settings.policy, layout, seed=seed, epoch=epoch, batch_size=settings.batch_size
        )
        flips = _flips(len(labels), seed=seed, epoch=epoch, wanted=settings.flip).to(device)
        losses = []
        for ids, weight in zip(batches.sample_id, batches.weight, strict=True):
            rows = torch.from_numpy(rows_of[ids]).to(device)
            picked = _augmented(images[rows], flips[rows])
            losses.append(replicas.step(picked, labels[rows], torch.from_numpy(weight).to(device)))
        tested = (epoch + 1) % settings.evaluate_epochs == 0 or epoch + 1 == settings.epochs
        points.append(
            Point(
                epoch,
                float(torch.stack(losses).mean()),
                _accuracy(replicas.tested_model(), test, device) if tested else None,
            )
        )
        on_point(points[-1])
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return CellResult(tuple(points), wall_s, cpu_s)


def _replicas(settings: SettingsConfig, num_classes: int, *, seed: int, device: str) -> Replicas:
    def build() -> nn.Module:
        return StudyResNet(
            num_classes, width=settings.width, blocks=settings.blocks, norm=settings.norm,
            replicas=settings.replicas, running=settings.running,
        )  # fmt: skip

    model = seeded(build, seed=seed).to(device)
    lr, momentum, decay = settings.lr, settings.momentum, settings.weight_decay
    if settings.update == "gradients":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return OneModel(model, lr=lr, momentum=momentum, weight_decay=decay)
    return ManyModels(
        model, replicas=settings.replicas, exchange=settings.update,
        local_steps=settings.local_steps, seed=seed, lr=lr, momentum=momentum, weight_decay=decay,
    )  # fmt: skip


def _flips(num_samples: int, *, seed: int, epoch: int, wanted: bool) -> Tensor:
    """bool[num_samples]: Rows mirrored in this epoch, the same ones in every arm."""
    if not wanted:
        return torch.zeros(num_samples, dtype=torch.bool)
    drawn: NDArray[np.int64] = generator(key(seed, "study flips", epoch=epoch)).integers(
        2, size=num_samples
    )
    return torch.from_numpy(drawn == 1)


def _augmented(images: Tensor, flips: Tensor) -> Tensor:
    """uint8[..., channels, height, width] -> floating in [-1, 1], some mirrored."""
    scaled = images.float() / 127.5 - 1
    return torch.where(flips[..., None, None, None], scaled.flip(-1), scaled)


def _accuracy(model: nn.Module, test: LabelledImages, device: str) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for start in range(0, len(test.labels), TEST_ROWS):
            part = slice(start, start + TEST_ROWS)
            images = torch.from_numpy(test.images[part]).to(device)
            unflipped = torch.zeros(len(images), dtype=torch.bool, device=device)
            rows = _augmented(images, unflipped).contiguous(memory_format=torch.channels_last)
            labels = torch.from_numpy(test.labels[part]).to(device)
            right += int((model(rows).argmax(dim=1) == labels).sum())
    model.train()
    return right / len(test.labels)
