"""A Llama-like language model: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases.

Source: Touvron et al., LLaMA: open and efficient foundation language models, 2023; grouped queries
as Ainslie et al., GQA, EMNLP 2023; SwiGLU as Shazeer, GLU variants improve transformer, 2020.
"""

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.cnn import split_head
from tonari.trainer.models.documents import DocumentModel, Mask
from tonari.trainer.models.hub import HubFormat
from tonari.trainer.models.llama_hub import hub_config, hub_names
from tonari.trainer.models.rotary import Rope, rotate
from tonari.trainer.models.transformer import attend, init_weights, transformer_divides


class Llama(DocumentModel):
    """Give the logits of the token after each of a sequence.

    Args:
        vocabulary: Different tokens.
        sequence_length: Tokens of a sequence.
        width: Of a token's features.
        depth: Blocks.
        heads: Of the queries.
        kv_heads: Of keys and values, a divisor of ``heads``; None: as many.
        inner_width: Of the network in a block; None: as in Llama, 8/3 of ``width``, rounded up to a
            multiple of 32.
        head_width: Features of a head, even; None: ``width`` / ``heads``.
        rope: How positions turn queries and keys.
        norm_eps: Added to the mean square that a norm divides by.
        tied: Whether the output layer is the embedding of the tokens.
    """

    block_takes = ("positions", "mask")

    def __init__(
        self,
        vocabulary: int = 256,
        sequence_length: int = 128,
        *,
        width: int = 192,
        depth: int = 6,
        heads: int = 6,
        kv_heads: int | None = None,
        inner_width: int | None = None,
        head_width: int | None = None,
        rope: Rope | None = None,
        norm_eps: float = 1e-5,
        tied: bool = False,
    ) -> None:
        kv_heads, rope = kv_heads or heads, rope or Rope()
        inner_width = inner_width or -(-8 * width // 96) * 32
        if head_width is None:
            if width % heads:
                raise ConfigError(
                    f"model.width is {width}, which model.heads = {heads} does not divide; choose "
                    "a width that is a multiple of the heads, or give model.head_width"
                )
            head_width = width // heads
        if head_width % 2 or heads % kv_heads:
            raise ConfigError(
                f"model.heads is {heads}, model.kv_heads {kv_heads}, a head's width {head_width}, "
                "expected heads that are a multiple of kv_heads, and an even width; choose others"
            )
        sizes = (width, heads, kv_heads, head_width)
        blocks: list[nn.Module] = [
            _LlamaBlock(*sizes, inner_width=inner_width, rope=rope, norm_eps=norm_eps)
            for _ in range(depth)
        ]
        head = _LlamaHead(width, vocabulary, norm_eps)
        stem = _LlamaEmbedding(vocabulary, width)
        super().__init__(stem=stem, blocks=blocks, head=head)
        self.vocabulary, self.sequence_length, self.width = vocabulary, sequence_length, width
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.inner_width, self.rope, self.norm_eps = inner_width, rope, norm_eps
        self.tied = tied
        if tied:
            head.linear.weight = stem.tokens.weight
        init_weights(self, depth=depth)

    @property
    def places(self) -> int:
        """Tokens of a sequence that this rank works on."""
        return self.sequence_length // self.num_sequence_parts

    def data_shape(self, batch_size: int) -> Tensor:
        return torch.empty((batch_size, self.places), dtype=torch.int64, device="meta")

    def logits_shape(self, batch_size: int) -> tuple[int, ...]:
        return (batch_size, self.places, self.vocabulary)

    def hidden_shape_before(self, block: int, batch_size: int) -> tuple[int, ...]:
        return (batch_size, self.places // self.num_hidden_parts, self.width)

    def tp_plan(self, *, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        between = Shard(1) if sequence_parallel else Replicate()
        plan: dict[str, ParallelStyle] = {}
        for part, split, joined in (
            ("attention", ("q", "k", "v"), "out"), ("network", ("gate", "up"), "down"),
        ):  # fmt: skip
            # Gathered once for all the layers that take it.
            plan[f"blocks.*.{part}"] = PrepareModuleInput(
                input_layouts=between, desired_input_layouts=Replicate()
            )
            plan |= {f"blocks.*.{part}.{name}": ColwiseParallel() for name in split}
            plan[f"blocks.*.{part}.{joined}"] = RowwiseParallel(output_layouts=between)
            if sequence_parallel:
                plan[f"blocks.*.{part}_norm"] = SequenceParallel(use_local_output=True)
        if self.stem is not None:
            plan["stem.tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        if sequence_parallel and self.head is not None:
            plan["head.norm"] = SequenceParallel(use_local_output=True)
        plan |= split_head(
            self, "head.linear", loss_parallel=loss_parallel, comes_split=sequence_parallel
        )
        return plan

    def tp_divides(self) -> Mapping[str, int]:
        heads = {"key and value heads": self.kv_heads, "inner features": self.inner_width}
        return {**transformer_divides(self.heads, self.vocabulary, self.places), **heads}

    def use_context_parallel(self, mesh: DeviceMesh) -> None:
        if self.sequence_length % mesh.size():
            raise ConfigError(
                f"mesh.cp is {mesh.size()}, which does not divide a sequence of "
                f"{self.sequence_length} tokens; choose a data.sequence_length that it divides"
            )
        self.num_sequence_parts = mesh.size()
        for module in self.modules():
            if isinstance(module, GroupedAttention):
                module.cp = mesh

    def hub_format(self) -> HubFormat:
        return HubFormat(
            tensors=hub_names(self.num_blocks, tied=self.tied),
            aliases=frozenset({"head.linear.weight"} if self.tied else ()),
            ignored=(r".*\.rotary_emb\.inv_freq", *([r"lm_head\.weight"] if self.tied else [])),
            config=hub_config(self),
        )


class GroupedAttention(nn.Module):
    """Each place of a sequence looks at itself and those before it.

    Several heads of queries share a head of keys and values.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_width: int, *, rope: Rope
    ) -> None:
        super().__init__()
        self.head_width, self.rope = head_width, rope
        self.cp: DeviceMesh | None = None
        self.q = nn.Linear(width, heads * head_width, bias=False)
        self.k = nn.Linear(width, kv_heads * head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width, bias=False)

    def forward(
        self, hidden: Tensor, *, positions: Tensor | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Map floating[batch, places, width] to the same shape.

        Args:
            hidden: What comes in.
            positions: int64[places] or int64[batch, places]; defaults to the places' numbers.
            mask: Who looks at whom, see `attend`; defaults to causal.
        """
        # 3 x floating[batch, heads here, places, head_width]
        q, k, v = (
            layer(hidden).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if positions is None:
            num_places = q.shape[2]
            first = 0 if self.cp is None else self.cp.get_local_rank() * num_places
            positions = torch.arange(num_places, device=q.device) + first
        angles = self.rope.angles(positions, head_width=self.head_width)
        looked = attend(rotate(q, angles), rotate(k, angles), v, causal=True, mask=mask, cp=self.cp)
        return cast(Tensor, self.out(looked.transpose(1, 2).flatten(2)))


class _Network(nn.Module):
    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner_width, bias=False)
        self.up = nn.Linear(width, inner_width, bias=False)
        self.down = nn.Linear(inner_width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(hidden)) * self.up(hidden)))


class _LlamaBlock(nn.Module):
    def __init__(
        self, width: int, heads: int, kv_heads: int, head_width: int, *, inner_width: int,
        rope: Rope, norm_eps: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=norm_eps)
        self.attention = GroupedAttention(width, heads, kv_heads, head_width, rope=rope)
        self.network_norm = nn.RMSNorm(width, eps=norm_eps)
        self.network = _Network(width, inner_width)

    def forward(
        self, hidden: Tensor, *, positions: Tensor | None = None, mask: Mask | None = None
    ) -> Tensor:
        normed = self.attention_norm(hidden)
        hidden = hidden + self.attention(normed, positions=positions, mask=mask)
        return cast(Tensor, hidden + self.network(self.network_norm(hidden)))


class _LlamaEmbedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        # floating[batch, places, width]
        return cast(Tensor, self.tokens(tokens))


class _LlamaHead(nn.Module):
    def __init__(self, width: int, vocabulary: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=norm_eps)
        self.linear = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        # floating[batch, places, vocabulary]
        return cast(Tensor, self.linear(self.norm(hidden)))
