"""Complete the gradients of parts that torch's sharding has no hand in."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the replicas, in one message. Collective.

    Sums are taken in the same order in every step of every start of a run. Taking the mean of what
    is a mean already changes nothing, so that gradients may be added up between two calls.

    Args:
        parameters: Plain tensors of one dtype, the same on all ranks of the group in this order;
            those without a gradient are left out.
        group: The replicas.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    means = torch.split(flat, [grad.numel() for grad in grads])
    shaped = [mean.view_as(grad) for mean, grad in zip(means, grads, strict=True)]
    torch._foreach_copy_(grads, shaped)


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
