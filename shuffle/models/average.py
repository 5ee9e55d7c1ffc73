"""The mean of all replicas' values, the same bits on every rank."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataio.world import World

MEAN_BYTES = 2**28
"""What rank 0 holds of all replicas at once while they are averaged, about."""


def mean(world: World, values: Tensor) -> Tensor:
    """Average over replicas in double precision, or find the largest count. Collective."""
    if values.is_complex():
        return torch.view_as_complex(
            mean(world, torch.view_as_real(values).reshape(-1)).view(-1, 2)
        )
    real = values.is_floating_point()
    wide = values.to(torch.float64 if real else torch.int64).numpy()
    count = max(1, MEAN_BYTES // (wide.itemsize * world.world_size))
    parts: list[NDArray[np.float64 | np.int64]] = [
        world.allreduce(
            wide[first : first + count], op="sum" if real else "max", doing="averaging models"
        )
        for first in range(0, len(wide), count)
    ]
    joined = np.concatenate(parts)
    return torch.from_numpy(joined / world.world_size if real else joined).to(values.dtype)
