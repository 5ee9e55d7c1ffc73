"""What modules, weights and operators hold, as it lies there.

Why: weights are replaced, dropped and shared in place, past what a module does as one is set; hooks
go along with weights that are made anew. Public instead: `named_parameters`, `named_buffers` and
``setattr``, which copy, skip and call what the module defines; hooks of a tensor can be added and
removed, not listed. (`Adapted`, and the styles by which layers are split, define an ``_apply``.)
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "apply", "apply_plainly", "buffers_of", "children_of", "has_late_hooks", "hooks_of",
    "parameters_of", "set_buffers", "share_parameters", "steps_plainly", "unsaved_buffers_of",
]  # fmt: skip


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Give a module's own parameters, to be read and changed; none before its constructor ran."""
    parameters: dict[str, Any] = getattr(module, "_parameters", {})
    return parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Give a module's own buffers, to be read and changed."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Give a module's children, to be read and changed."""
    return module._modules


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """Give the names of a module's buffers that belong to no checkpoint, to be changed."""
    return module._non_persistent_buffers_set


def set_buffers(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    """Give a module another dict of buffers."""
    module._buffers = buffers


def share_parameters(module: nn.Module, owner: nn.Module) -> None:
    """Let a module have the parameters that another one has, and will have."""
    module._parameters = owner._parameters


def apply(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change all parameters and buffers, as ``Module.to`` does."""
    module._apply(change)  # type: ignore[no-untyped-call]


def apply_plainly(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool) -> Any:
    """Change them as a module does whose class does not define how."""
    return nn.Module._apply(module, change, recurse)  # type: ignore[no-untyped-call]


def hooks_of(value: Tensor) -> Any:
    """Give the hooks on a tensor's gradient by their numbers, or None; it follows their removal."""
    return value._backward_hooks


def has_late_hooks(value: Tensor) -> bool:
    """Say whether there are hooks that are called once a gradient is added up."""
    return bool(value._post_accumulate_grad_hooks)


def steps_plainly(optimizer: Optimizer) -> bool:
    """Say whether an optimizer calls nothing of the user's before and behind a step."""
    return not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
