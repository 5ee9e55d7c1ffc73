"""Bound the gradients of one step by their norm over the whole mesh."""

import itertools
from collections import defaultdict
from collections.abc import Container, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tonari.trainer.mesh.mesh import AXES


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    mesh: DeviceMesh,
    *,
    max_norm: float,
    again: Container[nn.Parameter] = (),
    on_all: bool = False,
    norm: Tensor | None = None,
) -> Tensor:
    """Scale the gradients down to a norm, if theirs is larger. Collective.

    Args:
        parameters: Of all parts that this rank owns.
        mesh: With the axes of ``tonari.trainer.mesh.mesh.AXES``.
        max_norm: Of all the model's gradients together, > 0; infinite to measure only.
        again: Those that are copies of another stage's: scaled, but not counted.
        on_all: Add up in one message of all ranks: who has the norm knows that all have their
            gradients. In float64.
        norm: What they measured; None: it is to be measured.

    Returns:
        floating[]: The norm before, the same on all ranks.
    """
    # torch takes the norm of tensors of one mesh: those that tp splits, and those that it does not.
    by_mesh: defaultdict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            own = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh[own].append(parameter)
    counted = [*by_mesh.values()]
    if again:
        counted = [[each for each in group if each not in again] for group in counted]
    if norm is None:
        norm = _norm_on_all(counted, mesh) if on_all else _norm(counted, mesh)
    if max_norm < float("inf"):
        for group in by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _norm_on_all(counted: Iterable[list[nn.Parameter]], mesh: DeviceMesh) -> Tensor:
    """Measure gradients, each part of them on the first of the ranks that have it. Collective."""
    here = dict(zip(AXES, mesh.get_coordinate() or (), strict=True))
    mine = []
    for parameter in itertools.chain.from_iterable(counted):
        grad, split = parameter.grad, "pp"
        if isinstance(grad, DTensor):
            names = zip(grad.device_mesh.mesh_dim_names or (), grad.placements, strict=True)
            split = " ".join([split, *(name for name, its in names if not its.is_replicate())])
            grad = grad.to_local()
        if grad is not None and not any(at for axis, at in here.items() if axis not in split):
            mine.append(grad.coalesce().values() if grad.is_sparse else grad)
    square = nn.utils.get_total_norm(mine).double().square().to(mesh.device_type)
    dist.all_reduce(square)
    return square.sqrt()


def _norm(counted: Iterable[list[nn.Parameter]], mesh: DeviceMesh) -> Tensor:
    """Measure gradients, whole on every rank. Collective."""
    squares = [_square(group) for group in counted if group]
    if not squares:
        squares.append(torch.zeros((), dtype=torch.float64, device=mesh.device_type))
    total = torch.stack(squares).sum() if len(squares) > 1 else squares[0]
    # By its place: to cut out an axis of a mesh takes a millisecond of each step.
    if mesh.size(AXES.index("pp")) > 1:
        # In one precision: a stage that trains nothing does not know that of the others.
        of_all = total.double()
        dist.all_reduce(of_all, group=mesh.get_group("pp"))
        total = of_all.to(total.dtype)
    return total.sqrt()


def _square(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Sum the squares of gradients that lie on one mesh, whole on every rank of it."""
    # By the axes of the mesh that split them: torch's own norm of DTensors warns on every rank.
    local: defaultdict[tuple[ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            assert not any(placed.is_partial() for placed in grad.placements), "added up before"
            split = [n for n, placed in enumerate(grad.placements) if not placed.is_replicate()]
            groups = tuple(grad.device_mesh.get_group(axis) for axis in split)
            local[groups].append(grad.to_local())
        elif grad is not None:
            # Rows that came several times are one row of the gradient.
            local[()].append(grad.coalesce().values() if grad.is_sparse else grad)
    squares = []
    for groups, grads in local.items():
        square = nn.utils.get_total_norm(grads).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum()
