"""What any module is given, and what may be taken from what it gives."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from tonari.trainer.errors import ConfigError

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a module's ``forward`` is called with: an argument, several, or some by name."""


def call(module: nn.Module, inputs: Inputs) -> Any:
    """Call a module with what a task took from a batch."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


class OutputError(ConfigError):
    """A module gives what no logits can be taken from."""


def pick_logits(output: Any) -> Tensor:
    """Find the logits in what a module gives: a tensor, a ``logits`` of it, or its first item.

    Raises:
        OutputError: If there are none.
    """
    for found in (output, getattr(output, "logits", None)):
        if isinstance(found, Tensor):
            return found
    if isinstance(output, dict) and isinstance(output.get("logits"), Tensor):
        return cast(Tensor, output["logits"])
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise OutputError(
        f"the model gives {type(output).__name__}, expected a tensor of logits, an object or dict "
        "with one as `logits`, or a tuple whose first item it is; give Adapted(..., output=...) "
        "which takes the logits from it"
    )


def extra_losses(output: Any, logits: Tensor) -> list[Tensor]:
    """Find losses that a module gives beside its logits: tensors of one number with a gradient.

    Args:
        output: What it gives.
        logits: What `pick_logits` took from it.
    """
    if output is logits or logits.numel() == 1:
        return []
    if isinstance(output, Mapping):
        items = list(output.values())
    else:
        items = list(output if isinstance(output, (tuple, list)) else vars(output).values())
    return [
        item
        for item in items
        if isinstance(item, Tensor) and item.numel() == 1 and item.requires_grad
    ]


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Find what a block works on: its first argument that is a tensor."""
    leaves = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next(leaves, None)
