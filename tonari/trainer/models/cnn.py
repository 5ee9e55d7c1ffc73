"""A small CNN without batch statistics: its gradients do not depend on how a batch is divided."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from tonari.trainer.models.staged import Images, StagedModel
from tonari.trainer.models.styles import LocalPart


class SmallCNN(StagedModel):
    """Classify small square images.

    Args:
        num_classes: Logits per image.
        in_channels: Channels of an image.
        image_size: Its height and width, >= 4.
    """

    def __init__(self, num_classes: int, in_channels: int = 3, image_size: int = 32) -> None:
        image_shape = (in_channels, image_size, image_size)
        stem = Images(_block(in_channels, 16, stride=1), image_shape)
        shapes, blocks = [(16, image_size)], list[nn.Module]()
        while shapes[-1][1] > 4:
            width, side = shapes[-1]
            shapes.append((min(2 * width, 64), -(-side // 2)))
            blocks.append(_block(width, shapes[-1][0], stride=2))
        width, side = shapes[-1]
        head = FlatHead(width * side * side, num_classes)
        super().__init__(stem=stem, blocks=blocks, head=head)
        self.image_shape, self.num_classes, self.shapes = image_shape, num_classes, shapes

    def data_shape(self, batch_size: int) -> Tensor:
        return torch.empty((batch_size, *self.image_shape), dtype=torch.uint8, device="meta")

    def logits_shape(self, batch_size: int) -> tuple[int, ...]:
        return (batch_size, self.num_classes)

    def hidden_shape_before(self, block: int, batch_size: int) -> tuple[int, ...]:
        width, side = self.shapes[block]
        return (batch_size, width, side, side)

    def tp_plan(self, *, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        split = LocalPart(Shard(0), makes=Shard(1), gives=Replicate())
        plan: dict[str, ParallelStyle] = {f"blocks.{number}.0": split for number in self.blocks}
        return plan | split_head(self, "head.linear", loss_parallel=loss_parallel)

    def tp_divides(self) -> Mapping[str, int]:
        return {"channels": 16, "classes": self.num_classes}


class FlatHead(nn.Module):
    """Logits from all features of an image."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Map floating[batch, ...] to floating[batch, num_classes]."""
        return cast(Tensor, self.linear(features.flatten(1)))


def split_head(
    model: StagedModel, name: str, *, loss_parallel: bool, comes_split: bool = False
) -> dict[str, ParallelStyle]:
    """Split a linear layer by class, where the model has its head; the plan's entry."""
    if model.head is None:
        return {}
    comes = Shard(1) if comes_split else Replicate()
    gives = Shard(-1) if loss_parallel else Replicate()
    return {
        name: ColwiseParallel(
            input_layouts=comes, output_layouts=gives, use_local_output=not loss_parallel
        )
    }


def _block(in_channels: int, width: int, *, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(in_channels, width, 3, stride, padding=1), nn.ReLU())
