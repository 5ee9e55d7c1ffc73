"""What the forward pass of any module does with its blocks and weights, found without data."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from trainer.errors import ConfigError
from trainer.models.fake import fake_tensors

STEM = -1
"""The phase before the first block; a block's is its number, the head's that of all blocks."""

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a module's ``forward`` is called with: an argument, several, or some by name."""

NUM_ROWS = (2, 3)
"""Of the two forward passes that show which dimension of a tensor counts rows."""


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor for any number of rows.

    Attributes:
        of_two: Its shape for two rows.
        of_three: For three.
        dtype: As the module computes it.
    """

    of_two: tuple[int, ...]
    of_three: tuple[int, ...]
    dtype: torch.dtype

    def of(self, num_rows: int) -> tuple[int, ...]:
        """Say the shape for a number of rows."""
        return tuple(
            two + (three - two) * (num_rows - NUM_ROWS[0])
            for two, three in zip(self.of_two, self.of_three, strict=True)
        )


@dataclass(frozen=True)
class Trace:
    """How a module's forward pass goes through its blocks.

    Attributes:
        phases: Of each parameter and buffer, by its first name: those that use it.
        before: What each block takes, and last what the head takes.
        gives: Items of the tuple that each block gives, of which only the first is used; 0: it
            gives a tensor.
        logits: What the module gives.
        flops_per_row: Operations of one row's forward pass.
    """

    phases: Mapping[str, frozenset[int]]
    before: tuple[Shape, ...]
    gives: tuple[int, ...]
    logits: Shape
    flops_per_row: int


def leaves(inputs: Inputs) -> tuple[Tensor, ...]:
    """List the tensors of a module's inputs, in their order."""
    if isinstance(inputs, Tensor):
        return (inputs,)
    return tuple(inputs.values()) if isinstance(inputs, dict) else tuple(inputs)


def call(module: nn.Module, inputs: Inputs) -> Any:
    """Call a module with what a task took from a batch."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def pick_logits(output: Any) -> Tensor:
    """Find the logits in what a module gives: a tensor, a ``logits`` of it, or its first item."""
    for found in (output, getattr(output, "logits", None)):
        if isinstance(found, Tensor):
            return found
    if isinstance(output, dict) and isinstance(output.get("logits"), Tensor):
        return cast(Tensor, output["logits"])
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ConfigError(
        f"the model gives {type(output).__name__}, expected a tensor of logits, an object or dict "
        "with one as `logits`, or a tuple whose first item it is; give Adapted(..., output=...) "
        "which takes the logits from it"
    )


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Find what a block works on: its first argument that is a tensor."""
    leaves = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next(leaves, None)


def trace(
    module: nn.Module, blocks: Sequence[nn.Module], example: Mapping[int, Inputs],
    output: Any = pick_logits,
) -> Trace:  # fmt: skip
    """Follow two forward passes without data; changes nothing.

    Args:
        module: Whole.
        blocks: Of the module, in the order in which it calls them.
        example: Its inputs, as meta tensors, for each of ``NUM_ROWS``.
        output: Takes the logits from what it gives.

    Raises:
        ConfigError: If it cannot be run so, or cannot be cut between its blocks.
    """
    two, three = (_Pass(module, blocks, example[rows], output) for rows in NUM_ROWS)
    shapes = [
        Shape(tuple(left.shape), tuple(right.shape), left.dtype)
        for left, right in zip(two.taken, three.taken, strict=True)
    ]
    logits = Shape(tuple(two.logits.shape), tuple(three.logits.shape), two.logits.dtype)
    phases = {name: frozenset(found) for name, found in two.phases.items()}
    return Trace(phases, tuple(shapes), tuple(two.gives), logits, three.flops - two.flops)


class _Pass(TorchFunctionMode):
    """One forward pass: which phase uses which weight, and what passes between the blocks."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], inputs: Inputs, output: Any
    ) -> None:
        super().__init__()
        self.phase = STEM
        self.taken: list[Tensor] = []
        self.gives: list[int] = []
        # What blocks give beside their first item, such as attention maps, and the block's number.
        self._beside: dict[int, tuple[Tensor, int]] = {}
        self._given: Tensor | None = None
        self._kind = type(module).__name__
        with fake_tensors():
            held = dict([*module.named_parameters(), *module.named_buffers()])
            weights = {id(value): _empty(value) for value in held.values()}
            self.phases: dict[str, set[int]] = {name: set() for name in held}
            self._names = {id(weights[id(value)]): name for name, value in held.items()}
            counter = FlopCounterMode(display=False)
            with self._followed(blocks), _replaced(module, weights), counter, self:
                called = self._called(module, tree_map(_empty, inputs))
        if blocks and self.phase != len(blocks):
            raise ConfigError(
                f"{self._kind}.forward called {self.phase + 1} of the {len(blocks)} layers named, "
                "expected each once, in their order; name the layers that it calls"
            )
        self.logits = output(called)
        self.flops = int(counter.get_total_flops())

    def _called(self, module: nn.Module, inputs: Inputs) -> Any:
        try:
            with torch.enable_grad():
                return call(module, inputs)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._kind} cannot be run on tensors without data, which shows where to cut "
                f"it: {type(error).__name__}: {error}; let its forward make tensors on its "
                "input's device, register constants as buffers, and not decide by values; or "
                "leave mesh.pp out"
            ) from error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            name = self._names.get(id(leaf))
            if name is not None:
                self.phases[name].add(self.phase)
        given = func(*args, **kwargs)
        beside = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._beside]
        # Its shape, say, is not what it holds.
        if beside and any(isinstance(leaf, Tensor) for leaf in tree_leaves(given)):
            raise ConfigError(
                f"layer {self._beside[id(beside[0])][1]} of {self._kind} gives several tensors, of "
                "which another than the first is used later, expected one: a stage sends one to "
                "the next; leave mesh.pp out"
            )
        return given

    @contextmanager
    def _followed(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        handles = []
        for number, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(self._before(number), with_kwargs=True))
            handles.append(block.register_forward_hook(self._after(number, len(blocks))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, number: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.phase != number - 1:
                raise ConfigError(
                    f"{self._kind}.forward calls layer {number} after "
                    f"{self.phase if self.phase >= 0 else 'none'}, expected each once, in their "
                    "order; name them in that order, or leave mesh.pp out"
                )
            hidden = first_tensor(args, kwargs)
            if hidden is None or (number and hidden is not self._given):
                raise ConfigError(
                    f"layer {number} of {self._kind} takes another tensor than layer "
                    f"{number - 1} gives, expected nothing to be computed between two layers; move "
                    "it into one of them, or leave mesh.pp out"
                )
            others = [
                leaf
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and leaf is not hidden and leaf.requires_grad
            ]
            if others:
                shown = ", ".join(str(list(other.shape)) for other in others)
                raise ConfigError(
                    f"layer {number} of {self._kind} takes {1 + len(others)} tensors that depend "
                    f"on weights (beside the first: {shown}), expected one: a stage sends one to "
                    "the next; leave mesh.pp out"
                )
            self.taken.append(hidden)
            self.phase = number

        return hook

    def _after(self, number: int, num_blocks: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], given: Any) -> None:
            is_tuple = isinstance(given, tuple)
            rest = [leaf for leaf in tree_leaves(given[1:] if is_tuple else ()) if leaf is not None]
            self._given = given[0] if is_tuple else given
            if not all(isinstance(value, Tensor) for value in (self._given, *rest)):
                raise ConfigError(
                    f"layer {number} of {self._kind} gives {type(given).__name__}, expected one "
                    "tensor, or a tuple of tensors of which only the first is used; turn caches "
                    "off, or leave mesh.pp out"
                )
            beside = [value for value in rest if value is not self._given]
            self._beside |= {id(value): (value, number) for value in beside}
            self.gives.append(len(given) if is_tuple else 0)
            if number == num_blocks - 1:
                self.taken.append(self._given)
                self.phase = num_blocks

        return hook


@contextmanager
def _replaced(module: nn.Module, weights: Mapping[int, Tensor]) -> Iterator[None]:
    """Put others in the place of a module's parameters and buffers, by identity, for a while.

    Not torch's functional_call, which leaves them in a module that two others share.
    """
    before: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for child in module.modules():
        for held in (child._parameters, child._buffers):
            for name, value in held.items():
                if value is not None:
                    before.append((held, name, value))  # type: ignore[arg-type]
    try:
        for held, name, value in before:
            held[name] = weights[id(value)]
        yield
    finally:
        for held, name, value in before:
            held[name] = value


def _empty(value: Tensor) -> Tensor:
    found = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    return found.requires_grad_() if value.requires_grad else found
