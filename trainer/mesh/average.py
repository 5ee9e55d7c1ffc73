"""Average the gradients of replicas that each hold a whole stage."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


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
