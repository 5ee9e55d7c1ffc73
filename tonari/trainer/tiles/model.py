"""A model that is called on tiles."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.staged import without_data
from tonari.trainer.private.trees import tree_map
from tonari.trainer.tiles.grid import Grid
from tonari.trainer.tiles.tensor import TiledTensor, tiled

log = logging.getLogger(__name__)


def tile_model(
    model: nn.Module, grid: Grid, sample_shape: Sequence[int], *, try_it: bool = True
) -> nn.Module:
    """Have a model take this rank's tile of each sample in place of the whole.

    Its modules, their names and its code stay. What it gives is a `TiledTensor`, from which torch's
    losses compute that of the whole sample, the same on each rank; after global pooling it is a
    plain tensor, the same on each rank.

    Each rank calls ``backward`` on its loss. Gradients are then averaged over the ranks of the
    grid, as those of replicas are: ``average_gradients(model.parameters(), grid.group)``. They are
    not added up, as each rank has the loss of all tiles, and sends gradients to the others: their
    sum is the gradient of as many losses as there are ranks.

    Args:
        model: Of any layers; in the mode in which it will be called first.
        grid: The ranks that share a sample.
        sample_shape: [channels, spatial...] of the whole sample.
        try_it: Whether a copy without data is called once, on every rank alike, so that a layer
            that cannot be tiled is refused now. It takes one tensor of the weights' dtype. A
            model that it does not suit refuses such a layer as it is first called; the log says so.

    Returns:
        The model.

    Raises:
        ConfigError: If a layer cannot be tiled; it names the module and the cure.
    """
    sizes = tuple(sample_shape[1:])

    def begin(_: nn.Module, args: Any, named: Any) -> Any:
        return tree_map(enter, (args, named))

    def enter(value: Any) -> Any:
        if isinstance(value, TiledTensor):
            value = value.like(value.local)
        elif isinstance(value, Tensor) and value.ndim == len(sizes) + 2:
            value = tiled(value, grid, sizes)
        else:
            return value
        value.learns = torch.is_grad_enabled()
        return value

    if grid.group is None:
        return model
    handle = model.register_forward_pre_hook(begin, with_kwargs=True)
    if try_it:
        tried = without_data(model)
        dtype = next((each.dtype for each in model.parameters()), None)
        local = [part.stop - part.start for part in grid.slices(sizes)]
        try:
            # What forward makes has no data either.
            with torch.no_grad(), torch.device("meta"):
                tried(torch.empty((2, sample_shape[0], *local), dtype=dtype))
        except ConfigError:
            handle.remove()
            raise
        except Exception as error:
            log.warning(
                "tiles: the model cannot be tried without data (%s): a layer that cannot be tiled "
                "is refused as it is first called", error,
            )  # fmt: skip
    return model
