"""Where a backward pass is, and what it may not notice.

Why: a recomputed block has to know that it runs inside of a backward pass; copies of gradients are
made once, behind it; what a module changes in place must be seen, and may be no view; parameters
are filled with other numbers between two passes without autograd's complaint about changed values.
Public instead: none (a hook on all parameters fires per parameter, and not for those without a
gradient). What a backward pass keeps is one's own only where no hooks keep it, such as those of
recomputation, which computes again as it is asked.
"""

from collections.abc import Callable

import torch
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions

__all__ = [
    "ABOUT_MEMORY", "call_after_backward", "in_backward", "is_view", "keeps_otherwise",
    "preserve_versions", "version_of",
]  # fmt: skip

ABOUT_MEMORY = (
    torch.Tensor._is_view,
    torch.Tensor._base.__get__,  # type: ignore[union-attr]
    torch.Tensor._version.__get__,  # type: ignore[attr-defined]
)
"""Functions that ask what a tensor is a view of, and whether it was changed in place."""


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(function: Callable[[], None]) -> None:
    """Let a function be called when the backward pass that runs now has ended."""
    Variable._execution_engine.queue_callback(function)


def version_of(tensor: torch.Tensor) -> int:
    """Count how often a tensor was changed in place."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view to autograd."""
    return tensor._is_view()


def keeps_otherwise() -> bool:
    """Whether what is kept for the backward pass goes through hooks here."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
