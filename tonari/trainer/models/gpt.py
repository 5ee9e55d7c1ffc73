"""A language model that guesses each next token.

Source: Radford et al., Language models are unsupervised multitask learners, 2019; here with an
output layer of its own.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, SequenceParallel

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.cnn import split_head
from tonari.trainer.models.documents import DocumentModel
from tonari.trainer.models.styles import LocalPart
from tonari.trainer.models.transformer import (
    Attention,
    blocks_plan,
    init_weights,
    make_blocks,
    transformer_divides,
)


class GPT(DocumentModel):
    """Give the logits of the token after each of a sequence.

    Args:
        vocabulary: Different tokens.
        sequence_length: Tokens of a sequence.
        width: Of a token's features, a multiple of ``heads``.
        depth: Blocks.
        heads: Of attention.
    """

    stem_takes = ("positions",)

    def __init__(
        self,
        vocabulary: int = 256,
        sequence_length: int = 128,
        *,
        width: int = 192,
        depth: int = 6,
        heads: int = 6,
    ) -> None:
        stem = _GPTEmbedding(vocabulary, sequence_length, width)
        blocks = make_blocks(depth, width, heads=heads, causal=True)
        super().__init__(stem=stem, blocks=blocks, head=_GPTHead(width, vocabulary))
        self.vocabulary, self.sequence_length = vocabulary, sequence_length
        self.width, self.heads, self.head_width = width, heads, width // heads
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
        plan = blocks_plan(sequence_parallel=sequence_parallel)
        if self.stem is not None:
            between = Shard(1) if sequence_parallel else Replicate()
            plan["stem.tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
            if sequence_parallel:
                # With documents each row has positions of its own.
                plan["stem.positions"] = LocalPart(gives=Shard(int(self.packed)))
        if sequence_parallel and self.head is not None:
            plan["head.norm"] = SequenceParallel(use_local_output=True)
        return plan | split_head(
            self, "head.linear", loss_parallel=loss_parallel, comes_split=sequence_parallel
        )

    def tp_divides(self) -> Mapping[str, int]:
        return transformer_divides(self.heads, self.vocabulary, self.places)

    def use_context_parallel(self, mesh: DeviceMesh) -> None:
        if self.sequence_length % mesh.size():
            raise ConfigError(
                f"mesh.cp is {mesh.size()}, which does not divide a sequence of "
                f"{self.sequence_length} tokens; choose a data.sequence_length that it divides"
            )
        self.num_sequence_parts = mesh.size()
        for module in self.modules():
            if isinstance(module, Attention):
                module.cp = mesh
            elif isinstance(module, _GPTEmbedding):
                module.part = mesh.get_local_rank()


class _GPTEmbedding(nn.Module):
    def __init__(self, vocabulary: int, sequence_length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.part = 0

    def forward(self, tokens: Tensor, *, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            num_places = tokens.shape[1]
            positions = torch.arange(num_places, device=tokens.device) + self.part * num_places
        # floating[batch, places, width]
        return cast(Tensor, self.tokens(tokens) + self.positions(positions))


class _GPTHead(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        # floating[batch, places, vocabulary]
        return cast(Tensor, self.linear(self.norm(hidden)))
