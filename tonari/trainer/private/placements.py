"""Which part of a tensor lies on which rank of a mesh.

Why: weights are made part by part, and counted for ranks that are not there. torch remembers how it
placed operators by the mesh, and would take what it found for a mesh that is gone. A trace leaves
out operators that torch runs on tensors without data to find how to place what is split. Public
instead: `DTensor.to_local`, once a tensor is there.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch.distributed.tensor import Placement
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

__all__ = [
    "compute_local_shape_and_global_offset", "forget_placements", "local_shape",
    "shape_search_replaced",
]  # fmt: skip


def local_shape(
    shape: tuple[int, ...], mesh_sizes: tuple[int, ...], placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Compute the shape of the part of the first rank of a mesh of any size."""
    place = [0] * len(mesh_sizes)
    found, _ = _compute_local_shape_and_global_offset(
        shape, mesh_sizes, place, placements, skip_offset=True
    )
    return tuple(found)


def forget_placements() -> None:
    """Forget how operators were placed on meshes before."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def shape_search_replaced(
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> AbstractContextManager[Any]:
    """Put what ``make`` makes of it in place of torch's search for shapes, until left."""
    name = "_propagate_tensor_meta_non_cached"
    return mock.patch.object(ShardingPropagator, name, make(getattr(ShardingPropagator, name)))
