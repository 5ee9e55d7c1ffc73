"""Axes of a mesh taken together, and steps of FSDP for a block that this rank does not call.

Why: parameters are sharded over two axes as one; ranks that pass a block over send what those send
that call it. Public instead: none (`init_device_mesh` makes a mesh of all ranks only; torch's
`fully_shard` acts in the hooks of a block's own call).
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

__all__ = ["begin_unused", "end_unused", "flattened", "joined"]


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Make one axis of all those of a mesh."""
    return mesh._flatten(name)


def joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Make a mesh of the axes of several."""
    return DeviceMesh._concatenate([*meshes])


def begin_unused(block: nn.Module, values: Any) -> Any:
    """Have FSDP see values come to a block that is not called, and gradients leave it."""
    state = fully_shard.state(block)  # type: ignore[attr-defined]
    state._pre_forward(block, (), {})
    for group in state._fsdp_param_groups:
        (values,), _ = group._register_post_backward_hook((values,), {})
    return values


def end_unused(block: nn.Module, values: Any) -> Any:
    """Have FSDP see values leave a block that is not called, and gradients come to it."""
    state = fully_shard.state(block)  # type: ignore[attr-defined]
    return state._post_forward(block, None, values)
