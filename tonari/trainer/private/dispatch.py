"""Modes that see every operator, and tensors that are not what they seem.

Why: a trace of a step, first weights that are made one by one, and a plain copy of what a module
computes need each operator's arguments and results. `TorchDispatchMode` is documented in torch's
notes on extending it, but is imported from a private module. `DisableTorchFunction` and its
function let a class with ``__torch_function__`` be used as the plain tensor that it is. Public
instead: `torch.overrides.TorchFunctionMode` sees calls of functions, not operators of backward.
"""

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

DisableTorchFunction = torch._C.DisableTorchFunction
disabled_torch_function = torch._C._disabled_torch_function_impl

__all__ = [
    "DisableTorchFunction", "OpOverload", "TorchDispatchMode", "disable_current_modes",
    "disabled_torch_function", "is_traceable_wrapper_subclass",
]  # fmt: skip
