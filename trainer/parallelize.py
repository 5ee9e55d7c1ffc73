"""Spread a model over the data-parallel axes of the mesh, by torch's own means."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make gradients the mean over all replicas, whatever the sizes of the axes. Collective.

    Args:
        model: The same weights on every rank, on this rank's device; changed in place. Its
            ``blocks``, if it has any, are gathered one by one where parameters are sharded.
        mesh: With the axes of ``trainer.mesh.AXES``.

    Returns:
        The model.
    """
    # Not DistributedDataParallel: it orders its buckets anew after the first step, so that a
    # resumed run would add gradients in another order than an uninterrupted one.
    data_parallel = mesh["dp_replicate", "dp_shard"]
    if mesh["dp_shard"].size() > 1:
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=data_parallel)
    fully_shard(model, mesh=data_parallel)
    return model


def average_buffers(model: nn.Module) -> None:
    """Give every rank the mean of all ranks' batch statistics. Collective.

    Without this, ranks evaluate different models, and a checkpoint would keep one rank's.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            with torch.no_grad():
                dist.all_reduce(buffer)
                buffer /= dist.get_world_size()
