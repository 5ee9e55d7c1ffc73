"""A U-Net for volumes (Cicek et al., MICCAI 2016), as it is: tiles need no other code."""

import torch
from torch import Tensor, nn


def twice(channels: int, width: int) -> nn.Module:
    """Convolve twice, with batch statistics."""
    return nn.Sequential(
        nn.Conv3d(channels, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.ReLU(),
        nn.Conv3d(width, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.ReLU(),
    )  # fmt: skip


class VolumeUNet(nn.Module):
    """Give ``num_classes`` numbers for each position of a volume, each of whose sizes 4 divides."""

    def __init__(self, channels: int = 1, num_classes: int = 3, *, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = twice(channels, width), twice(width, 2 * width)
        self.bottom = twice(2 * width, 4 * width)
        self.pool = nn.MaxPool3d(2)
        self.from_bottom = nn.ConvTranspose3d(4 * width, 2 * width, 2, stride=2)
        self.from_second = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.second_up, self.first_up = twice(4 * width, 2 * width), twice(2 * width, width)
        self.head = nn.Conv3d(width, num_classes, 1)

    def forward(self, volumes: Tensor) -> Tensor:
        """Map floating[batch, channels, d, h, w] to floating[batch, num_classes, d, h, w]."""
        first = self.first(volumes)
        second = self.second(self.pool(first))
        up = self.from_bottom(self.bottom(self.pool(second)))
        up = self.second_up(torch.cat([up, second], 1))
        up = self.first_up(torch.cat([self.from_second(up), first], 1))
        return self.head(up)  # type: ignore[no-any-return]
