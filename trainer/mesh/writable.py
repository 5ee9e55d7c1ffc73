"""Values that may be changed in place, whatever they are a view of."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class _Writable(torch.autograd.Function):
    """The same memory as a tensor that is no leaf, and to autograd no view."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def writable(value: Tensor) -> Tensor:
    """Give a tensor that a module may change in place as its own, without a copy."""
    return cast(Tensor, cast(Any, _Writable).apply(value)) if value.requires_grad else value


def give_no_views(block: nn.Module) -> None:
    """Have a block give tensors that are no views, to be called before it is sharded.

    torch's sharding hooks on to what a block gives, and loses a view that is changed in place.
    """
    block.register_forward_hook(_without_views)


def _without_views(block: nn.Module, args: Any, given: Any) -> Any:
    def plain(value: Any) -> Any:
        return writable(value) if isinstance(value, Tensor) and value._is_view() else value

    return tree_map(plain, given)
