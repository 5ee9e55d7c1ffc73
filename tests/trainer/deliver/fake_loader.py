"""Batches as a loader gives them, from a closed form: the same rows for any number of replicas."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonari.trainer.models import ResNet, SmallCNN, StagedModel, seeded

NUM_CLASSES = 4


class FakeLoader:
    """Deals consecutive rows of each global batch to the replicas."""

    needs_outcome = True

    def __init__(
        self, *, replica: int, num_replicas: int, global_batch_size: int, steps: int
    ) -> None:
        self.batch_size = global_batch_size // num_replicas
        self.steps, self.step = steps, 0
        self.offset, self.stride = replica * self.batch_size, global_batch_size
        self.reported: list[tuple[int, ...]] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.step < self.steps:
            self.step += 1
            yield self.batch(self.step - 1)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Make the batch of a step."""
        ids = torch.arange(self.batch_size) + self.offset + step * self.stride
        pixels = torch.arange(3 * 8 * 8).reshape(3, 8, 8)
        images = (ids[:, None, None, None] * 37 + pixels * (ids[:, None, None, None] % 7 + 1)) % 256
        return {
            "image": images.to(torch.uint8),
            "label": ids % NUM_CLASSES,
            "weight": 0.5 + (ids % 3).float() / 2,
            "sample_id": ids,
            "slot": ids,
        }

    def report(
        self,
        batch: dict[str, Tensor],
        loss: Tensor,
        correct: Tensor | None,
        confidence: Tensor | None,
    ) -> None:
        assert not loss.requires_grad
        given = (loss, correct, confidence)
        self.reported.append(tuple(len(value) for value in given if value is not None))

    def refresh(self) -> Iterator[dict[str, Tensor]]:
        yield self.batch(0)

    def save(self, path: Path) -> None:
        path.write_text(str(self.step))

    def restore(self, path: Path) -> None:
        self.step = int(path.read_text())


def whole_weights(model: nn.Module) -> list[Tensor]:
    """Copy a parallelized model's parameters, gathered from all shards. Collective."""
    weights = list(model.parameters())
    return [
        (weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()).clone()
        for weight in weights
    ]


def make_models() -> dict[str, StagedModel]:
    """Make a float64 model of each kind that does not mix the rows of a batch."""
    makers: dict[str, Callable[[], StagedModel]] = {
        "cnn": lambda: SmallCNN(NUM_CLASSES, 3, 8),
        "resnet": lambda: ResNet(NUM_CLASSES, depth=8, norm="group"),
    }
    return {name: seeded(make, seed=3).double() for name, make in makers.items()}
