"""Functions that compute each position by itself, or over dimensions that are not cut; losses."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tonari.trainer.private.trees import tree_leaves, tree_map
from tonari.trainer.tiles.exchange import add_up, fetch
from tonari.trainer.tiles.tensor import (
    UNKNOWN,
    Cut,
    CutDim,
    Merged,
    TiledTensor,
    computes,
    refuse,
    spans,
    whole,
)

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


@computes("linear", "layer_norm", "rms_norm")
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
         "normalize": 2, "narrow": 1, "roll": 2}  # fmt: skip
"""Where each has its dimension among its arguments."""
DEFAULTS = {"chunk": 0, "split": 0, "glu": -1, "normalize": 1}


@computes(*ALONG)
def along(func: Any, tile: TiledTensor, *args: Any, **named: Any) -> Any:
    """Compute along a dimension that is not cut."""
    name, at = func.__name__, ALONG[func.__name__] - 1
    dims = named.get("dim", named.get("dims", args[at] if len(args) > at else DEFAULTS.get(name)))
    check_uncut(func, tile, dims)
    return tree_map(tile.like, func(tile.local, *args, **named))


@computes("flip")
def flip(func: Any, tile: TiledTensor, *args: Any, **named: Any) -> TiledTensor:
    """Turn dimensions around: along one that is cut, a rank gets what lies opposite."""
    dims = named.get("dims", args[0] if len(args) == 1 else args)
    turned, local = (
        {dim % tile.ndim for dim in ([dims] if isinstance(dims, int) else dims)},
        tile.local,
    )
    for cut in tile.spatial(func) if turned & {*tile.cut_dims} else ():
        if cut.dim in turned:
            opposite = [(cut.size - b, cut.size - a) for a, b in spans(cut.starts)]
            local = fetch(local, [tile.needed(cut, opposite)])
    return tile.like(func(local, [*turned]))


def check_uncut(func: Any, tile: TiledTensor, dims: Any) -> None:
    """Refuse what is computed along a dimension that is cut, or along all."""
    listed = [] if dims is None else [dims] if isinstance(dims, int) else [*dims]
    if not listed or {dim % tile.ndim for dim in listed} & {*tile.cut_dims}:
        refuse(func, "goes along a dimension that is cut", UNKNOWN)


@computes("cat", "concat", "concatenate")
def concatenate(func: Any, tensors: Sequence[Any], dim: int = 0) -> TiledTensor:
    """Join along a dimension that is not cut; or put before tokens what each rank has alike."""
    first = next(each for each in tensors if isinstance(each, TiledTensor))
    *others, _ = tensors
    for cut in first.cuts:
        is_along = isinstance(cut, Merged) and dim % first.ndim == cut.dim
        if is_along and not any(isinstance(each, TiledTensor) for each in others):
            before = cut.before + sum(each.shape[dim] for each in others)
            return first.like(func([*others, first.local], dim), [replace(cut, before=before)])
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
    alike, rest = tile.local.tensor_split([tile.cuts[0].before], tile.cuts[0].dim)
    total = add_up(torch.sum(rest, dims, *args, **named), tile.grid)
    if tile.cuts[0].before:
        total = total + torch.sum(alike, dims, *args, **named)
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
        return tile.behind(each)
    total = reduce(torch.sum, tile.behind(each))
    if reduction == "sum":
        return total
    if not is_by_class or aligned.is_floating_point():
        return total / tile.behind(each).numel()
    counted = tile.behind(aligned != named.get("ignore_index", -100))
    return total / reduce(torch.sum, counted)


@computes("flatten", "view", "reshape", "unflatten")
def reshape(func: Any, tile: TiledTensor, *args: Any, **named: Any) -> Tensor:
    """Merge and split dimensions; gather what becomes one row a sample, for a linear layer."""
    given = func(torch.empty(tile.shape, dtype=tile.dtype, device="meta"), *args, **named)
    if (given.shape, given.dtype) == (tile.shape, tile.dtype):
        return tile
    if given.ndim == 2 and given.shape[0] == tile.shape[0]:
        return func(whole(tile), *args, **named)  # type: ignore[no-any-return]
    cuts = None if given.dtype != tile.dtype else follow(tile, given.shape)
    if cuts is None:
        refuse(func, f"makes {[*given.shape]} of {[*tile.shape]}", UNKNOWN)
    shape = [*given.shape]
    for cut in cuts:
        shape[cut.dim] = cut.num_here(tile.grid)
    return tile.like(tile.local.reshape(shape), cuts)


def follow(tile: TiledTensor, shape: Sequence[int]) -> list[Cut] | None:
    """Say how a tensor is cut in another shape; None: a cut dimension is torn, or one of two."""
    held: list[tuple[int, Cut | None]] = []
    for dim, size in enumerate(tile.shape):
        cut = next((cut for cut in tile.cuts if cut.dim == dim), None)
        if isinstance(cut, Merged) and not cut.before:
            inner: dict[int, Cut] = {each.dim: each for each in cut.cuts}
            held += [(size, inner.get(number)) for number, size in enumerate(cut.sizes)]
        else:
            held.append((size, cut))
    held = [each for each in held if each[0] != 1]
    dims = [dim for dim, size in enumerate(shape) if size != 1]
    cuts = list[Cut]()
    while dims:
        # The fewest dimensions of both that have as many positions
        old, new = [held.pop(0)], [dims.pop(0)]
        while left := math.prod(size for size, _ in old) - math.prod(shape[dim] for dim in new):
            old, new = (old, [*new, dims.pop(0)]) if left > 0 else ([*old, held.pop(0)], new)
        inside = [replace(cut, dim=at) for at, (_, cut) in enumerate(old) if cut is not None]
        if len(old) == 1 and len(new) == 1:
            cuts += [replace(cut, dim=new[0]) for cut in inside]
        elif inside:
            merged = [cut for cut in inside if isinstance(cut, CutDim)]
            if len(new) > 1 or len(merged) < sum(len(cut.apart) for cut in tile.cuts):
                return None
            cuts.append(Merged(new[0], tuple(size for size, _ in old), tuple(merged)))
    return sorted(cuts, key=lambda cut: cut.apart[0].axis)


@computes("permute", "transpose", "squeeze", "unsqueeze", "movedim", "select")
def rearrange(func: Any, tile: TiledTensor, *args: Any, **named: Any) -> TiledTensor:
    """Move dimensions, take some of one that is not cut, and follow where the cut ones go."""
    if func.__name__ == "select":
        check_uncut(func, tile, named.get("dim", *args[:1]))
    # Sizes by which the dimensions are found again.
    sizes = [*tile.local.shape]
    for number, cut in enumerate(tile.cuts):
        sizes[cut.dim] = max(sizes) + number + 2
    given = [*func(torch.empty(sizes, device="meta"), *args, **named).shape]
    cuts = [replace(cut, dim=given.index(sizes[cut.dim])) for cut in tile.cuts]
    return tile.like(func(tile.local, *args, **named), cuts)


@computes("unbind")
def unbind(func: Any, tile: TiledTensor, dim: int = 0) -> tuple[TiledTensor, ...]:
    """Part what is not cut."""
    return tuple(rearrange(torch.select, tile, dim, at) for at in range(tile.shape[dim]))


@computes("__getitem__")
def take(func: Any, tile: TiledTensor, index: Any) -> Tensor:
    """Take all of a dimension that is cut; or of tokens what each rank has alike, or all others."""
    listed = [*index] if isinstance(index, tuple) else [index]
    if not all(each is ... or isinstance(each, int | slice) for each in listed) or isinstance(
        index, bool
    ):
        refuse(func, "takes positions that depend on values", UNKNOWN)
    if ... in listed:
        at = listed.index(...)
        listed[at : at + 1] = [slice(None)] * (tile.ndim - len(listed) + 1)
    for cut in tile.cuts:
        if cut.dim < len(listed) and listed[cut.dim] != slice(None):
            # Their numbers from the first one on
            taken = range(cut.size)[listed[cut.dim]]
            if isinstance(taken, int) and taken < cut.before:
                listed[cut.dim] = taken
                return func(tile.local, tuple(listed))  # type: ignore[no-any-return]
            if not isinstance(cut, Merged) or taken != range(cut.before, cut.size):
                refuse(func, "takes part of a dimension that is cut", UNKNOWN)
            own = tile.local.narrow(cut.dim, cut.before, cut.num_here(tile.grid) - cut.before)
            tile, listed[cut.dim] = tile.like(own, [replace(cut, before=0)]), slice(None)
    return rearrange(func, tile, tuple(listed))


@computes("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
def make_whole(func: Any, tile: TiledTensor, *args: Any, **named: Any) -> Tensor:
    """Make a tensor that is not tiled, the same on each rank."""
    return func(tile.local, *args, **named)  # type: ignore[no-any-return]


@computes("__repr__", "__format__", "__str__")
def show(func: Any, tile: TiledTensor, *_: Any, **__: Any) -> str:
    """Show a tiled tensor by its shapes."""
    return f"TiledTensor({[*tile.shape]}, of which {[*tile.local.shape]} here)"
