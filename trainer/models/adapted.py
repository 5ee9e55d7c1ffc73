"""Any module as a model of stages: each runs the module's own ``forward``, and a part of it.

Blocks of other stages are passed over. What comes from the stage before takes the place of what the
first own block would get, and the forward pass ends behind the last own block. So a module needs no
other code than its own; it says which of its children are its blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from trainer.errors import ConfigError
from trainer.models.hub import HubFormat, Stored
from trainer.models.plan import check_divides, styles_of
from trainer.models.staged import StagedModel, aliases_of
from trainer.models.trace import (
    NUM_ROWS,
    STEM,
    Inputs,
    Shape,
    Trace,
    call,
    first_tensor,
    leaves,
    pick_logits,
    trace,
)
from trainer.models.unchanged import without_trace

Style = ParallelStyle | str
"""A style of torch's, or the name that Hugging Face's plans have for one."""


class Adapted(StagedModel):
    """A module that was not written for the trainer; trains over dp and FSDP as it is.

    Args:
        module: Takes what the task gives as its input: a tensor, or several by name.
        layers: Where its blocks are, for pp: the path of a list of modules, such as
            ``"transformer.h"``, or several, in the order in which ``forward`` calls them; of a
            ``ModuleList`` or ``Sequential`` each child is a block. By default the module's own
            attribute ``layers_path`` if it has one, else it has none, and pp is refused.
        tp_plan: Path of a layer (``*`` for any one name) -> how tp splits it: a style of torch's,
            or Hugging Face's name for one (``"colwise"``); layers that it does not name are whole.
        divides: Numbers that the tp size has to divide, by name, such as heads.
        output: Takes the logits, floating[batch, ..., classes], from what the module gives.

    Attributes:
        prepare: Turns what the task gives, and the dtype of the computation, into the module's
            inputs; None: they are what the task gives.

    Raises:
        ConfigError: If there is no such layer.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        layers: str | Sequence[str] | None = None,
        tp_plan: Mapping[str, Style] | None = None,
        divides: Mapping[str, int] | None = None,
        output: Callable[[Any], Tensor] = pick_logits,
    ) -> None:
        nn.Module.__init__(self)
        self.wrapped = module
        paths = getattr(module, "layers_path", ()) if layers is None else layers
        self._owners = _find_layers(module, (paths,) if isinstance(paths, str) else tuple(paths))
        self.num_blocks = len(self._owners)
        self.hidden_dtype = None
        self.num_sequence_parts = self.num_hidden_parts = 1
        self.first_names, self.shared_with = {}, {}
        self._output, self._divides = output, dict(divides or {})
        self._plan = styles_of(module, tp_plan or {})
        self.prepare: Callable[[Inputs, torch.dtype], Inputs] | None = None
        self._trace: Trace | None = None
        self._example: Callable[[int], Inputs] | None = None
        self._names: tuple[str, ...] | None = None
        self._own, self._first, self._last = range(self.num_blocks), True, True
        self._received: Tensor | None = None
        # Weights of other stages, each as its module and its name there.
        self._hollow: list[tuple[nn.Module, str]] = []

    def describe_inputs(self, example: Callable[[int], Inputs]) -> None:
        """Say what the module will be called with: rows -> meta tensors; pp asks for it."""
        self._example = example

    @property
    def knows_inputs(self) -> bool:
        """Whether the shapes of the module's inputs are known."""
        return self._example is not None

    @property
    def blocks(self) -> dict[str, nn.Module]:  # type: ignore[override]
        """The blocks that are here, by number."""
        return {str(number): self._block(number) for number in self._own}

    def forward(self, *values: Any) -> Any:
        """Run the stage.

        Args:
            values: The module's inputs, as one value or, in a pipeline, one after the other; on a
                later stage the hidden tensor before them.
        """
        self._received = None if self._first else values[0]
        inputs = self._inputs(values if self._first else values[1:])
        try:
            output = self._output(call(self.wrapped, self._prepared(inputs)))
        except _Reached as reached:
            output = reached.hidden
        finally:
            self._received = None
        output = output.clone() if output._is_view() else output
        if self._last:
            return output
        return (output.contiguous(), *(each.contiguous() for each in leaves(inputs)))

    def keep(self, blocks: range, *, first: bool, last: bool) -> None:
        """Drop the weights of all other stages, in place."""
        if first and last:
            return
        found = self.traced()
        first_names = aliases_of(self.wrapped)
        phases = {*blocks, *([STEM] if first else []), *([self.num_blocks] if last else [])}
        here = {
            name for name, used in found.phases.items() if used & phases or (first > bool(used))
        }
        here |= {name for name, before in first_names.items() if before in here}
        for number in set(range(self.num_blocks)) - set(blocks):
            owner, name = self._owners[number]
            passed_over = _PassedOver(self, found.gives[number], ends=number > max(blocks))
            owner._modules[name] = passed_over
        self._own, self._first, self._last = blocks, first, last
        for path, module in list(self.wrapped.named_modules()):
            self._hollow += _hollow(module, f"{path}." if path else "", here)

    def traced(self) -> Trace:
        """Follow the module's forward pass, once, while it is whole.

        Raises:
            ConfigError: If it has no layers, cannot be cut, or nothing says what its inputs are.
        """
        kind = type(self.wrapped).__name__
        if not self.num_blocks:
            raise ConfigError(
                f"mesh.pp: {kind} names no layers to cut it between; give Adapted(module, "
                'layers="path.of.its.blocks"), or model.layers in the settings, or leave mesh.pp '
                "out"
            )
        if self._example is None:
            raise ConfigError(
                f"mesh.pp: the shapes of {kind}'s inputs are not known; give data.image_size, or "
                "Adapted.describe_inputs for inputs of your own"
            )
        return self._traced()

    def _traced(self) -> Trace:
        assert self._example is not None, "the callers have asked"
        if self._trace is None:
            given = {rows: self._example_of(rows) for rows in NUM_ROWS}
            inputs = given[NUM_ROWS[0]]
            self._names = tuple(inputs) if isinstance(inputs, dict) else None
            example = {rows: self._prepared(each) for rows, each in given.items()}
            blocks = [self._block(number) for number in range(self.num_blocks)]
            with without_trace(self.wrapped, self._output):
                self._trace = trace(self.wrapped, blocks, example, self._output)
        return self._trace

    def _example_of(self, rows: int) -> Inputs:
        assert self._example is not None, "the callers have asked"
        try:
            return self._example(rows)
        except Exception as error:
            raise ConfigError(
                f"the input of {type(self.wrapped).__name__} cannot be taken from a batch of ones, "
                f"which shows its shape: {type(error).__name__}: {error}; let the task's input "
                "take any values, or leave mesh.pp out"
            ) from error

    def data_shape(self, batch_size: int) -> Any:
        """Describe the module's inputs, as meta tensors."""
        assert self._example is not None, "traced() has asked for it"
        return self._example_of(batch_size)

    def logits_shape(self, batch_size: int) -> tuple[int, ...]:
        return self.traced().logits.of(batch_size)

    def hidden_shape_before(self, block: int, batch_size: int) -> tuple[int, ...]:
        return self.traced().before[block].of(batch_size)

    def input_shape(self, batch_size: int) -> Any:
        """Describe what this stage takes, as a tuple of meta tensors."""
        beside = leaves(self.data_shape(batch_size))
        if self._first:
            return beside
        return (self._described(self.traced().before[min(self._own)], batch_size), *beside)

    def output_shape(self, batch_size: int) -> Any:
        """Describe what this stage gives, as meta tensors."""
        if self._last:
            return self._described(self.traced().logits, batch_size)
        beside = leaves(self.data_shape(batch_size))
        return (self._described(self.traced().before[max(self._own) + 1], batch_size), *beside)

    def tp_plan(self, *, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
        kind = type(self.wrapped).__name__
        if sequence_parallel or loss_parallel:
            raise ConfigError(
                f"mesh.sequence_parallel and mesh.loss_parallel are for the trainer's own models, "
                f"expected both false for {kind}; leave them out"
            )
        here = {name for name, module in self.wrapped.named_modules() if has_weights(module)}
        return {f"wrapped.{name}": style for name, style in self._plan.items() if name in here}

    def tp_divides(self) -> Mapping[str, int]:
        return self._divides

    def check_mesh(self, *, num_stages: int = 1, tp: int = 1) -> None:
        """Refuse sizes that this module cannot be divided by.

        Raises:
            ConfigError: Names what does not divide, or why it cannot be cut.
        """
        kind = type(self.wrapped).__name__
        if num_stages > 1:
            self.traced()
        super().check_mesh(num_stages=num_stages, tp=tp)
        if tp > 1 and not self._plan:
            raise ConfigError(
                f"mesh.tp is {tp}, but nothing says how {kind} is split; give Adapted(module, "
                'tp_plan={"path.*.of.a.layer": ColwiseParallel(), ...}), or leave mesh.tp out'
            )
        if tp > 1:
            check_divides(self.wrapped, self._plan, tp)

    def use_context_parallel(self, mesh: DeviceMesh) -> None:
        raise ConfigError(
            f"mesh.cp is {mesh.size()}, expected 1: {type(self.wrapped).__name__} attends to the "
            "whole of a sequence; leave mesh.cp out, and use mesh.tp or mesh.dp_shard"
        )

    def flops_per_row(self) -> int:
        """Count the operations of one sample's forward pass; 0 where they cannot be counted."""
        if self._example is None:
            return 0
        try:
            return self._traced().flops_per_row
        except Exception:
            # A figure of the metrics only; where the module is to be cut, the reason is given.
            return 0

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # To another device or precision: zeros that take no memory are no parameters.
        if self._first and self._last:
            # It may compute in another precision now.
            self._trace = None
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, name in self._hollow:
            before = getattr(module, name)
            zero = torch.zeros((), dtype=before.dtype, device=before.device)
            setattr(module, name, fn(zero).expand(before.shape))
        return applied

    def hub_format(self) -> HubFormat:
        """Name the module's weights in files as the module names them."""
        names = [name for name, _ in [*self.named_parameters(), *self.named_buffers()]]
        return HubFormat(
            tensors={name: Stored(name=name.removeprefix("wrapped.")) for name in names},
            aliases=frozenset(aliases_of(self)),
        )

    def _prepared(self, inputs: Inputs) -> Inputs:
        if self.prepare is None:
            return inputs
        floats = (each.dtype for each in self.wrapped.parameters() if each.is_floating_point())
        return self.prepare(inputs, self.hidden_dtype or next(floats, torch.float32))

    def _inputs(self, values: tuple[Any, ...]) -> Inputs:
        if len(values) == 1 and not isinstance(values[0], Tensor):
            return cast(Inputs, values[0])
        if self._names is not None:
            return dict(zip(self._names, values, strict=True))
        return cast(Inputs, values[0] if len(values) == 1 else values)

    def _described(self, shape: Shape, batch_size: int) -> Tensor:
        floats = self.hidden_dtype or shape.dtype
        return torch.empty(shape.of(batch_size), dtype=floats, device="meta", requires_grad=True)

    def _block(self, number: int) -> nn.Module:
        owner, name = self._owners[number]
        block = owner._modules[name]
        assert block is not None, "found when this was made"
        return block


class _Reached(BaseException):
    """Ends a forward pass behind the last own block; no ``except Exception`` stops it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _PassedOver(nn.Module):
    """Stands where a block of another stage was."""

    def __init__(self, model: Adapted, gives: int, *, ends: bool) -> None:
        super().__init__()
        # Not as a child: it would have all weights again.
        self._model = (model,)
        self._gives, self._ends = gives, ends

    def __getattr__(self, name: str) -> Any:
        """Say why it is not there: the module's ``forward`` looks into its blocks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"this layer is another stage's, so that {name} cannot be looked up in it; let the "
                "module's forward do no more with its layers than call them, or leave mesh.pp out"
            ) from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Give what came from the stage before, or end the pass with what came here."""
        if self._ends:
            hidden = first_tensor(args, kwargs)
            assert hidden is not None, "seen as the module was traced"
            raise _Reached(hidden)
        received = self._model[0]._received
        return (received, *[None] * (self._gives - 1)) if self._gives else received


def _hollow(module: nn.Module, prefix: str, here: set[str]) -> list[tuple[nn.Module, str]]:
    """Replace a module's own weights that another stage has by zeros that take no memory.

    A later stage runs what comes before its blocks too: masks and positions are made there.

    Returns:
        The module and the name of each of them.
    """
    gone = [
        name
        for name, parameter in module._parameters.items()
        if parameter is not None and f"{prefix}{name}" not in here
    ]
    for name in gone:
        parameter = module._parameters.pop(name)
        assert parameter is not None
        # A model without data still computes with these zeros, once it has its own weights.
        device = "cpu" if parameter.is_meta else parameter.device
        zero = torch.zeros((), dtype=parameter.dtype, device=device)
        setattr(module, name, zero.expand(parameter.shape))
    for name, buffer in module._buffers.items():
        if buffer is not None and f"{prefix}{name}" not in here:
            module._non_persistent_buffers_set.add(name)
    if gone:
        # Batch statistics of another stage's layers are not counted here.
        module.training = False
        module.train = lambda mode=True: module  # type: ignore[method-assign]
    return [(module, name) for name in gone]


def has_weights(module: nn.Module) -> bool:
    """Say whether a module has parameters of its own or below it."""
    return next(module.parameters(), None) is not None


def _find_layers(module: nn.Module, paths: tuple[str, ...]) -> list[tuple[nn.Module, str]]:
    """Find each block as its owner and its name there."""
    found: list[tuple[nn.Module, str]] = []
    for path in paths:
        try:
            target = module.get_submodule(path)
        except AttributeError as error:
            names = ", ".join(name for name, child in module.named_modules() if _is_list(child))
            raise ConfigError(
                f"layers: {type(module).__name__} has no module {path!r}; those that hold a list "
                f"are {names or 'none'}"
            ) from error
        if _is_list(target):
            found += [(target, name) for name, _ in target.named_children()]
        else:
            owner, _, name = path.rpartition(".")
            found.append((module.get_submodule(owner), name))
    return found


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))
