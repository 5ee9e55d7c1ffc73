"""A vision transformer for small images.

Source: Dosovitskiy et al., An image is worth 16x16 words, ICLR 2021; the mean of all places in
place of a class token.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from trainer.errors import ConfigError
from trainer.models.cnn import split_head
from trainer.models.staged import Images, StagedModel
from trainer.models.styles import Local
from trainer.models.transformer import blocks_plan, init_weights, make_blocks, transformer_divides


class ViT(StagedModel):
    """Classify square images.

    Args:
        num_classes: Logits per image.
        in_channels: Channels of an image.
        image_size: Its height and width, a multiple of ``patch``.
        patch: Height and width of the pieces that an image is cut into.
        width: Of a piece's features, a multiple of ``heads``.
        depth: Blocks.
        heads: Of attention.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        *,
        image_size: int = 32,
        patch: int = 4,
        width: int = 192,
        depth: int = 6,
        heads: int = 6,
    ) -> None:
        if image_size % patch:
            raise ConfigError(
                f"model.image_size is {image_size}, expected a multiple of model.patch = {patch}; "
                f"choose a patch that divides it"
            )
        image_shape, places = (in_channels, image_size, image_size), (image_size // patch) ** 2
        stem = Images(_Patches(in_channels, width, patch, places), image_shape)
        blocks = make_blocks(depth, width, heads=heads, causal=False)
        super().__init__(stem=stem, blocks=blocks, head=_MeanHead(width, num_classes))
        self.image_shape, self.places, self.num_classes = image_shape, places, num_classes
        self.width, self.heads = width, heads
        init_weights(self, depth=depth)

    def data_shape(self, batch_size: int) -> Tensor:
        return torch.empty((batch_size, *self.image_shape), dtype=torch.uint8, device="meta")

    def logits_shape(self, batch_size: int) -> tuple[int, ...]:
        return (batch_size, self.num_classes)

    def hidden_shape_before(self, block: int, batch_size: int) -> tuple[int, ...]:
        return (batch_size, self.places // self.num_hidden_parts, self.width)

    def tp_plan(self, *, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        plan = blocks_plan(sequence_parallel=sequence_parallel)
        if sequence_parallel and self.stem is not None:
            plan["stem.layers"] = Local(gives=Shard(1))
        if sequence_parallel and self.head is not None:
            plan["head.norm"] = Local(comes=Shard(1), takes=Replicate())
        return plan | split_head(self, "head.linear", loss_parallel=loss_parallel)

    def tp_divides(self) -> Mapping[str, int]:
        return transformer_divides(self.heads, self.num_classes, self.places)


class _Patches(nn.Module):
    def __init__(self, in_channels: int, width: int, patch: int, places: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(in_channels, width, patch, patch)
        self.positions = nn.Parameter(torch.empty(places, width))

    def forward(self, images: Tensor) -> Tensor:
        # floating[batch, places, width]
        return cast(Tensor, self.cut(images).flatten(2).transpose(1, 2) + self.positions)


class _MeanHead(nn.Module):
    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, num_classes)

    def forward(self, hidden: Tensor) -> Tensor:
        # floating[batch, width]
        return cast(Tensor, self.linear(self.norm(hidden).mean(dim=1)))
