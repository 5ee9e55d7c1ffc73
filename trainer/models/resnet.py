"""The ResNet for 32x32 images, with batch or group normalisation.

Source: He et al., Deep residual learning for image recognition, CVPR 2016, section 4.2.
"""

from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.cnn import scaled

Norm = Literal["batch", "group"]


class ResNet(nn.Module):
    """Classify images of about 32x32.

    Args:
        num_classes: Logits per image.
        in_channels: Channels of an image.
        depth: Layers, 6 n + 2.
        norm: ``"group"`` does not depend on how a batch is divided over replicas.
    """

    def __init__(
        self, num_classes: int, in_channels: int = 3, *, depth: int = 20, norm: Norm = "group"
    ) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"ResNet: depth is {depth}, expected 6 n + 2 >= 8; choose 20")
        self.stem = nn.Sequential(_conv(in_channels, 16), _norm(norm, 16), nn.ReLU())
        widths = [width for width in (16, 32, 64) for _ in range((depth - 2) // 6)]
        self.blocks = nn.Sequential(
            *(_Block(a, b, norm) for a, b in zip([16, *widths], widths, strict=False))
        )
        self.head = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8[batch, channels, height, width] to floating[batch, num_classes]."""
        features = self.blocks(self.stem(scaled(images, self.head.weight.dtype)))
        # floating[batch, 64]
        return cast(Tensor, self.head(features.mean(dim=(2, 3))))


class _Block(nn.Module):
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
