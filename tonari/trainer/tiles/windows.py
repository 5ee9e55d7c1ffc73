"""Convolutions and pooling: layers whose every output needs a window of positions.

Output o needs the inputs from o * stride - padding on. The rank that holds the window's middle
computes it: with the usual padding of (size - 1) / 2 that is the holder of input o * stride.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tonari.trainer.tiles.exchange import Move, fetch
from tonari.trainer.tiles.grid import starts_within
from tonari.trainer.tiles.tensor import (
    UNKNOWN,
    CutDim,
    TiledTensor,
    TooShort,
    computes,
    refuse,
    spans,
)


class LayerWindow(NamedTuple):
    """How a layer looks at one dimension; ``low`` and ``high`` are its padding."""

    size: int
    stride: int
    dilation: int
    low: int
    high: int

    @property
    def reach(self) -> int:
        """Positions from the first to the last one of a window."""
        return self.dilation * (self.size - 1)

    def num_outputs(self, size: int, *, ceil: bool = False) -> int:
        """Count the windows on a dimension of that size."""
        room = size + self.low + self.high - self.reach - 1
        if not ceil:
            return room // self.stride + 1
        number = -(-room // self.stride) + 1
        # The last one has to begin within the input or the padding before it.
        return number - ((number - 1) * self.stride >= size + self.low)


def each_of(value: Any, dims: int) -> tuple[Any, ...]:
    """Give an argument for each spatial dimension."""
    values = (
        tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    )
    return values * dims if len(values) == 1 else values


def check_spatial(func: Any, tile: TiledTensor, dims: int) -> TiledTensor:
    """Check that a layer with that many spatial dimensions meets no others that are cut."""
    if not isinstance(tile, TiledTensor) or tile.ndim != dims + 2 or min(tile.cut_dims) < 2:
        refuse(func, "takes [batch, channels, spatial...], of which the last are cut", UNKNOWN)
    tile.spatial(func)
    return tile


def cut_within(cut: CutDim, inner: Sequence[int], size: int) -> CutDim:
    """Cut what a layer gives.

    Raises:
        TooShort: If it has fewer positions than parts.
    """
    starts = starts_within(inner, size)
    if starts is None:
        raise TooShort
    return replace(cut, starts=starts)


def place_windows(
    func: Any, tile: TiledTensor, windows: Sequence[LayerWindow], *, fill: float, ceil: bool = False
) -> tuple[list[Move], list[CutDim]]:
    """Say what each rank needs for its windows, and how what they give is cut.

    Args:
        func: That looks at them.
        tile: The input.
        windows: Of each spatial dimension.
        fill: The padding.
        ceil: Whether a last window may go beyond the end.
    """
    moves, cuts = [], []
    for cut in tile.spatial(func):
        window = windows[cut.dim - 2]
        middle = window.reach // 2 - window.low
        inner = [-((middle - start) // window.stride) for start in cut.starts[1:-1]]
        given = cut_within(cut, inner, window.num_outputs(cut.starts[-1], ceil=ceil))
        needed = [
            (
                a * window.stride - window.low,
                (b - 1) * window.stride - window.low + window.reach + 1,
            )
            for a, b in spans(given.starts)
        ]
        moves.append(tile.needed(cut, needed, fill))
        cuts.append(given)
    return [move for move in moves if not move.is_nothing], cuts


class _Convolved(torch.autograd.Function):
    """A convolution that keeps its input as it came and the thin halo, in place of both joined."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None, moves: Sequence[Move],
        crops: Sequence[int], how: tuple[Any, ...],
    ) -> Tensor:  # fmt: skip
        halos, joined = list[Tensor](), values
        for move in moves:
            joined, got = move.take(joined)
            halos += got
        ctx.save_for_backward(values, weight, *halos)
        ctx.bias = None if bias is None else [*bias.shape]
        ctx.moves, ctx.crops, ctx.how = moves, crops, how
        given = torch.convolution(joined, weight, bias, *how)
        return F.pad(given, crops) if any(crops) else given

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        joined, weight, *halos = ctx.saved_tensors
        for move in ctx.moves:
            num_halos = len(move.of_others)
            joined, halos = move.join(joined, halos[:num_halos]), halos[num_halos:]
        if any(ctx.crops):
            gradient = F.pad(gradient, [-crop for crop in ctx.crops])
        wanted = list(ctx.needs_input_grad[:3])
        # The input's is asked for on every rank, so that all take part in giving it back.
        of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, joined, weight, ctx.bias, *ctx.how, wanted
        )
        if wanted[0]:
            for move in reversed(ctx.moves):
                of_input = move.give_back(of_input)
        return of_input, of_weight, of_bias, None, None, None


def _convolve(tile: TiledTensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    values = [tile.local, weight, bias]
    device = tile.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        values = [None if each is None else each.to(dtype) for each in values]
    return cast(Tensor, cast(Any, _Convolved).apply(*values, *how))


@computes("conv1d", "conv2d", "conv3d")
def convolution(
    func: Any, tile: TiledTensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> TiledTensor:  # fmt: skip
    """Convolve; a padding of ``"same"`` has its odd position behind the end."""
    dims = weight.ndim - 2
    tile = check_spatial(func, tile, dims)
    strides, dilations = each_of(stride, dims), each_of(dilation, dims)
    pads = each_of(0 if padding == "valid" else padding, dims)
    windows = []
    for size, step, apart, pad in zip(weight.shape[2:], strides, dilations, pads, strict=True):
        both = apart * (size - 1)
        low, high = (both // 2, both - both // 2) if pad == "same" else (pad, pad)
        windows.append(LayerWindow(size, step, apart, low, high))
    moves, cuts = place_windows(func, tile, windows, fill=0.0)
    inside = [0 if dim + 2 in tile.cut_dims else each.low for dim, each in enumerate(windows)]
    odd = [
        0 if dim + 2 in tile.cut_dims else each.high - each.low for dim, each in enumerate(windows)
    ]
    if any(odd):
        tile = tile.like(F.pad(tile.local, [pad for each in reversed(odd) for pad in (0, each)]))
    how = (strides, inside, dilations, False, [0] * dims, groups)
    return tile.like(_convolve(tile, weight, bias, moves, (), how), cuts)


@computes("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed(
    func: Any, tile: TiledTensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> TiledTensor:  # fmt: skip
    """Convolve by the transpose: input i gives to the outputs from i * stride - padding on."""
    dims = weight.ndim - 2
    tile = check_spatial(func, tile, dims)
    strides, dilations, pads, more = (
        [*each_of(each, dims)] for each in (stride, dilation, padding, output_padding)
    )
    moves, cuts, crops = [], [], [[0, 0] for _ in range(dims)]
    for cut in tile.spatial(func):
        k = cut.dim - 2
        step, pad, size = strides[k], pads[k], cut.starts[-1]
        reach = dilations[k] * (weight.shape[cut.dim] - 1)
        middle = reach // 2 - pad
        inner = [start * step + middle for start in cut.starts[1:-1]]
        given = cut_within(cut, inner, (size - 1) * step - 2 * pad + reach + more[k] + 1)
        needed = []
        for a, b in spans(given.starts):
            low = min(max(-((reach - a - pad) // step), 0), size - 1)
            needed.append((low, max(min((b - 1 + pad) // step + 1, size), low + 1)))
        (a, b), (low, high) = (
            each[tile.grid.coordinates[cut.axis]] for each in (spans(given.starts), needed)
        )
        crops[k] = [low * step - pad - a, b - ((high - 1) * step - pad + reach + 1)]
        pads[k] = more[k] = 0
        moves.append(tile.needed(cut, needed))
        cuts.append(given)
    how = (strides, pads, dilations, True, more, groups)
    flat = [crop for pair in reversed(crops) for crop in pair]
    local = _convolve(tile, weight, None, moves, flat, how)
    # Behind the crop, which may have made room for outputs that no input gives to.
    return tile.like(
        local if bias is None else local + bias.view(-1, *[1] * dims).to(local.dtype), cuts
    )


@computes("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
    func: Any, tile: TiledTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> TiledTensor:  # fmt: skip
    """Take the largest of each window."""
    dims = int(func.__name__[-2])
    tile = check_spatial(func, tile, dims)
    if return_indices:
        refuse(func, "gives positions in its own tile only", "leave return_indices out")
    sizes, pads, apart = (each_of(each, dims) for each in (kernel_size, padding, dilation))
    strides = each_of(stride or sizes, dims)
    windows = [LayerWindow(*each) for each in zip(sizes, strides, apart, pads, pads, strict=True)]
    moves, cuts = place_windows(func, tile, windows, fill=float("-inf"), ceil=ceil_mode)
    inside = [0 if dim + 2 in tile.cut_dims else pad for dim, pad in enumerate(pads)]
    local = fetch(tile.local, moves)
    return tile.like(func(local, sizes, strides, inside, apart, ceil_mode), cuts)


@computes("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    func: Any, tile: TiledTensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> TiledTensor:  # fmt: skip
    """Take the mean of each window, at the borders of those positions that count."""
    dims = int(func.__name__[-2])
    tile = check_spatial(func, tile, dims)
    sizes, pads = each_of(kernel_size, dims), each_of(padding, dims)
    strides = each_of(stride or sizes, dims)
    windows = [
        LayerWindow(size, step, 1, pad, pad)
        for size, step, pad in zip(sizes, strides, pads, strict=True)
    ]
    moves, cuts = place_windows(func, tile, windows, fill=0.0, ceil=ceil_mode)
    inside = [0 if dim + 2 in tile.cut_dims else pad for dim, pad in enumerate(pads)]
    more = () if divisor_override is None else (divisor_override,)
    given = func(
        fetch(tile.local, moves), sizes, strides, inside, ceil_mode, count_include_pad, *more
    )
    for cut in () if more else cuts:
        size, step, _, low, high = windows[cut.dim - 2]
        first = torch.arange(cut.starts[-1]) * step - low
        beyond = high if count_include_pad else 0
        end = tile.shape[cut.dim] + beyond
        counted = (first + size).clamp(max=end) - first.clamp(min=-beyond)
        # On every rank or on none: what is computed again in the backward pass stops there alike.
        if (counted != size).any():
            here = counted[slice(*spans(cut.starts)[tile.grid.coordinates[cut.axis]])]
            # floating[outputs of the tile, 1, ...]: what counts in place of all of a window
            scale = (size / here).to(given).view(-1, *[1] * (tile.ndim - 1 - cut.dim))
            given = given * scale
    return tile.like(given, cuts)
