"""Attention: each rank has the queries of its tile, and gets the keys and values of all tiles."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tonari.trainer.private.autograd import keeps_otherwise, version_of
from tonari.trainer.private.dispatch import EnableTorchFunction
from tonari.trainer.private.storages import storage_id
from tonari.trainer.tiles.positions import over_last
from tonari.trainer.tiles.tensor import UNKNOWN, TiledTensor, computes, refuse, whole


def check_places(func: Any, *tensors: Any, dims: tuple[int, ...] = (-2,)) -> None:
    """Refuse tensors that are cut along others than one of these dimensions, counted from last."""
    for each in tensors:
        cut = {dim - each.ndim for dim in getattr(each, "cut_dims", ())}
        if len(cut) > 1 or not cut <= {*dims}:
            refuse(func, "takes [..., places, features], of which the places are cut", UNKNOWN)


@computes("matmul", "__matmul__", "bmm")
def multiply(func: Any, left: Any, right: Any) -> TiledTensor:
    """Multiply the rows of a tile by a weight, or by all that is on the right: it is gathered."""
    if not isinstance(right, TiledTensor) and right.ndim == 2:
        return over_last(func, left, right)
    if not isinstance(left, TiledTensor):
        refuse(func, "has the tile on its right", UNKNOWN)
    check_places(func, left)
    check_places(func, right, dims=(-2, -1))
    gathered = whole(right)
    return left.behind(_kept_local(func(left.local, gathered), [left.local], (right, gathered)))


@computes("scaled_dot_product_attention")
def attend(
    func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **named: Any,
) -> Tensor:  # fmt: skip
    """Look at all places, from those of this rank's tile."""
    check_places(func, query, key, value)
    if is_causal:
        refuse(func, "goes by the order of tokens", "leave is_causal out, or give a mask")
    if not isinstance(query, TiledTensor):
        return func(query, whole(key), whole(value), whole(attn_mask), dropout_p, **named)  # type: ignore[no-any-return]
    if dropout_p == 0:
        mask, keys, values = query.aligned(attn_mask), whole(key), whole(value)
        given = func(query.local, keys, values, mask, **named)
        inputs = [query.local] if mask is None else [query.local, mask]
        return query.behind(_kept_local(given, inputs, (key, keys), (value, values)))
    if named.pop("enable_gqa", False):
        refuse(func, "has dropout and enable_gqa", "give it as many keys and values as queries")
    with EnableTorchFunction():
        return _weigh(query, key, attn_mask, dropout_p, **named) @ value


def _kept_local(given: Tensor, inputs: Sequence[Any], *gathered: tuple[Any, Tensor]) -> Tensor:
    """Have the backward pass gather again what it would keep of all tiles; it keeps this one's.

    Not where hooks keep it: what recomputation makes is there for one block at a time.
    """
    tiles = {
        storage_id(of_all.untyped_storage()): tile.like(tile.local.detach())
        for tile, of_all in gathered
        if isinstance(tile, TiledTensor) and of_all.data_ptr() != tile.local.data_ptr()
    }
    nodes = [given.grad_fn] if tiles and not keeps_otherwise() else []
    before = {each.grad_fn for each in [*inputs, *(of_all for _, of_all in gathered)]}
    while nodes:
        if (node := nodes.pop()) is None or node in before:
            continue
        nodes += [other for other, _ in node.next_functions]
        for name in [each for each in dir(node) if each.startswith("_raw_saved_")]:
            kept = getattr(node, name.replace("_raw", "", 1))
            if isinstance(kept, Tensor) and storage_id(kept.untyped_storage()) in tiles:
                tile = tiles[storage_id(kept.untyped_storage())]
                getattr(node, name).register_hooks(partial(_let_go, tile), _gather_again)
    return given


def _let_go(tile: TiledTensor, kept: Tensor) -> tuple[Any, ...]:
    return tile, version_of(tile.local), kept.shape, kept.stride(), kept.storage_offset()


def _gather_again(let_go: tuple[Any, ...]) -> Tensor:
    tile, version, *view = let_go
    if version_of(tile.local) != version:
        raise RuntimeError(
            "tiles: keys or values were changed in place behind an attention that needs them for "
            "its backward pass; change a copy of them"
        )
    with torch.no_grad():
        return whole(tile).as_strided(*view)  # type: ignore[no-any-return]


@computes("multi_head_attention_forward")
def multi_head(func: Any, *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
    """Attend as `torch.nn.MultiheadAttention` does, without masks."""
    bound = inspect.signature(func).bind(*args, **named)
    bound.apply_defaults()
    given, heads = bound.arguments, bound.arguments["num_heads"]
    others = ("bias_k", "bias_v", "add_zero_attn", "key_padding_mask", "attn_mask", "static_k",
              "static_v")  # fmt: skip
    found = [name for name in others if given[name] is not None and given[name] is not False]
    if found or given["query"].ndim != 3:
        why = f"has {', '.join(found) or 'no dimension of a batch'}"
        refuse(func, why, "leave it out, or use scaled_dot_product_attention")
    weights, biases = [given[f"{name}_proj_weight"] for name in "qkv"], [None] * 3
    if not given["use_separate_proj_weight"]:
        weights = given["in_proj_weight"].chunk(3)
    if given["in_proj_bias"] is not None:
        biases = given["in_proj_bias"].chunk(3)
    p = given["dropout_p"] if given["training"] else 0.0
    with EnableTorchFunction():
        # 3 x floating[batch, heads, places, head_width]
        query, key, value = (
            torch.unflatten(F.linear(given[name], *each), -1, (heads, -1)).permute(1, 2, 0, 3)
            for name, *each in zip(("query", "key", "value"), weights, biases, strict=True)
        )
        looks = _weigh(query, key, None, p) if given["need_weights"] else None
        if looks is None:
            looked = F.scaled_dot_product_attention(query, key, value, dropout_p=p)
        else:
            looked = looks @ value
            looks = looks.mean(1) if given["average_attn_weights"] else looks
        looked = looked.permute(2, 0, 1, 3).flatten(2)
        return F.linear(looked, given["out_proj_weight"], given["out_proj_bias"]), looks


def _weigh(
    query: Tensor, key: Tensor, mask: Tensor | None, p: float, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute floating[..., places, all places]: how much a query takes of each value."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return F.dropout(scores.softmax(-1), p)
