"""The ResNet for 32x32 images, with batch or group normalisation.

Source: He et al., Deep residual learning for image recognition, CVPR 2016, section 4.2.
"""

from collections.abc import Mapping
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.cnn import split_head
from tonari.trainer.models.staged import Images, StagedModel
from tonari.trainer.models.styles import joining_convolution, split_convolution, split_norm

Norm = Literal["batch", "group"]


class ResNet(StagedModel):
    """Classify images of about 32x32.

    Args:
        num_classes: Logits per image.
        in_channels: Channels of an image.
        depth: Layers, 6 n + 2.
        norm: ``"group"`` does not depend on how a batch is divided over replicas.
        image_size: Height and width of an image; only a pipeline of several stages needs it.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        depth: int = 20,
        norm: Norm = "group",
        image_size: int = 32,
    ) -> None:
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"ResNet: depth is {depth}, expected 6 n + 2 >= 8; choose 20")
        stem = nn.Sequential(_conv(in_channels, 16), _norm(norm, 16), nn.ReLU())
        widths = [width for width in (16, 32, 64) for _ in range((depth - 2) // 6)]
        blocks: list[nn.Module] = [
            _ResidualBlock(a, b, norm) for a, b in zip([16, *widths], widths, strict=False)
        ]
        super().__init__(stem=Images(stem), blocks=blocks, head=PooledHead(64, num_classes))
        self.widths, self.norm, self.num_classes = [16, *widths], norm, num_classes
        self.image_shape = (in_channels, image_size, image_size)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def data_shape(self, batch_size: int) -> Tensor:
        return torch.empty((batch_size, *self.image_shape), dtype=torch.uint8, device="meta")

    def logits_shape(self, batch_size: int) -> tuple[int, ...]:
        return (batch_size, self.num_classes)

    def hidden_shape_before(self, block: int, batch_size: int) -> tuple[int, ...]:
        width, side = self.widths[block], self.image_shape[1]
        for _ in range(width // 32):  # 16, 32, 64 channels: halved never, once, twice
            side = -(-side // 2)
        return (batch_size, width, side, side)

    def tp_plan(self, *, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        plan: dict[str, ParallelStyle] = {}
        for number in self.blocks:
            plan[f"blocks.{number}.path.0"] = split_convolution()
            plan[f"blocks.{number}.path.1"] = split_norm()
            plan[f"blocks.{number}.path.3"] = joining_convolution()
        return plan | split_head(self, "head.linear", loss_parallel=loss_parallel)

    def tp_divides(self) -> Mapping[str, int]:
        return {"channel groups": 8, "classes": self.num_classes}

    def check_mesh(self, *, num_stages: int = 1, tp: int = 1) -> None:
        super().check_mesh(num_stages=num_stages, tp=tp)
        if tp > 1 and self.norm == "batch":
            raise ConfigError(
                f'mesh.tp is {tp}, expected 1 where model.norm is "batch": its statistics are '
                'not split; give model.norm="group", or leave mesh.tp out'
            )


class PooledHead(nn.Module):
    """Logits from the mean of all places of an image."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Map floating[batch, features, height, width] to floating[batch, num_classes]."""
        # floating[batch, features]
        return cast(Tensor, self.linear(features.mean(dim=(2, 3))))


class _ResidualBlock(nn.Module):
    def __init__(self, in_channels: int, width: int, norm: Norm) -> None:
        super().__init__()
        stride = 1 if in_channels == width else 2
        self.path = nn.Sequential(
            _conv(in_channels, width, stride), _norm(norm, width), nn.ReLU(),
            _conv(width, width), _norm(norm, width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Conv2d(in_channels, width, 1, stride, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.path(features) + self.shortcut(features))


def _conv(in_channels: int, width: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)


def _norm(norm: Norm, width: int) -> nn.Module:
    return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(8, width)
