"""Functions that compute each position by itself, or over dimensions that are not cut; losses."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tonari.trainer.private.trees import tree_leaves, tree_map
from tonari.trainer.tiles.exchange import add_up
from tonari.trainer.tiles.tensor import UNKNOWN, TiledTensor, computes, refuse, whole

UNARY = (
    "abs acos acosh asin asinh atan atanh bfloat16 bool ceil celu clone contiguous cos cosh cpu "
    "detach double elu erf erfc exp exp2 expm1 float floor frac gelu half hardshrink hardsigmoid "
    "hardswish hardtanh int isfinite isinf isnan leaky_relu log log10 log1p log2 logical_not "
    "logit logsigmoid long mish nan_to_num neg negative ones_like positive reciprocal relu relu6 "
    "round rsqrt selu sgn sigmoid sign silu sin sinh softplus softshrink softsign sqrt square tan "
    "tanh tanhshrink threshold to trunc zeros_like full_like"
)
SEVERAL = (
    "add addcdiv addcmul atan2 bitwise_and bitwise_not bitwise_or clamp clamp_max clamp_min clip "
    "copysign div divide eq float_power floor_divide fmod ge greater gt heaviside hypot le lerp "
    "less logaddexp logical_and logical_or logical_xor lt masked_fill maximum minimum mul multiply "
    "ne pow remainder sub subtract true_divide type_as where xlogy rsub"
)
IN_PLACE = (
    "abs add addcdiv addcmul ceil clamp clamp_max clamp_min copy div elu exp fill floor hardtanh "
    "leaky_relu lerp log masked_fill mul neg pow relu round sigmoid sqrt sub tanh zero"
)
OPERATORS = (
    "add and eq floordiv ge gt invert le lt mod mul ne neg or pow radd rand rdiv rfloordiv rmul "
    "ror rpow rsub rtruediv sub truediv xor"
)
OPERATORS_IN_PLACE = "iadd iand idiv imul ior ipow isub itruediv"
POSITIONWISE = (*UNARY.split(), *SEVERAL.split(), *(f"__{name}__" for name in OPERATORS.split()))
CHANGES = (
    *(f"{name}_" for name in IN_PLACE.split()),
    *(f"__{name}__" for name in OPERATORS_IN_PLACE.split()),
)


@computes(*POSITIONWISE, *CHANGES)
def positionwise(func: Any, *args: Any, **named: Any) -> Any:
    """Compute each position by itself; tensors that are not tiled are cut where they have all."""
    tiles = [each for each in tree_leaves((args, named)) if isinstance(each, TiledTensor)]
    first = max(tiles, key=lambda tile: tile.ndim)
    if func.__name__ in CHANGES and not isinstance(args[0], TiledTensor):
        refuse(func, "would put a tile into a tensor that is whole", "let it give a new tensor")
    given = func(*tree_map(first.aligned, args), **tree_map(first.aligned, named))
    if not isinstance(given, Tensor):
        refuse(func, "gives positions in its own tile", UNKNOWN)
    return first if given is first.local else first.behind(given)


@computes("prelu", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")
def channelwise(func: Any, tile: TiledTensor, *args: Any, **named: Any) -> TiledTensor:
    """Compute with a number for each channel; dropout draws these in the order of one process."""
    if not isinstance(tile, TiledTensor) or min(tile.cut_dims) < 2:
        refuse(func, "takes [batch, channels, spatial...], of which the last are cut", UNKNOWN)
    return tile.like(func(tile.local, *args, **named))


@computes("linear", "matmul", "__matmul__", "layer_norm", "rms_norm")
def over_last(func: Any, tile: TiledTensor, operand: Any, *args: Any, **named: Any) -> TiledTensor:
    """Compute over the last dimension, or the last ones, of each position."""
    shape = getattr(operand, "shape", operand)
    over = 1 if isinstance(operand, Tensor) else len(shape)
    tiles = [each for each in (operand, *args) if isinstance(each, TiledTensor)]
    if (
        tiles
        or not isinstance(tile, TiledTensor)
        or (isinstance(operand, Tensor) and len(shape) != 2)
    ):
        refuse(func, "takes a tiled tensor and a weight of two dimensions", UNKNOWN)
    if max(tile.cut_dims) >= tile.ndim - over:
        refuse(func, "reduces a dimension that is cut", UNKNOWN)
    return tile.like(func(tile.local, operand, *args, **named))


ALONG = {"softmax": 1, "log_softmax": 1, "chunk": 2, "split": 2, "cumsum": 1, "glu": 1,
         "normalize": 2, "flip": 1, "narrow": 1, "roll": 2}  # fmt: skip
"""Where each has its dimension among its arguments."""
DEFAULTS = {"chunk": 0, "split": 0, "glu": -1, "normalize": 1}


@computes(*ALONG)
def along(func: Any, tile: TiledTensor, *args: Any, **named: Any) -> Any:
    """Compute along a dimension that is not cut."""
    name, at = func.__name__, ALONG[func.__name__] - 1
    dims = named.get("dim", named.get("dims", args[at] if len(args) > at else DEFAULTS.get(name)))
    if name == "flip" and len(args) > 1:
        dims = args
    check_uncut(func, tile, dims)
    return tree_map(tile.like, func(tile.local, *args, **named))


def check_uncut(func: Any, tile: TiledTensor, dims: Any) -> None:
    """Refuse what is computed along a dimension that is cut, or along all."""
    listed = [] if dims is None else [dims] if isinstance(dims, int) else [*dims]
    if not listed or {dim % tile.ndim for dim in listed} & {*tile.cut_dims}:
        refuse(func, "goes along a dimension that is cut", UNKNOWN)


@computes("cat", "concat", "concatenate")
def concatenate(func: Any, tensors: Sequence[Any], dim: int = 0) -> TiledTensor:
    """Join along a dimension that is not cut."""
    first = next(each for each in tensors if isinstance(each, TiledTensor))
    check_uncut(func, first, dim)
    return first.like(func([first.aligned(each) for each in tensors], dim))


@computes(
    "sum", "mean", "amax", "amin", "argmax", "argmin", "all", "any", "std", "var", "logsumexp"
)
def reduce(func: Any, tile: TiledTensor, dim: Any = None, *args: Any, **named: Any) -> Tensor:
    """Reduce dimensions that are not cut; sums and means also all that are."""
    dims = [*range(tile.ndim)] if dim is None else [dim] if isinstance(dim, int) else [*dim]
    dims = [each % tile.ndim for each in dims]
    cut = {*dims} & {*tile.cut_dims}
    if not cut:
        given = func(tile.local, dim, *args, **named)
        if given.ndim == tile.ndim:
            return tile.like(given)
        return tile.like(given, [
            replace(each, dim=each.dim - sum(other < each.dim for other in dims))
            for each in tile.cuts
        ])  # fmt: skip
    if func.__name__ not in ("sum", "mean") or cut != {*tile.cut_dims}:
        refuse(
            func,
            "reduces a dimension that is cut",
            f"take sum or mean over all of them; or {UNKNOWN}",
        )
    total = add_up(torch.sum(tile.local, dims, *args, **named), tile.grid)
    return total if func.__name__ == "sum" else total / math.prod(tile.shape[each] for each in dims)


@computes("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
          "binary_cross_entropy_with_logits", "cross_entropy", "nll_loss")  # fmt: skip
def loss(
    func: Any,
    tile: TiledTensor,
    target: Any,
    weight: Any = None,
    *,
    reduction: str = "mean",
    **named: Any,
) -> Tensor:
    """Compute a loss of each position; a sum or a mean is that of the whole, on each rank."""
    is_by_class = func.__name__ in ("cross_entropy", "nll_loss")
    if not isinstance(tile, TiledTensor) or (is_by_class and (min(tile.cut_dims) < 2)):
        refuse(func, "compares a tiled output with a target", UNKNOWN)
    if is_by_class and weight is not None and reduction == "mean":
        refuse(func, "divides by the weights of its own tile", 'give reduction="sum", and divide')
    if any([named.pop(old, None) is not None for old in ("size_average", "reduce")]):
        refuse(func, "would take the mean of its own tile", "give reduction in place of these")
    aligned = tile.aligned(target)
    if weight is not None:
        if func.__name__.endswith(("mse_loss", "l1_loss", "huber_loss")):
            refuse(func, "takes no weight here", 'give reduction="none", and multiply')
        named["weight"] = weight
    if not is_by_class:
        named = tree_map(tile.aligned, named)
    each = func(tile.local, aligned, reduction="none", **named)
    if reduction == "none":
        return tile.behind(each)  # type: ignore[no-any-return]
    total = add_up(each.sum(), tile.grid)
    if reduction == "sum":
        return total
    if not is_by_class or aligned.is_floating_point():
        return total / tile.behind(each).numel()  # type: ignore[no-any-return]
    return total / tile.grid.add_up((aligned != named.get("ignore_index", -100)).sum())


@computes("flatten", "view", "reshape")
def flatten(func: Any, tile: TiledTensor, *args: Any, **named: Any) -> Tensor:
    """Gather what becomes one row a sample, as before a linear layer; refuse other shapes."""
    given = func(torch.empty(tile.shape, dtype=tile.dtype, device="meta"), *args, **named)
    if (given.shape, given.dtype) == (tile.shape, tile.dtype):
        return tile
    if given.ndim != 2 or given.shape[0] != tile.shape[0]:
        refuse(func, f"makes {[*given.shape]} of {[*tile.shape]}", UNKNOWN)
    return func(whole(tile), *args, **named)  # type: ignore[no-any-return]


@computes("permute", "transpose", "squeeze", "unsqueeze", "movedim", "__getitem__")
def rearrange(func: Any, tile: TiledTensor, *args: Any, **named: Any) -> TiledTensor:
    """Move dimensions, take some of one that is not cut, and follow where the cut ones go."""
    if func.__name__ == "__getitem__":
        check_index(func, tile, args[0])
    # Sizes by which the dimensions are found again.
    sizes = [*tile.local.shape]
    for number, cut in enumerate(tile.cuts):
        sizes[cut.dim] = max(sizes) + number + 2
    given = [*func(torch.empty(sizes, device="meta"), *args, **named).shape]
    cuts = [replace(cut, dim=given.index(sizes[cut.dim])) for cut in tile.cuts]
    return tile.like(func(tile.local, *args, **named), cuts)


def check_index(func: Any, tile: TiledTensor, index: Any) -> None:
    """Refuse to take but all positions of a dimension that is cut."""
    listed = [*index] if isinstance(index, tuple) else [index]
    if not all(each is ... or isinstance(each, int | slice) for each in listed) or isinstance(
        index, bool
    ):
        refuse(func, "takes positions that depend on values", UNKNOWN)
    if ... in listed:
        at = listed.index(...)
        listed[at : at + 1] = [slice(None)] * (tile.ndim - len(listed) + 1)
    if any(cut.dim < len(listed) and listed[cut.dim] != slice(None) for cut in tile.cuts):
        refuse(func, "takes part of a dimension that is cut", UNKNOWN)


@computes("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
def make_whole(func: Any, tile: TiledTensor, *args: Any, **named: Any) -> Tensor:
    """Make a tensor that is not tiled, the same on each rank."""
    return func(tile.local, *args, **named)  # type: ignore[no-any-return]


@computes("__repr__", "__format__", "__str__")
def show(func: Any, tile: TiledTensor, *_: Any, **__: Any) -> str:
    """Show a tiled tensor by its shapes."""
    return f"TiledTensor({[*tile.shape]}, of which {[*tile.local.shape]} here)"
