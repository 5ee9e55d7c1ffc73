"""What a replica goes on with: its own state and its partner's, or the mean of all replicas."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataio.base.errors import ExchangeError
from dataio.world import World
from shuffle.models.pieces import TensorPiece


def merge(
    tensors: Mapping[str, Tensor],
    pieces: Iterable[TensorPiece],
    *,
    mine: Tensor,
    theirs: Tensor,
    average: bool,
) -> None:
    """Write the merged value of both packed states into tensors, and keep what changed since.

    Raises:
        ExchangeError: If a tensor that was packed is gone or has another shape.
    """
    for piece in pieces:
        now = tensors.get(piece.name)
        if now is None or now.dtype != piece.dtype or tuple(now.shape) != piece.shape:
            found = "absent" if now is None else f"{now.dtype}{list(now.shape)}"
            raise ExchangeError(
                f"ModelExchange: {piece.name} is {found}, but was {piece.dtype}{list(piece.shape)} "
                f"when its round began; load model and optimizer of the same checkpoint, and call "
                f"flush() before replacing either"
            )
        merged = merge_tensor(
            now,
            piece.view(mine).to(now.device, non_blocking=True),
            piece.view(theirs).to(now.device, non_blocking=True),
            average=average,
            bounded=not piece.name.startswith("parameter "),
        )
        now.copy_(merged)


def merge_tensor(
    now: Tensor, mine: Tensor, theirs: Tensor, *, average: bool, bounded: bool
) -> Tensor:
    """Make one tensor of what a replica has now and what both had when the round began.

    It is ``goal + (now - mine)``, where the goal is the mean of both, or theirs: exact where
    nothing changed since. Of what cannot be averaged (counts, flags) the goal is the larger.

    Args:
        now: The replica's own, with the steps since.
        mine: Its own value that it sent.
        theirs: The partner's value that came.
        average: Whether the goal is the mean.
        bounded: For moments and variances. Where both replicas have nothing below 0, an element
            never falls below both its own and the goal: it stays >= 0, and is not cut to 0 either,
            by which an optimizer would divide.
    """
    if now.dtype == torch.bool:
        return mine | theirs if average else theirs
    if not (now.is_floating_point() or now.is_complex()):
        goal = torch.maximum(mine, theirs) if average else theirs
        return now + (goal - mine)
    # Halves lose digits at each of three operations
    wide = torch.float32 if now.itemsize < 4 else now.dtype
    present, before, other = now.to(wide), mine.to(wide), theirs.to(wide)
    goal = (before + other) / 2 if average else other
    # Not where nothing is to be done: an infinity, as in a mask, would become a NaN
    merged = torch.where(goal == before, present, goal + (present - before))
    if bounded and not now.is_complex() and min(x.min() for x in (present, before, other)) >= 0:
        merged = torch.maximum(merged, torch.minimum(present, goal))
    return merged.to(now.dtype)


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
