"""Axes of a mesh taken together, and steps of FSDP for a block that this rank does not call.

Why: parameters are sharded over two axes as one; ranks that pass a block over send what those send
that call it. Public instead: none (`init_device_mesh` makes a mesh of all ranks only; torch's
`fully_shard` acts in the hooks of a block's own call).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

__all__ = ["begin_unused", "end_unused", "flattened", "joined", "reduce_unused"]


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Make one axis of all those of a mesh."""
    return mesh._flatten(name)


def joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Make a mesh of the axes of several."""
    return DeviceMesh._concatenate([*meshes])


def reduce_unused(part: FSDPModule) -> None:
    """Have parameters that a pass has not used take part in its messages, as zeros."""
    if hasattr(part, "set_reduce_scatter_unused_params"):
        part.set_reduce_scatter_unused_params(True)
        return
    # Before torch 2.13
    assert isinstance(part, nn.Module)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(fully_shard.state(module)):  # type: ignore[attr-defined]
                group.post_backward = partial(_fill_and_reduce, group, group.post_backward)


def _fill_and_reduce(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    for held in group.fsdp_params if group.reduce_grads else ():
        if hasattr(held, "_unsharded_param") and held.unsharded_accumulated_grad is None:
            whole = held.unsharded_param
            if whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
    post_backward(*unused)


def _groups(state: Any) -> Sequence[Any]:
    """List the parameters that FSDP gathers together; in torch 2.11 they are one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    one = getattr(state, "_fsdp_param_group", None)
    return groups if groups is not None else [one] if one is not None else []


def begin_unused(block: nn.Module, values: Any) -> Any:
    """Have FSDP see values come to a block that is not called, and gradients leave it."""
    state = fully_shard.state(block)  # type: ignore[attr-defined]
    state._pre_forward(block, (), {})
    for group in _groups(state):
        (values,), _ = group._register_post_backward_hook((values,), {})
    return values


def end_unused(block: nn.Module, values: Any) -> Any:
    """Have FSDP see values leave a block that is not called, and gradients come to it."""
    state = fully_shard.state(block)  # type: ignore[attr-defined]
    return state._post_forward(block, None, values)
