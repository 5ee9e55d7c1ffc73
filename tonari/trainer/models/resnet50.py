"""The ResNet-50 for images of about 224x224, with batch normalisation.

Source: He et al., Deep residual learning for image recognition, CVPR 2016; the stride in the 3x3
convolution of a block, as torchvision and timm have it ("v1.5").
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.hub import HubFormat, Stored
from tonari.trainer.models.resnet import PooledHead
from tonari.trainer.models.staged import Images, StagedModel

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""By channel, of pixels in [0, 1]: what published weights were trained on."""

EXPANSION = 4
"""Channels that a block gives, for one of its 3x3 convolution."""


class ResNet50(StagedModel):
    """Classify images; with the weights that torchvision or timm publish, as they do.

    Args:
        num_classes: Logits per image.
        in_channels: Channels of an image, 3: published statistics are of as many.
        image_size: Height and width of an image; only a pipeline of several stages needs it.
        layers: Blocks of each of the four widths; (3, 4, 23, 3) is a ResNet-101.
        width: Channels of the first layer.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        image_size: int = 224,
        layers: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
    ) -> None:
        if in_channels != 3:
            raise ConfigError(
                f'data.channels is {in_channels}, expected 3 for model.kind "resnet50"; give '
                "data.channels=3, or another model.kind"
            )
        blocks, names = list[nn.Module](), list[str]()
        given = width
        shapes = [(width, 4)]
        for number, num_blocks in enumerate(layers):
            inner = width * 2**number
            for place in range(num_blocks):
                stride = 2 if number and not place else 1
                blocks.append(_Bottleneck(given, inner, stride))
                given = EXPANSION * inner
                names.append(f"layer{number + 1}.{place}")
                shapes.append((given, 4 * 2**number))
        head = PooledHead(given, num_classes)
        super().__init__(stem=Images(_Stem(width), scale=_normalized), blocks=blocks, head=head)
        self.num_classes, self.image_size, self._shapes = num_classes, image_size, shapes
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        ours = {"stem.layers.": "", "head.linear.": "fc."}
        ours |= {f"blocks.{number}.": f"{name}." for number, name in enumerate(names)}
        self._format = HubFormat(
            tensors={
                name: Stored(name=theirs + name.removeprefix(prefix))
                for name in self.state_dict()
                for prefix, theirs in ours.items()
                if name.startswith(prefix)
            }
        )

    def data_shape(self, batch_size: int) -> Tensor:
        shape = (batch_size, 3, self.image_size, self.image_size)
        return torch.empty(shape, dtype=torch.uint8, device="meta")

    def logits_shape(self, batch_size: int) -> tuple[int, ...]:
        return (batch_size, self.num_classes)

    def hidden_shape_before(self, block: int, batch_size: int) -> tuple[int, ...]:
        channels, shrunk = self._shapes[block]
        side = -(-self.image_size // shrunk)
        return (batch_size, channels, side, side)

    def check_mesh(self, *, num_stages: int = 1, tp: int = 1) -> None:
        super().check_mesh(num_stages=num_stages, tp=tp)
        if tp > 1:
            raise ConfigError(
                f"mesh.tp is {tp}, expected 1 for ResNet50: the statistics of its batch norms are "
                "not split; leave mesh.tp out, and use mesh.dp_shard or mesh.pp"
            )

    def hub_format(self) -> HubFormat:
        return self._format


class _Stem(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> Tensor:
        # floating[batch, width, height / 4, width / 4]
        return F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, padding=1)


class _Bottleneck(nn.Module):
    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        channels = EXPANSION * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, features: Tensor) -> Tensor:
        values = F.relu(self.bn1(self.conv1(features)))
        values = F.relu(self.bn2(self.conv2(values)))
        values = self.bn3(self.conv3(values))
        return F.relu(cast(Tensor, values + self.downsample(features)))


def _normalized(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Map uint8 in [0, 255] to what published weights expect."""
    # Filled on the device: a tensor of Python's numbers would be copied there, and waited for.
    mean, std = (
        torch.cat([
            torch.full((1, 1, 1), value, dtype=dtype, device=images.device) for value in values
        ])
        for values in (IMAGENET_MEAN, IMAGENET_STD)
    )  # fmt: skip
    return (images.to(dtype) / 255 - mean) / std
