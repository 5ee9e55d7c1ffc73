"""A model that is called on tiles."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.adapted import Adapted
from tonari.trainer.models.staged import StagedModel, without_data
from tonari.trainer.private.trees import tree_map
from tonari.trainer.tiles.grid import Grid
from tonari.trainer.tiles.tensor import Cut, TiledTensor, tiled

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
    if try_it:
        try:
            _try(without_data(model), grid, sample_shape)
        except ConfigError:
            raise
        except Exception as error:
            log.warning(
                "tiles: the model cannot be tried without data (%s): a layer that cannot be tiled "
                "is refused as it is first called", error,
            )  # fmt: skip
    model.register_forward_pre_hook(begin, with_kwargs=True)
    return model


def tile_stages(
    model: StagedModel, grid: Grid, sample_shape: Sequence[int]
) -> Callable[[StagedModel], None]:
    """Find how what a model's blocks take is cut, so that its stages hand over tiles.

    Args:
        model: The whole of it; it stays as it is.
        grid: The ranks that share a sample, of the same stages.
        sample_shape: [channels, spatial...] of the whole sample.

    Returns:
        What has a stage, cut out of the model, take and give this rank's tile; see `tile_model`.

    Raises:
        ConfigError: If a layer cannot be tiled, or the stages of a module of one's own would be.
    """
    tried, cuts = without_data(model), dict[int, tuple[Cut, ...]]()

    def note(number: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        cuts[number] = getattr(args[0], "cuts", ())

    def tile_stage(part: StagedModel) -> None:
        if isinstance(part, Adapted) and len(part.blocks) < part.num_blocks:
            raise ConfigError(
                f"mesh.tiles and mesh.pp: the stages of {type(part.wrapped).__name__} run all of "
                "its forward on what stands for the weights of others, expected a model that the "
                "trainer has, or a StagedModel; leave one of the settings out"
            )
        if isinstance(part, Adapted) or part.stem is not None:
            tile_model(part, grid, sample_shape, try_it=False)
        else:
            part.register_forward_pre_hook(partial(_arrive, grid, cuts[part.first_block]))
        if not isinstance(part, Adapted) and part.head is None:
            part.register_forward_hook(_leave)
        part.sizes_here = {
            number: {cut.dim: cut.num_here(grid) for cut in its} for number, its in cuts.items()
        }

    if not isinstance(tried, Adapted):
        assert tried.head is not None, "it is whole"
        for number, module in enumerate([*tried.blocks.values(), tried.head]):
            module.register_forward_pre_hook(partial(note, number))
    _try(tried, grid, sample_shape)
    return tile_stage


def _try(model: nn.Module, grid: Grid, sample_shape: Sequence[int]) -> None:
    tile_model(model, grid, sample_shape, try_it=False)
    dtype = next((each.dtype for each in model.parameters()), None)
    local = [part.stop - part.start for part in grid.slices(sample_shape[1:])]
    # What forward makes has no data either.
    with torch.no_grad(), torch.device("meta"):
        model(torch.empty((2, sample_shape[0], *local), dtype=dtype))


def _arrive(grid: Grid, cuts: Sequence[Cut], _: nn.Module, args: tuple[Any, ...]) -> Any:
    if not cuts:
        return args
    hidden = TiledTensor(args[0], grid, cuts)
    hidden.learns = torch.is_grad_enabled()
    return (hidden, *args[1:])


def _leave(_: nn.Module, args: Any, given: Any) -> Any:
    return given.local if isinstance(given, TiledTensor) else given
