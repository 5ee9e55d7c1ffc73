"""Complete the gradients of parts that torch's sharding has no hand in."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from tonari.trainer.errors import ConfigError
from tonari.trainer.private import foreach

MOST_APART = 0.05
"""Of the larger of two norms: more than the order of adding up makes of what is the same."""


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the replicas, in one message a dtype. Collective.

    A parameter that some replicas have not used counts as zeros there, as in one process that adds
    up their gradients; one that none has used keeps no gradient. Sparse gradients become dense.
    Only a rank that has not used all parameters waits for the device.

    Sums are taken in the same order in every step of every start of a run. Taking the mean of what
    is a mean already changes nothing, so that gradients may be added up between two calls.

    Args:
        parameters: Plain tensors, the same on all ranks of the group in this order.
        group: The replicas.
    """
    by_dtype: defaultdict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype[parameter.dtype].append(parameter)
    for alike in by_dtype.values():
        _average(alike, group)


def _average(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    grads = [dense_gradient(parameter) for parameter in parameters]
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    # The same message says who has used which: ranks may differ.
    used = torch.tensor([float(each.grad is not None) for each in parameters])
    flat = torch.cat([*(each.flatten() for each in real), used.to(real[0])])
    dist.all_reduce(flat, group=group)
    *means, counts = torch.split(flat, [*(each.numel() for each in real), len(parameters)])
    flat[: -len(parameters)] /= dist.get_world_size(group)
    shaped = [mean.view_as(each) for mean, each in zip(means, real, strict=True)]
    foreach.copy_(real, shaped)
    # What this rank has used needs no count.
    uses_all = all(each.grad is not None for each in parameters)
    counted = [1] * len(parameters) if uses_all else counts.tolist()
    for parameter, grad, count in zip(parameters, grads, counted, strict=True):
        parameter.grad = grad if count else None


def dense_gradient(parameter: nn.Parameter) -> Tensor:
    """Give the memory of a parameter's gradient, zeros where there is none."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter)
    return grad.to_dense() if grad.is_sparse else grad


def add_partial_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Add up the gradients of which each rank of tp has a part, in one message. Collective.

    Of a parameter that all ranks hold whole, each has the gradient of its part of the sequence
    only, where norms compute on parts.

    Args:
        parameters: DTensors over ``mesh`` of one dtype, the same on all its ranks in this order.
        mesh: Of tp.
    """
    partial = [
        (parameter, parameter.grad)
        for parameter in parameters
        if isinstance(parameter.grad, DTensor) and parameter.grad.placements[0].is_partial()
    ]
    if not partial:
        return
    flat = torch.cat([grad.to_local().flatten() for _, grad in partial])
    dist.all_reduce(flat, group=mesh.get_group())
    sums = torch.split(flat, [parameter.numel() for parameter, _ in partial])
    for (parameter, grad), whole in zip(partial, sums, strict=True):
        parameter.grad = DTensor.from_local(
            whole.view(grad.shape), mesh, [Replicate()], run_check=False
        )


@torch.no_grad()
def check_alike(named: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
    """Refuse gradients that differ on ranks that hold the same parameter whole. Collective.

    One number of each is compared: of parts of a gradient, such as those of single heads, it
    differs; of a whole one it is the same, but for the order in which a device adds up.

    Args:
        named: Parameters by their names, the same on all ranks in this order.
        mesh: Of tp.

    Raises:
        ConfigError: Names the parameter, on all ranks.
    """
    names, sizes = [], []
    for name, parameter in named:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ()
            if "tp" in axes and parameter.placements[axes.index("tp")].is_replicate():
                names.append(name)
                sizes.append(grad.to_local().double().norm())
    if not names:
        return
    mine = torch.stack(sizes)
    every = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(every, mine, group=mesh.get_group())
    # floating[ranks, parameters]
    norms = torch.stack(every)
    most, least = norms.amax(0), norms.amin(0)
    # What is nothing but rounding beside the others may differ as it likes.
    differ = (most - least > MOST_APART * most) & (most > 1e-6 * most.max())
    if not bool((~differ).all()):
        name = names[int(differ.to(torch.uint8).argmax())]
        raise ConfigError(
            f"mesh.tp: the gradient of {name} differs on the ranks, which hold it whole: each "
            "has that of its part of what the tp plan splits, and would train on it; name its "
            'layer in the plan, by "replicated_with_grad_allreduce" if it works on each head by '
            "itself, or leave the layers around it whole"
        )
