"""Modes that see every operator, and tensors that are not what they seem.

Why: a trace of a step, first weights that are made one by one, and a plain copy of what a module
computes need each operator's arguments and results. `TorchDispatchMode` is documented in torch's
notes on extending it, but is imported from a private module. `DisableTorchFunction` and its
function let a class with ``__torch_function__`` be used as the plain tensor that it is, and
`EnableTorchFunction` within it as the class once more. Public
instead: `torch.overrides.TorchFunctionMode` sees calls of functions, not operators of backward.
"""

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

make_wrapper: Any = torch.Tensor._make_wrapper_subclass
"""Make a tensor of a class of ours: a shape, a dtype and a device, without memory."""

DisableTorchFunction = torch._C.DisableTorchFunction
EnableTorchFunction: Any = torch._C._EnableTorchFunction
disabled_torch_function = torch._C._disabled_torch_function_impl

__all__ = [
    "DisableTorchFunction", "EnableTorchFunction", "OpOverload", "TorchDispatchMode",
    "disable_current_modes", "disabled_torch_function", "is_traceable_wrapper_subclass",
    "make_wrapper", "schema_of",
]  # fmt: skip


def schema_of(operator: Any) -> Any:
    """Give an operator's arguments and returns, with those that it writes to."""
    return operator._schema
