"""Values that may be changed in place, whatever they are a view of."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from tonari.trainer.private.autograd import is_view
from tonari.trainer.private.trees import tree_map
from tonari.trainer.tiles.tensor import TiledTensor


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
    if isinstance(value, TiledTensor):
        given = value.like(writable(value.local))
        given.learns = value.learns
        return given
    return cast(Tensor, cast(Any, _Writable).apply(value)) if value.requires_grad else value


def pass_no_views(block: nn.Module) -> None:
    """Have a block take and give tensors that are no views, once it is sharded.

    torch's sharding makes views of what a block takes, which may not be changed in place, and hooks
    on to what it gives, where a view that is changed in place loses the hook.
    """
    block.register_forward_pre_hook(_take_no_views, with_kwargs=True)
    block.register_forward_hook(_give_no_views)


def _take_no_views(
    block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    taken: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(_no_view, (args, named))
    return taken


def _give_no_views(block: nn.Module, args: Any, given: Any) -> Any:
    return tree_map(_no_view, given)


def _no_view(value: Any) -> Any:
    return writable(value) if isinstance(value, Tensor) and is_view(value) else value
