"""Sharded parts whose forward pass differs between ranks: a layer that a draw leaves out, a branch.

torch gathers a block where it is called and adds up its gradients where it is gone back over: ranks
that call different blocks would send each other parts of different weights. Here a block that was
passed over takes part in both as one that does nothing, in the order of those that do.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tonari.trainer.private.autograd import in_backward
from tonari.trainer.private.modules import parameters_of
from tonari.trainer.private.sharding import begin_unused, end_unused, reduce_unused
from tonari.trainer.private.trees import tree_flatten, tree_leaves, tree_map, tree_unflatten

SHARING = ("dp_replicate", "dp_shard", "cp")
"""Axes whose ranks add up the gradients of the same weights."""


def sharing_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """List the groups whose ranks add up gradients, of those that have several."""
    return [mesh.get_group(axis) for axis in SHARING if mesh[axis].size() > 1]


class Unequal:
    """Has each rank send as many messages in each pass, whichever blocks it calls.

    A model that calls all its blocks in their order sends what it would send without this, and one
    flag for each parameter in a step. A parameter that some ranks have not used counts as zeros
    there, as in one process that adds up their gradients; one that none has used has no gradient.

    Args:
        part: Sharded.
        mesh: With the axes of ``tonari.trainer.mesh.mesh.AXES``.
        ends: Whether what the part gives is the model's answer, of which there is a loss.
    """

    def __init__(self, part: FSDPModule, mesh: DeviceMesh, *, ends: bool) -> None:
        assert isinstance(part, nn.Module)
        self._groups = sharing_groups(mesh)
        self._ends = ends
        self._next = 0
        blocks: dict[str, nn.Module] = getattr(part, "blocks", {})
        self._blocks = [block for block in blocks.values() if isinstance(block, FSDPModule)]
        self._trained: list[nn.Parameter] = [
            each for each in part.parameters() if each.requires_grad and isinstance(each, DTensor)
        ]
        self._used: set[int] = set()
        self._marked: dict[int, Tensor] = {}
        numbers = {parameter: number for number, parameter in enumerate(self._trained)}
        self._places = [
            (module, name, numbers[parameter])
            for module in part.modules()
            for name, parameter in parameters_of(module).items()
            if parameter in numbers
        ]
        reduce_unused(part)
        part.register_forward_pre_hook(self._begin)
        part.register_forward_hook(self._end, prepend=True)
        for number, block in enumerate(self._blocks):
            block.register_forward_pre_hook(self._before(number), with_kwargs=True, prepend=True)
            block.register_forward_pre_hook(self._mark)

    def settle(self) -> None:
        """Leave those without a gradient that no rank has used in this step. Collective."""
        used = torch.zeros(len(self._trained))
        used[[*self._used]] = 1
        self._used.clear()
        for group in self._groups:
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        for parameter, is_used in zip(self._trained, used.tolist(), strict=True):
            if not is_used:
                parameter.grad = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, *_: object) -> None:
        self._next = 0
        self._mark()

    def _before(self, number: int) -> Callable[..., Any]:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(_: nn.Module, args: Any, named: Any) -> Any:
            if in_backward():
                return None  # the backward pass computes it again
            first, self._next = self._next, max(self._next, number + 1)
            if first >= number:
                return None
            return self._pass_over(range(first, number), (args, named))

        return cast(Callable[..., Any], before)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, part: nn.Module, _: object, output: Any) -> Any:
        if self._ends and self._trained and not _needs_gradient(output):
            # A rank that has trained nothing goes back over zeros with the others.
            output = _with_gradient(output)
        if self._next < len(self._blocks):
            # Copied: the part itself is the first that the backward pass comes to.
            output = _copied(self._pass_over(range(self._next, len(self._blocks)), output))
        return output

    def _pass_over(self, numbers: range, values: Any) -> Any:
        for number in numbers:
            values = self._pass_over_one(self._blocks[number], values)
        return values

    def _pass_over_one(self, block: nn.Module, values: Any) -> Any:
        """Have torch see a block between values and those who take them."""
        values = begin_unused(block, values)
        # Not in the same memory as what came: torch warns of views.
        values = _copied(values)
        trains = any(parameter.requires_grad for parameter in block.parameters())
        if trains and not _needs_gradient(values):
            values = _with_gradient(values)
        return end_unused(block, values)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _mark(self, *_: object) -> None:
        # Whole weights are other tensors, the same in each step, which are here once gathered.
        if len(self._marked) == len(self._trained) or not torch.is_grad_enabled():
            return
        for module, name, number in self._places:
            whole = parameters_of(module)[name]
            if number not in self._marked and whole is not self._trained[number]:
                assert whole is not None
                self._marked[number] = whole
                whole.register_hook(self._marking(number))
                whole.register_post_accumulate_grad_hook(_make_dense)

    def _marking(self, number: int) -> Callable[[Tensor], None]:
        return lambda _: self._used.add(number)


def _make_dense(whole: Tensor) -> None:
    if whole.grad is not None and whole.grad.is_sparse:
        whole.grad = whole.grad.to_dense()


def _needs_gradient(values: Any) -> bool:
    leaves = tree_leaves(values)
    return any(isinstance(each, Tensor) and each.requires_grad for each in leaves)


def _copied(values: Any) -> Any:
    return tree_map(lambda each: each.clone() if _needs_gradient(each) else each, values)


def _with_gradient(values: Any) -> Any:
    """Have a gradient asked for of the first of the values that can have one."""
    leaves, structure = tree_flatten(values)
    for number, each in enumerate(leaves):
        if torch.is_grad_enabled() and isinstance(each, Tensor) and each.is_floating_point():
            leaves[number] = each + each.new_zeros((), requires_grad=True)
            break
    return tree_unflatten(leaves, structure)
