"""Tensors without data: shapes, dtypes and devices, by which a model is looked at before it runs.

Not meta tensors: libraries know these as tensors without data, and do not ask them for values.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from tonari.trainer.private.dispatch import TorchDispatchMode, schema_of
from tonari.trainer.private.fakes import LOGGER, FakeTensorMode
from tonari.trainer.private.trees import tree_leaves


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None) -> Iterator[FakeTensorMode]:
    """Make tensors without data inside of it, and compute with them and with real ones.

    Tensors of one ``mode`` are not computed with in another; None: a new one.

    What cannot be computed so raises as torch does, without torch's own record of it on stderr:
    callers report it in one message, or go on without.
    """
    level = LOGGER.level
    LOGGER.setLevel(logging.CRITICAL)
    try:
        if mode is None:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, _Products():  # type: ignore[no-untyped-call]
            yield mode
    finally:
        LOGGER.setLevel(level)


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """List the tensors that an operation changes."""
    given = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The shape of a product by groups in any dtype; torch's own knows that of bfloat16 alone.

    Models with experts compute such products, in float32 too, of which CPUs are capable.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            left, right, *rest = args
            shape = _product_shape(left, right, rest[0] if rest else kwargs.get("offs"))
            if shape is not None:
                return left.new_empty(shape)
        return func(*args, **kwargs)


def _product_shape(left: Tensor, right: Tensor, groups: Tensor | None) -> tuple[int, ...] | None:
    match left.shape, right.shape:
        case (num_groups, rows, _), (_, _, columns):
            return num_groups, rows, columns
        case (rows, _), (_, columns) if groups is not None:
            return groups.shape[0], rows, columns
        case ((rows, _), (_, _, columns)) | ((_, rows, _), (_, columns)):
            return rows, columns
    return None


def _product_flops(
    left: tuple[int, ...], right: tuple[int, ...], *args: Any, out_shape: Any, **kwargs: Any
) -> int:
    # Where the right one's columns lie in groups, each row of the left meets those of its own
    groups = left[0] if len(left) == 3 and len(right) == 2 else 1
    return 2 * math.prod(left) * right[-1] // groups


if torch.ops.aten._grouped_mm not in flop_registry:  # torch counts nothing for them
    register_flop_formula(torch.ops.aten._grouped_mm)(_product_flops)
