"""What the transformers share: pre-norm blocks of attention and a two-layer network.

Source: Vaswani et al., Attention is all you need, NeurIPS 2017; normalisation first as Xiong et
al., On layer normalization in the transformer architecture, ICML 2020.
"""

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn.attention.flex_attention import BlockMask

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.context import attend_causally
from tonari.trainer.models.documents import Mask, attend_in_blocks
from tonari.trainer.models.styles import redistribute


class Attention(nn.Module):
    """Each place of a sequence looks at the others; at none after it, if causal."""

    def __init__(self, width: int, *, heads: int, causal: bool) -> None:
        super().__init__()
        self.head_width, self.causal = width // heads, causal
        self.cp: DeviceMesh | None = None
        # Rows head by head, each with its q, k and v: a split by rows is a split by heads.
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, *, mask: Mask | None = None) -> Tensor:
        """Map floating[batch, places, width] to the same shape; see `attend` for the mask."""
        # floating[batch, places, heads here, 3, head_width]
        qkv = self.qkv(hidden).unflatten(-1, (-1, 3, self.head_width))
        # 3 x floating[batch, heads here, places, head_width]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        looked = attend(q, k, v, causal=self.causal, mask=mask, cp=self.cp)
        return cast(Tensor, self.out(looked.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Attention, then a network of four times the width; each beside what it adds to."""

    def __init__(self, width: int, *, heads: int, causal: bool, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=norm_eps)
        self.attention = Attention(width, heads=heads, causal=causal)
        self.up_norm = nn.LayerNorm(width, eps=norm_eps)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, *, mask: Mask | None = None) -> Tensor:
        """Map floating[batch, places, width] to the same shape; see `attend` for the mask."""
        hidden = hidden + self.attention(self.attention_norm(hidden), mask=mask)
        return cast(Tensor, hidden + self.down(F.gelu(self.up(self.up_norm(hidden)))))


def make_blocks(
    depth: int, width: int, *, heads: int, causal: bool, norm_eps: float = 1e-5
) -> list[nn.Module]:
    """Make the blocks of a transformer."""
    if width % heads:
        raise ConfigError(
            f"model.width is {width}, which model.heads = {heads} does not divide; choose a width "
            f"that is a multiple of the heads"
        )
    return [Block(width, heads=heads, causal=causal, norm_eps=norm_eps) for _ in range(depth)]


def init_weights(model: nn.Module, *, depth: int) -> None:
    """Start small: normal weights of 0.02, less for what goes back into the sum of all blocks."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" not in name:
            back = name.endswith(("attention.out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if back else 0.02)


def blocks_plan(*, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Split attention by heads and the network by its inner width."""
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=between),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=between),
        "blocks.*.up": ColwiseParallel(input_layouts=between),
        "blocks.*.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        for norm in ("attention_norm", "up_norm"):
            plan[f"blocks.*.{norm}"] = SequenceParallel(use_local_output=True)
    return plan


def transformer_divides(heads: int, classes: int, places: int) -> Mapping[str, int]:
    """List what a tp size has to divide."""
    return {"heads": heads, "classes": classes, "places of a sequence": places}


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Mask | None = None,
    cp: DeviceMesh | None = None,
) -> Tensor:  # fmt: skip
    """Let each place look at others, and take the mean of their values.

    Args:
        q: floating[batch, heads here, places, head_width].
        k: The same; or fewer heads, each for as many consecutive heads of ``q``.
        v: As ``k``.
        causal: Whether no place looks at one after it; ignored if there is a mask.
        mask: bool[..., places, all places]: Who looks at whom; or blocks of it, without cp.
        cp: Ranks that each hold consecutive places of the sequence, for a causal model.

    Returns:
        floating[batch, heads here, places, head_width].
    """
    if isinstance(mask, BlockMask):
        return attend_in_blocks(q, k, v, mask)
    if cp is not None and mask is None:
        return attend_causally(q, k, v, cp)
    if cp is not None:
        # floating[2, batch, heads here, all places, head_width]
        both = torch.stack([k, v])
        k, v = redistribute(both, cp, Shard(3), Replicate(), Partial())
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=grouped
    )
