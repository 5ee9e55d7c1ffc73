"""What stands where another stage has a tensor: a shape, and nothing to compute with."""

import copy
from typing import Any

import torch
from torch import Tensor

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.fake import written
from tonari.trainer.private.dispatch import disabled_torch_function, make_wrapper
from tonari.trainer.private.trees import tree_leaves, tree_map

aten = torch.ops.aten

OF_A_SHAPE = {
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like,
    aten.randn_like, aten.randint_like, aten.new_zeros, aten.new_ones, aten.new_full,
    aten.new_empty, aten.new_empty_strided,
}  # fmt: skip
"""Operations that take no more of a tensor than its shape, dtype and device."""


class Reach:
    """How far a stage's forward pass has come.

    Attributes:
        is_own: Whether what is computed now is the stage's own: not before its first block, where
            a later stage runs the module's own code for the sake of masks and positions.
    """

    is_own = True


class Absent(Tensor):
    """A tensor of another stage.

    Before a stage's own part an operation on it gives another one, without computing anything. In
    that part, and wherever its values are asked for, it raises: it is never zeros, nor any other
    number.

    Args:
        like: Has its shape and dtype; on ``meta``.
        device: Where it would be.
        what: Which tensor it is, and whose.
        reach: Of the stage.
    """

    what: str
    reach: Reach

    @staticmethod
    def __new__(cls, like: Tensor, *, device: torch.device, what: str, reach: Reach) -> "Absent":
        made: Absent = make_wrapper(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, layout=like.layout,
            device=device, requires_grad=False,
        )  # fmt: skip
        made.what, made.reach = what, reach
        return made

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is: it has no values to show."""
        return f"Absent({self.what}, {list(self.shape)})"

    def __deepcopy__(self, memo: dict[int, object]) -> "Absent":
        """Copy what it says of itself."""
        reach = copy.deepcopy(self.reach, memo)
        return Absent(_meta(self), device=self.device, what=self.what, reach=reach)

    def _values(self, *_: Any, **__: Any) -> Any:
        raise _refusal("a reading of values", self)

    # Those that give values to Python without an operation of torch's.
    tolist = numpy = __array__ = _values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Give the result's shape, or raise."""
        kwargs = dict(kwargs or {})
        if func.overloadpacket in OF_A_SHAPE:
            return func(*tree_map(_any_of_its_shape, args), **tree_map(_any_of_its_shape, kwargs))
        absent = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Absent)]
        first = absent[0]
        if first.reach.is_own:
            raise _refusal(func, first)
        changed = [leaf for leaf in written(func, args, kwargs) if not isinstance(leaf, Absent)]
        if changed:
            raise _refusal(func, first)
        device = first.device
        if kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), torch.device("meta")
        empty = {id(leaf): _meta(leaf) for leaf in _tensors((args, kwargs))}
        back = {id(empty[id(leaf)]): leaf for leaf in absent}

        def without(leaf: Any) -> Any:
            return empty[id(leaf)] if isinstance(leaf, Tensor) else leaf

        def absent_again(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            known = back.get(id(leaf))
            return known if known is not None else Absent(
                leaf, device=device, what=first.what, reach=first.reach
            )  # fmt: skip

        try:
            made = func(*tree_map(without, args), **tree_map(without, kwargs))
        except Exception as error:
            raise _refusal(func, first) from error
        return tree_map(absent_again, made)


def _refusal(func: object, absent: Absent) -> ConfigError:
    return ConfigError(
        f"{func} takes {absent.what}, of which nothing is on this stage of the pipeline, where it "
        "was not used as the module was followed; let the module's forward do the same in each "
        "pass, training and evaluating, or leave mesh.pp out"
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _meta(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _any_of_its_shape(value: Any) -> Any:
    if not isinstance(value, Absent):
        return value
    return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
