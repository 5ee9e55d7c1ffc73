"""Several documents in a sequence, none of which sees another.

What says so is the number of each token's document: from it each stage of a model makes positions,
which begin anew with each document, and the mask of its attention.
"""

from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tonari.trainer.models.staged import StagedModel
from tonari.trainer.private.autograd import is_view

Mask = Tensor | BlockMask
"""Who looks at whom: bool[..., places, places], or blocks of it, which flex attention takes."""

LEAST_HEAD_WIDTH = 16
"""Of flex attention's kernels on a GPU."""


def positions_of(documents: Tensor) -> Tensor:
    """Count each document's tokens from 0 on.

    Args:
        documents: int64[batch, places]: Neighbours of one number are of one document.

    Returns:
        int64[batch, places].
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = documents[:, 1:] != documents[:, :-1]
    # int64[batch, places]: where a document begins its own place, else 0
    firsts = torch.nn.functional.pad(begins * places[1:], (1, 0))
    return places - firsts.cummax(dim=1).values


def document_mask(documents: Tensor, *, blocks: bool = False) -> Mask:
    """Let each place look at itself and at those before it in its document.

    Args:
        documents: int64[batch, places].
        blocks: Whether to make what flex attention takes, in which blocks of places that do not
            see one another cost nothing.

    Returns:
        bool[batch, 1, places, places], or a BlockMask of one head for all.
    """
    num_rows, num_places = documents.shape
    if not blocks:
        same = documents[:, :, None] == documents[:, None, :]
        return same.tril()[:, None]

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    device = str(documents.device)
    return create_block_mask(sees, num_rows, None, num_places, num_places, device=device)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Attend by flex attention, compiled on a GPU; arguments and result as of `attend`."""
    attention = _compiled() if q.is_cuda else flex_attention
    return cast(Tensor, attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]))


@cache
def _compiled() -> Any:
    # Without compiling it computes the whole square.
    return torch.compile(flex_attention, dynamic=False)


class DocumentModel(StagedModel):
    """A model of tokens, whose input may say of each token the number of its document.

    The numbers then pass through all stages beside the hidden tensor.

    Attributes:
        packed: Whether the input is (tokens, documents), each int64[batch, places], rather than
            the tokens alone.
        head_width: Features of a head.
        stem_takes, block_takes: Which of ``positions`` and ``mask`` the layers take.
    """

    packed = False
    head_width: int
    stem_takes: ClassVar[tuple[str, ...]] = ()
    block_takes: ClassVar[tuple[str, ...]] = ("mask",)

    def forward(self, *given: Any) -> Any:
        """Pass a batch, or what the stage before gave, through the layers that are here.

        Args:
            given: The tokens or the hidden tensor; if packed, with the documents, as a tuple or
                one after the other.
        """
        values = given[0] if len(given) == 1 else given
        if isinstance(values, Tensor):
            return super().forward(values)
        hidden, documents = values
        blocks = documents.is_cuda and self.head_width >= LEAST_HEAD_WIDTH
        blocks = blocks and next(self.parameters()).dtype != torch.float64
        made = {
            "positions": positions_of(documents),
            "mask": document_mask(documents, blocks=blocks),
        }
        if self.stem is not None:
            hidden = self.stem(hidden, **{name: made[name] for name in self.stem_takes})
        for block in self.blocks.values():
            hidden = block(hidden, **{name: made[name] for name in self.block_takes})
        if self.head is None:
            return hidden.contiguous(), documents
        hidden = self.head(hidden)
        # See StagedModel.
        return hidden.clone() if is_view(hidden) else hidden

    def input_shape(self, batch_size: int) -> Any:
        """Describe what this stage takes, as one or two meta tensors."""
        shape = super().input_shape(batch_size)
        return (shape, self.documents_shape(batch_size)) if self.packed else shape

    def output_shape(self, batch_size: int) -> Any:
        """Describe what this stage gives, as one or two meta tensors."""
        shape = super().output_shape(batch_size)
        between = self.packed and self.head is None
        return (shape, self.documents_shape(batch_size)) if between else shape

    def documents_shape(self, batch_size: int) -> Tensor:
        """Describe the documents, as a meta tensor."""
        return torch.empty_like(self.data_shape(batch_size))
