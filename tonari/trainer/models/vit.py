"""A vision transformer.

Source: Dosovitskiy et al., An image is worth 16x16 words, ICLR 2021; by default the mean of all
places in place of a class token.
"""

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.cnn import split_head
from tonari.trainer.models.hub import HubFormat, Stored
from tonari.trainer.models.staged import Images, StagedModel
from tonari.trainer.models.styles import LocalPart
from tonari.trainer.models.transformer import (
    blocks_plan,
    init_weights,
    make_blocks,
    transformer_divides,
)

Pooling = Literal["mean", "token"]

BLOCK_NAMES = {
    "attention_norm": "norm1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "up_norm": "norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
"""Of the layers of a block, in timm's files."""


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
        pooling: What the logits are of: the mean of all places, or a place before them that has no
            piece of the image; with this and a ``norm_eps`` of 1e-6 it is timm's, and takes the
            weights of ViT-B/16 and others.
        norm_eps: Added to the variance that a norm divides by.
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
        pooling: Pooling = "mean",
        norm_eps: float = 1e-5,
    ) -> None:
        if image_size % patch:
            raise ConfigError(
                f"model.image_size is {image_size}, expected a multiple of model.patch = {patch}; "
                f"choose a patch that divides it"
            )
        image_shape, places = (in_channels, image_size, image_size), (image_size // patch) ** 2
        by_token = pooling == "token"
        places += by_token
        patches = _Patches(in_channels, width, patch, places, by_token=by_token)
        stem = Images(patches, image_shape)
        blocks = make_blocks(depth, width, heads=heads, causal=False, norm_eps=norm_eps)
        head = _Head(width, num_classes, norm_eps, by_token=by_token)
        super().__init__(stem=stem, blocks=blocks, head=head)
        self.image_shape, self.places, self.num_classes = image_shape, places, num_classes
        self.width, self.heads, self.pooling = width, heads, pooling
        init_weights(self, depth=depth)

    def data_shape(self, batch_size: int) -> Tensor:
        return torch.empty((batch_size, *self.image_shape), dtype=torch.uint8, device="meta")

    def logits_shape(self, batch_size: int) -> tuple[int, ...]:
        return (batch_size, self.num_classes)

    def hidden_shape_before(self, block: int, batch_size: int) -> tuple[int, ...]:
        return (batch_size, self.places // self.num_hidden_parts, self.width)

    def tp_plan(self, *, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        if sequence_parallel and self.places % self.num_hidden_parts:
            raise ConfigError(
                f"mesh.sequence_parallel is true, and mesh.tp = {self.num_hidden_parts} does not "
                f"divide ViT's {self.places} places of a sequence; give "
                'mesh.sequence_parallel=false, or model.pooling="mean"'
            )
        plan = blocks_plan(sequence_parallel=sequence_parallel)
        if sequence_parallel and self.stem is not None:
            plan["stem.layers"] = LocalPart(gives=Shard(1))
        if sequence_parallel and self.head is not None:
            plan["head.norm"] = LocalPart(comes=Shard(1), takes=Replicate())
        return plan | split_head(self, "head.linear", loss_parallel=loss_parallel)

    def tp_divides(self) -> Mapping[str, int]:
        divides = dict(transformer_divides(self.heads, self.num_classes, self.places))
        if self.pooling == "token":
            # An odd number as a rule: only sequence parallelism divides it.
            del divides["places of a sequence"]
        return divides

    def hub_format(self) -> HubFormat:
        if self.pooling != "token":
            return HubFormat()
        names = {"stem.layers.cut": "patch_embed.proj", "head.norm": "norm", "head.linear": "head"}
        for number in range(self.num_blocks):
            for ours, theirs in BLOCK_NAMES.items():
                names[f"blocks.{number}.{ours}"] = f"blocks.{number}.{theirs}"
        # int64[3, heads, head_width] there -> [heads, 3, head_width] here
        rows = torch.arange(3 * self.width, device="cpu").view(3, self.heads, -1)
        order = rows.transpose(0, 1).flatten()
        tensors = {
            f"{ours}.{kind}": Stored(
                name=f"{theirs}.{kind}", order=order if ours.endswith("qkv") else None
            )
            for ours, theirs in names.items()
            for kind in ("weight", "bias")
        }
        tensors["stem.layers.positions"] = Stored(name="pos_embed", leading=1)
        tensors["stem.layers.token"] = Stored(name="cls_token", leading=2)
        return HubFormat(tensors=tensors)


class _Patches(nn.Module):
    def __init__(
        self, in_channels: int, width: int, patch: int, places: int, *, by_token: bool
    ) -> None:
        super().__init__()
        self.cut = nn.Conv2d(in_channels, width, patch, patch)
        self.positions = nn.Parameter(torch.empty(places, width))
        self.token = nn.Parameter(torch.empty(width)) if by_token else None

    def forward(self, images: Tensor) -> Tensor:
        # floating[batch, places, width]
        pieces = self.cut(images).flatten(2).transpose(1, 2)
        if self.token is not None:
            pieces = torch.cat([self.token.expand(len(pieces), 1, -1), pieces], dim=1)
        return cast(Tensor, pieces + self.positions)


class _Head(nn.Module):
    def __init__(self, width: int, num_classes: int, norm_eps: float, *, by_token: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=norm_eps)
        self.linear = nn.Linear(width, num_classes)
        self.by_token = by_token

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        # floating[batch, width]
        pooled = normed[:, 0] if self.by_token else normed.mean(dim=1)
        return cast(Tensor, self.linear(pooled))
