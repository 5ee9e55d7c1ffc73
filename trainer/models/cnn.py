"""A small CNN without batch statistics: its gradients do not depend on how a batch is divided."""

from typing import cast

import torch
from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Classify small square images.

    Args:
        num_classes: Logits per image.
        in_channels: Channels of an image.
        image_size: Its height and width, >= 4.
    """

    def __init__(self, num_classes: int, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        self.image_shape = (in_channels, image_size, image_size)
        self.blocks = nn.Sequential(_block(in_channels, 16, stride=1))
        width, side = 16, image_size
        while side > 4:
            self.blocks.append(_block(width, min(2 * width, 64), stride=2))
            width, side = min(2 * width, 64), -(-side // 2)
        self.head = nn.Linear(width * side * side, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8[batch, channels, height, width] to floating[batch, num_classes]."""
        if tuple(images.shape[1:]) != self.image_shape:
            raise ValueError(
                f"SmallCNN: images are {list(images.shape[1:])}, the model was made for "
                f"{list(self.image_shape)} [channels, height, width]; set data.channels and "
                "model.image_size, or data.image_size to resize"
            )
        features = self.blocks(scaled(images, self.head.weight.dtype))
        return cast(Tensor, self.head(features.flatten(1)))


def scaled(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Map uint8 in [0, 255] to floating point in [-1, 1]."""
    return images.to(dtype) / 127.5 - 1


def _block(in_channels: int, width: int, *, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(in_channels, width, 3, stride, padding=1), nn.ReLU())
