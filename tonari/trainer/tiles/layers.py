"""Layers that need more than a window: norms, padding, interpolation, dropout, pooling to one."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tonari.trainer.private.fakes import unset_fake_temporarily
from tonari.trainer.tiles.exchange import add_up, fetch, moments
from tonari.trainer.tiles.tensor import UNKNOWN, CutDim, TiledTensor, computes, refuse, spans
from tonari.trainer.tiles.windows import check_spatial, cut_within, each_of


def normalize(
    tile: TiledTensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, groups: int,
    over_batch: bool, running: Sequence[Tensor | None] = (None, None), momentum: float = 0.0,
) -> TiledTensor:  # fmt: skip
    """Normalize by statistics over all tiles.

    Args:
        tile: floating[batch, channels, spatial...].
        weight, bias: floating[channels].
        eps: Added to the variance.
        groups: Of channels that share statistics.
        over_batch: Whether all samples share them.
        running: floating[channels]: Mean and variance that move towards those found.
        momentum: By which share of the way.
    """
    batch, channels, *spatial = tile.shape
    each, ones = channels // groups, [1] * len(spatial)
    count = math.prod(spatial) * each * (batch if over_batch else 1)
    grouped = tile.local.reshape(batch, groups, each, *tile.local.shape[2:])
    dims = [*([0] if over_batch else []), *range(2, grouped.ndim)]
    mean, variance = moments(grouped, dims, grid=tile.grid, whole=count)
    for kept, found, scale in zip(running, (mean, variance), (1, count / (count - 1)), strict=True):
        if kept is not None:
            kept.lerp_(found.detach().mean(0).flatten().to(kept) * scale, momentum)
    # floating[batch or 1, channels, 1...], one for each channel of a group
    mean, variance = (
        value.reshape(-1, groups, 1).expand(-1, -1, each).reshape(-1, channels, *ones)
        for value in (mean, variance)
    )
    factor = torch.rsqrt(variance + eps)
    if weight is not None:
        factor = factor * weight.view(-1, *ones)
    shift = -mean * factor if bias is None else bias.view(-1, *ones) - mean * factor
    return tile.like(torch.addcmul(shift, tile.local.to(factor.dtype), factor).to(tile.dtype))


@computes("batch_norm", "instance_norm")
def norm_of_channels(
    func: Any, tile: TiledTensor, running_mean: Tensor | None = None,
    running_var: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None,
    by_input: bool | None = None, momentum: float = 0.1, eps: float = 1e-5, **named: bool,
) -> TiledTensor:  # fmt: skip
    """Normalize each channel over tiles, and over samples or not; or by what was found before."""
    tile = check_spatial(func, tile, tile.ndim - 2)
    over_batch = func.__name__ == "batch_norm"
    if by_input is None:
        by_input = (
            named.get("training", False) if over_batch else named.get("use_input_stats", True)
        )
    running = (running_mean, running_var)
    if not by_input:
        return tile.like(F.batch_norm(tile.local, *running, weight, bias, eps=eps))
    return normalize(
        tile, weight, bias, eps, groups=tile.shape[1], over_batch=over_batch, running=running,
        momentum=momentum,
    )  # fmt: skip


@computes("group_norm")
def group_norm(
    func: Any, tile: TiledTensor, num_groups: int, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> TiledTensor:  # fmt: skip
    """Normalize groups of channels of each sample over tiles."""
    tile = check_spatial(func, tile, tile.ndim - 2)
    return normalize(tile, weight, bias, eps, groups=num_groups, over_batch=False)


@computes("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def pool_to_one(func: Any, tile: TiledTensor, output_size: Any) -> Tensor:
    """Take the mean of all positions."""
    dims = int(func.__name__[-2])
    tile = check_spatial(func, tile, dims)
    if set(each_of(output_size, dims)) != {1}:
        refuse(func, f"to {output_size} is not cut as tiles are", "pool to 1, or by avg_pool")
    spatial = [*range(2, tile.ndim)]
    total = add_up(tile.local.sum(spatial, keepdim=True), tile.grid)
    return total / math.prod(tile.shape[2:])


@computes("dropout", "dropout_")
def dropout(
    func: Any, tile: TiledTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> TiledTensor:
    """Draw for the whole sample, on each rank from the same state, and cut the draw."""
    if not training or p == 0:
        return tile
    ones = torch.ones(tile.shape, dtype=tile.dtype, device=tile.device)
    # Numbers are drawn in the order of memory
    order = sorted(range(tile.ndim), key=tile.local.stride().__getitem__, reverse=True)
    if order != [*range(tile.ndim)]:
        if any(cut.least == 1 for cut in tile.cuts):
            refuse(func, "goes by memory, which is not seen of one position", "call contiguous()")
        ones = ones.permute(order).contiguous().permute([*map(order.index, range(tile.ndim))])
    kept = F.dropout(ones, p)
    # Copied: the numbers of other tiles shall not stay in memory.
    kept = tile.aligned(kept).clone()
    return tile.like(
        tile.local.mul_(kept) if inplace or func.__name__ == "dropout_" else tile.local * kept
    )


@computes("pad")
def pad(
    func: Any,
    tile: TiledTensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> TiledTensor:
    """Lengthen dimensions, or shorten them; ``circular`` goes on at the other end."""
    ends = {tile.ndim - 1 - at // 2: (pad[at], pad[at + 1]) for at in range(0, len(pad), 2)}
    for number, cut in enumerate(tile.cuts):
        low, high = ends.pop(cut.dim, (0, 0))
        if not (low or high):
            continue
        if not isinstance(cut, CutDim):
            refuse(func, "goes along dimensions of tiles that became one", UNKNOWN)
        size = cut.size
        if mode in ("constant", "circular"):
            given = cut_within(cut, [start + low for start in cut.starts[1:-1]], size + low + high)
            needed = [(a - low, b - low) for a, b in spans(given.starts)]
            move = tile.needed(cut, needed, None if mode == "circular" else value or 0.0)
            cuts = (*tile.cuts[:number], given, *tile.cuts[number + 1 :])
            tile = tile.like(fetch(tile.local, [move]), cuts)
        else:
            # float64[padded]: the position that each of them repeats, as torch says
            tile = resample(tile, cut.dim, F.pad(_positions(size)[None], (low, high), mode)[0])
    rest = [end for dim in range(tile.ndim - 1, -1, -1) for end in ends.get(dim, (0, 0))]
    rest = rest[: len(pad)]
    return tile.like(func(tile.local, rest, mode, value)) if any(rest) else tile


@computes("interpolate")
def interpolate(
    func: Any, tile: TiledTensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> TiledTensor:  # fmt: skip
    """Resize one dimension after the other, by the positions that torch takes."""
    tile = check_spatial(func, tile, tile.ndim - 2)
    is_linear = mode in ("linear", "bilinear", "trilinear")
    if antialias or not (is_linear or mode in ("nearest", "nearest-exact")):
        refuse(func, f"in mode {mode} is not cut as tiles are", "choose nearest or (bi)linear")
    sizes, scales = each_of(size, tile.ndim - 2), each_of(scale_factor, tile.ndim - 2)
    for dim, to, scale in zip(range(2, tile.ndim), sizes, scales, strict=True):
        places = func(
            _positions(tile.shape[dim])[None, None], to, scale, "linear" if is_linear else mode,
            align_corners, recompute_scale_factor,
        )  # fmt: skip
        tile = resample(tile, dim, places.flatten())
    return tile


def _positions(size: int) -> Tensor:
    """Number positions: float64[size]; numbers also where a step is traced on none."""
    with unset_fake_temporarily():
        return torch.arange(size, dtype=torch.float64)


def resample(tile: TiledTensor, dim: int, places: Tensor) -> TiledTensor:
    """Take what lies at given places of a dimension, between two positions in proportion.

    Args:
        tile: Of any dtype; of floating point where places lie between positions.
        dim: Cut or not.
        places: float64[given], in [0, size - 1].
    """
    local, cuts, size = tile.local, [*tile.cuts], tile.shape[dim]
    # int64[given]
    before = places.floor().long()
    after = (before + 1).clamp(max=size - 1)
    # The same on every rank: what is computed again in the backward pass stops there alike.
    is_between = bool((places != before).any())
    for number, cut in enumerate(cuts):
        if cut.dim == dim and isinstance(cut, CutDim):
            inner = [-(-start * len(places) // size) for start in cut.starts[1:-1]]
            cuts[number] = given = cut_within(cut, inner, len(places))
            needed = [
                (int(before[a:b].min()), int(after[a:b].max()) + 1) for a, b in spans(given.starts)
            ]
            local = fetch(local, [tile.needed(cut, needed)])
            me = tile.grid.coordinates[cut.axis]
            a, b = spans(given.starts)[me]
            places, before, after = places[a:b], before[a:b], after[a:b]
            places, before, after = (each - needed[me][0] for each in (places, before, after))
    taken = local.index_select(dim, before.to(local.device))
    if is_between:
        share = (places - before).view(-1, *[1] * (tile.ndim - 1 - dim))
        taken = taken.lerp(local.index_select(dim, after.to(local.device)), share.to(local))
    return tile.like(taken, cuts)
