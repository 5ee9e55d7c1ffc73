"""How a model's weights lie in files of Hugging Face's layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where a parameter or buffer lies in the files.

    Attributes:
        name: Of the tensor there.
        transposed: Whether its two dimensions are swapped there, as in GPT-2's ``Conv1D``.
        order: int64[rows]: Row i of ours is row ``order[i]`` of the transposed or plain tensor
            there; None: the same row.
        leading: Dimensions of size one before ours.
    """

    name: str
    transposed: bool = False
    order: Tensor | None = None
    leading: int = 0

    def shape_there(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Give the shape in the file of a tensor that has this one here."""
        return (1,) * self.leading + (shape[::-1] if self.transposed else shape)

    def there(self, value: Tensor) -> Tensor:
        """Lay out a whole tensor of ours as the file has it."""
        if self.order is not None:
            value = torch.empty_like(value).index_copy_(0, self.order, value)
        value = value.T if self.transposed else value
        return value.reshape((1,) * self.leading + tuple(value.shape)).contiguous()


@dataclass(frozen=True, kw_only=True)
class HubFormat:
    """A whole model in files, whichever part of it is here.

    Attributes:
        tensors: By our name; a parameter that is not among them has its own name in the files.
        aliases: Our names of parameters that are another one's, and are not in the files.
        ignored: Regular expressions: tensors in the files that have no use here.
        config: What ``config.json`` says beside the dtype; empty: there is none.
    """

    tensors: Mapping[str, Stored] = field(default_factory=dict)
    aliases: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    config: Mapping[str, object] = field(default_factory=dict)

    def stored(self, name: str) -> Stored:
        """Say where a parameter lies."""
        return self.tensors.get(name) or Stored(name=name)
