"""Compute in bfloat16 by parameters of which no other rank has a part."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tonari.trainer.mesh.hooked import put_hooks
from tonari.trainer.private import foreach
from tonari.trainer.private.autograd import call_after_backward, preserve_versions
from tonari.trainer.private.modules import hooks_of, parameters_of
from tonari.trainer.private.trees import tree_leaves, tree_map


class Half:
    """Puts bfloat16 copies of a part's parameters in their places, between its two passes.

    As torch's `fully_shard` does with a ``MixedPrecisionPolicy`` in one process, to the bit, and
    without the Python that sharding takes for each parameter. Before a forward pass copies take the
    places; floating inputs are cast; after the backward pass, or a forward pass without one, the
    parameters are back, with gradients in their own precision.

    Args:
        part: Whose parameters may still be replaced before the first pass.
    """

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._wholes: list[nn.Parameter] = []
        self._halves: list[nn.Parameter] = []
        self._places: list[tuple[nn.Module, str, int]] = []
        self._is_in = False
        part.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        part.register_forward_hook(self._end, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(
        self, _: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        self._put_back()  # of a pass that nothing went back over
        if not self._halves:
            self._find()
        self._put_in()
        return tree_map(_cast, args), tree_map(_cast, dict(named))

    def _put_in(self) -> None:
        for whole, half in zip(self._wholes, self._halves, strict=True):
            half.untyped_storage().resize_(half.numel() * half.itemsize)
            half.requires_grad_(whole.requires_grad)
        with torch.no_grad():
            # To autograd no change of what it keeps: that memory was freed since
            with preserve_versions(tuple(self._halves)):
                foreach.copy_([*self._halves], [*self._wholes])
        self._put(self._halves)
        self._is_in = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, _: nn.Module, args: Any, result: Any) -> None:
        waits = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not (torch.is_grad_enabled() and waits):
            # After an error somebody may want to see them
            self._put_back(frees=result is not None)
        for leaf in waits:
            leaf.register_hook(self._before_backward)  # type: ignore[no-untyped-call]

    def _before_backward(self, grad: Tensor) -> None:
        if not self._is_in:  # it goes back over an earlier pass than the last one
            self._put_in()
        call_after_backward(self._after_backward)

    def _after_backward(self) -> None:
        pairs = [
            (whole, half.grad)
            for whole, half in zip(self._wholes, self._halves, strict=True)
            if half.grad is not None
        ]
        first = [(whole, grad) for whole, grad in pairs if whole.grad is None]
        more = [(whole.grad, grad) for whole, grad in pairs if whole.grad is not None]
        with torch.no_grad():
            if first:
                made = [torch.empty_like(whole) for whole, _ in first]
                foreach.copy_(made, [grad for _, grad in first])
                for (whole, _), grad in zip(first, made, strict=True):
                    whole.grad = grad
            if more:
                foreach.add_([own for own, _ in more], [grad for _, grad in more])
        self._put_back()

    def _find(self) -> None:
        numbers: dict[nn.Parameter, int] = {}
        for module in self._part.modules():
            for name, parameter in parameters_of(module).items():
                if parameter is not None and parameter.is_floating_point():
                    number = numbers.setdefault(parameter, len(numbers))
                    self._places.append((module, name, number))
        self._wholes = [*numbers]
        self._halves = [
            nn.Parameter(torch.empty_like(whole, dtype=torch.bfloat16)) for whole in self._wholes
        ]
        for whole, half in zip(self._wholes, self._halves, strict=True):
            if hooks := hooks_of(whole):
                put_hooks(hooks, half)

    def _put(self, parameters: list[nn.Parameter]) -> None:
        for module, name, number in self._places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                parameters_of(module)[name] = parameters[number]
            else:  # such as an LSTM's, which keeps a list of them besides
                setattr(module, name, parameters[number])

    def _put_back(self, *, frees: bool = True) -> None:
        if not self._is_in:
            return
        self._is_in = False
        self._put(self._wholes)
        for half in self._halves:
            half.grad = None
            if frees:
                half.untyped_storage().resize_(0)


def _cast(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16)
    return value
