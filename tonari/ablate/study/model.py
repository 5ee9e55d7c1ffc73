"""The study's model: a small ResNet whose normalisation knows which replica a row is of."""

from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["none", "group", "batch"]
Running = Literal["mean", "first"]


class StudyResNet(nn.Module):
    """Classify small images; all replicas' rows of a step pass through in one batch.

    Args:
        num_classes: Logits per image.
        width: Channels of the first stage, a multiple of 4; the next have twice and four times
            that.
        blocks: Residual blocks a stage.
        norm: ``"none"`` and ``"group"`` treat every row by itself. ``"batch"`` normalises each
            replica's rows by their own statistics, as a process of its own would.
        replicas: Whose rows stand one after the other in a training batch, equally many each.
        running: Statistics kept for evaluation: replica 0's, as DistributedDataParallel keeps, or
            the mean over replicas.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        width: int = 8,
        blocks: int = 1,
        norm: Norm = "none",
        replicas: int = 1,
        running: Running = "mean",
    ) -> None:
        super().__init__()

        def make_norm(channels: int) -> nn.Module:
            if norm == "batch":
                return ReplicaBatchNorm(channels, replicas=replicas, running=running)
            return nn.GroupNorm(4, channels) if norm == "group" else nn.Identity()

        self.stem = _conv(3, width, bias=norm == "none")
        self.stem_norm = make_norm(width)
        widths = [width * scale for scale in (1, 2, 4) for _ in range(blocks)]
        self.blocks = nn.Sequential(
            *(
                _Block(before, after, make_norm(after), make_norm(after))
                for before, after in zip([width, *widths], widths, strict=False)
            )
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map floating[rows, 3, height, width] to floating[rows, num_classes]."""
        features = self.blocks(F.relu(self.stem_norm(self.stem(images))))
        # floating[rows, 4 * width]
        return cast(Tensor, self.head(features.mean(dim=(2, 3))))


class ReplicaBatchNorm(nn.Module):
    """Batch normalisation over each replica's own rows.

    Args:
        channels: Of the features.
        replicas: Whose rows stand one after the other, equally many each.
        running: See `StudyResNet`.
        momentum: Part of the new statistics in the running ones.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, channels: int, *, replicas: int, running: Running, momentum: float = 0.1
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.replicas, self.running, self.momentum = replicas, running, momentum

    def forward(self, features: Tensor) -> Tensor:
        """Normalise floating[rows, channels, height, width]."""
        if not self.training:
            return F.batch_norm(
                features, self.running_mean, self.running_var, self.weight, self.bias
            )
        # floating[replicas, channels]: each replica keeps its own, which the fused kernel updates
        means = self.running_mean.repeat(self.replicas, 1)
        variances = self.running_var.repeat(self.replicas, 1)
        parts = [
            F.batch_norm(part, mean, variance, self.weight, self.bias, True, self.momentum)
            for part, mean, variance in zip(
                features.chunk(self.replicas), means, variances, strict=True
            )
        ]
        kept = slice(0, 1) if self.running == "first" else slice(None)
        self.running_mean.copy_(means[kept].mean(dim=0))
        self.running_var.copy_(variances[kept].mean(dim=0))
        return torch.cat(parts)


LEAST_CHANNELS = 8
"""Of a strided 1x1 convolution: with fewer, the backward pass of torch 2.13's oneDNN (3.12) writes
past the end of a buffer, on processors without AVX-512."""


class _Block(nn.Module):
    def __init__(self, before: int, after: int, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        plain = isinstance(first, nn.Identity)
        stride = 1 if before == after else 2
        self.conv1, self.norm1 = _conv(before, after, stride, bias=plain), first
        self.conv2, self.norm2 = _conv(after, after, bias=plain), second
        self.shortcut: nn.Module = nn.Identity()
        # Every so many places are taken before the convolution, which then has no stride
        self.step = stride if before < LEAST_CHANNELS else 1
        if before != after:
            self.shortcut = nn.Conv2d(before, after, 1, stride // self.step, bias=False)
            nn.init.kaiming_normal_(self.shortcut.weight, nonlinearity="linear")
        if plain:
            # Without normalisation a block must begin as its shortcut, or features grow with depth
            nn.init.zeros_(self.conv2.weight)

    def forward(self, features: Tensor) -> Tensor:
        path = F.relu(self.norm1(self.conv1(features)))
        passed = self.shortcut(features[..., :: self.step, :: self.step])
        return F.relu(self.norm2(self.conv2(path)) + passed)


def _conv(before: int, after: int, stride: int = 1, *, bias: bool) -> nn.Conv2d:
    conv = nn.Conv2d(before, after, 3, stride, padding=1, bias=bias)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv
