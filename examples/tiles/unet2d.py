"""A U-Net for pictures or weather (Ronneberger et al., MICCAI 2015), of any height and width."""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def batch_norm(width: int) -> nn.Module:
    """Normalize over the batch."""
    return nn.BatchNorm2d(width)


def group_norm(width: int) -> nn.Module:
    """Normalize groups of channels."""
    return nn.GroupNorm(4, width)


class PictureUNet(nn.Module):
    """Give ``num_outputs`` numbers for each position.

    Args:
        channels: Of the input.
        num_outputs: Channels of the output.
        width: Channels of the first level.
        norm: Makes the norm of that many channels.
        bilinear: Resize on the way up, in place of a transposed convolution.
        padding_mode: ``"circular"`` where the last column is beside the first.
    """

    def __init__(
        self, channels: int = 3, num_outputs: int = 2, *, width: int = 16,
        norm: Callable[[int], nn.Module] = batch_norm, bilinear: bool = False,
        padding_mode: Literal["zeros", "circular"] = "zeros",
    ) -> None:  # fmt: skip
        super().__init__()

        def twice(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1, padding_mode=padding_mode), norm(b), nn.ReLU(),
                nn.Conv2d(b, b, 3, padding=1, padding_mode=padding_mode), norm(b), nn.ReLU(),
            )  # fmt: skip

        widths = [channels, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(twice(a, b) for a, b in pairwise(widths))
        pairs = [(widths[3], widths[2]), (widths[2], widths[1])]
        self.rise = nn.ModuleList(
            nn.Conv2d(a, b, 1) if bilinear else nn.ConvTranspose2d(a, b, 2, stride=2)
            for a, b in pairs
        )
        self.up = nn.ModuleList(twice(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(width, num_outputs, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        """Map floating[batch, channels, h, w] to floating[batch, num_outputs, h, w]."""
        skips, values = [], pictures
        for number, level in enumerate(self.down):
            values = level(values if number == 0 else F.max_pool2d(values, 2))
            skips.append(values)
        for rise, level, skip in zip(self.rise, self.up, skips[-2::-1], strict=True):
            values = rise(values)
            # An odd size was halved, and lost a position.
            if values.shape[2:] != skip.shape[2:]:
                values = F.interpolate(values, skip.shape[2:], mode="bilinear")
            values = level(torch.cat([skip, values], 1))
        return self.head(values)  # type: ignore[no-any-return]
