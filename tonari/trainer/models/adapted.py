"""Any module as a model of stages: each runs the module's own ``forward``, and a part of it.

Blocks of other stages are passed over. What comes from the stage before takes the place of what the
first own block would get, and the forward pass ends behind the last own block. So a module needs no
other code than its own; it says which of its children are its blocks.
"""

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.absent import Absent, Reach
from tonari.trainer.models.given import (
    Inputs,
    OutputError,
    call,
    extra_losses,
    first_tensor,
    pick_logits,
)
from tonari.trainer.models.hub import HubFormat, Stored
from tonari.trainer.models.plan import check_divides, styles_of
from tonari.trainer.models.split import check_split
from tonari.trainer.models.staged import StagedModel, aliases_of
from tonari.trainer.models.styles import LocalPart
from tonari.trainer.models.trace import (
    NUM_ROWS,
    STEM,
    Handed,
    Key,
    ModelTrace,
    Shape,
    check_passes,
    counts,
    leaves,
    name_of,
    shape,
    tensors_of,
    trace,
    without_fast_path,
)
from tonari.trainer.models.unchanged import without_trace
from tonari.trainer.private.autograd import is_view
from tonari.trainer.private.modules import (
    apply_plainly,
    buffers_of,
    children_of,
    parameters_of,
    unsaved_buffers_of,
)
from tonari.trainer.private.trees import tree_flatten, tree_leaves, tree_map, tree_unflatten

logger = logging.getLogger(__name__)

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
        self._trace: ModelTrace | None = None
        self._is_checked = False
        self._input_shapes: tuple[Shape, ...] = ()
        self._example: Callable[[int], Inputs] | None = None
        self._names: tuple[str, ...] | None = None
        self._own, self._first, self._last = range(self.num_blocks), True, True
        # Weights of other stages, each as its module and its name there.
        self._extra: list[Tensor] = []
        self._hollow: list[tuple[nn.Module, str]] = []
        self._reach = Reach()
        # What passes by the cuts before and behind this stage, and of a pass what has come and
        # what is to go.
        self._came_of: tuple[Handed, ...] = ()
        self._goes: tuple[Handed, ...] = ()
        self._hidden_key: Key | None = None
        self._came: dict[Key | None, Tensor] = {}
        self._following: _Following | None = None
        self._boundaries: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._num_rows = 0

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
                later stage before them the hidden tensor, and what else passes by the cut.
        """
        self._came = {}
        if not self._first:
            hidden, *values = values  # type: ignore[assignment]
            self._came = {None: hidden, self._hidden_key: hidden}
            for each in self._came_of:
                if self._key(each) not in self._came:
                    self._came[self._key(each)], *values = values  # type: ignore[assignment]
        inputs = self._inputs(tuple(values))
        self._num_rows = self._rows_of(inputs)
        self._reach.is_own = self._first
        if self._boundaries and not self._handles:
            self._watch()
        # Before it is followed, as when its calls were counted.
        prepared = self._prepared(inputs)
        if not (self._first and self._last) and self.traced().changes_inputs:
            # The next stage makes its own change of them, and microbatches are views of one batch.
            prepared = tree_map(Tensor.clone, prepared)
        try:
            with without_fast_path(), self._following or nullcontext():
                given = call(self.wrapped, prepared)
                output = self._output(given)
                if self._output is pick_logits and torch.is_grad_enabled():
                    self._extra = extra_losses(given, output)
        except _Reached as reached:
            output = reached.hidden
        finally:
            kept, self._came = self._came, {}
            self._reach.is_own = True
        if self._last:
            return _sendable(output, None)
        goes = [self._sent(each, kept) for each in self._goes]
        dtype = self._travels(self.traced().before[max(self._own) + 1].dtype)
        beside = (_sendable(each, self._travels(each.dtype)) for each in leaves(inputs))
        return (_sendable(output, dtype), *goes, *beside)

    def take_extra_loss(self) -> Tensor | None:
        """Take the sum of the losses that the last forward pass gave beside its logits, if any."""
        extra, self._extra = self._extra, []
        return sum(each.reshape(()) for each in extra[1:]) + extra[0].reshape(()) if extra else None

    def keep(self, blocks: range, *, first: bool, last: bool) -> None:
        """Drop the weights of all other stages, in place.

        Raises:
            ConfigError: If what the stage would take or give cannot be sent.
        """
        if first and last:
            return
        found = self.traced()
        here = self._names_here(found, blocks, first=first, last=last)
        others = [number for number in range(self.num_blocks) if number not in blocks]
        for number in others:
            ends = number > max(blocks, default=-1)
            self._block(number).forward = _PassedOver(self, number, ends=ends)
        self._own, self._first, self._last = blocks, first, last
        own = {module for number in blocks for module in self._block(number).modules()}
        dropped = {module for number in others for module in self._block(number).modules()} - own
        # What an own block has too is found there alone, as sharding has to find it once.
        twice = {id(each) for module in own for each in parameters_of(module).values()}
        for module in dropped:
            children = children_of(module)
            for name, child in children.items():
                if child in own:
                    children[name] = None
        for path, module in list(self.wrapped.named_modules()):
            changed = frozenset(found.phases) if module in dropped else found.changed
            prefix = f"{path}." if path else ""
            gone = twice if module in dropped else frozenset[int]()
            self._hollow += self._emptied(module, prefix, here, changed, gone)
        if not first:
            self._hidden_key = found.taken[min(blocks)]
            self._came_of = found.crossing(min(blocks))
        if not last:
            cut = max(blocks) + 1
            self._goes = tuple(each for each in found.crossing(cut) if each.key != found.taken[cut])
        both = (*self._came_of, *self._goes)
        if any(each.key.block is None for each in both) or (
            not first and (found.calls.filled_later or found.calls_evaluated.filled_later)
        ):
            self._following = _Following(self, found, both)
        self._boundaries = [self._block(number) for number in blocks]

    def _emptied(
        self, module: nn.Module, prefix: str, here: Container[str], changed: Container[str],
        gone_too: Container[int],
    ) -> list[tuple[nn.Module, str]]:  # fmt: skip
        """Take from a module its own weights, and buffers that change, which other stages have.

        A later stage runs what comes before its blocks too: masks and positions are made there.

        Returns:
            The module and the name of each of them.
        """
        gone = []
        buffers, unsaved = buffers_of(module), unsaved_buffers_of(module)
        for held in (parameters_of(module), buffers):
            for name, value in list(held.items()):
                path = f"{prefix}{name}"
                if value is None or (path in here and id(value) not in gone_too):
                    continue
                if held is buffers and path not in changed:
                    unsaved.add(name)
                    continue
                del held[name]
                unsaved.discard(name)
                # A model without data takes this as what it will be.
                device = torch.device("cpu") if value.is_meta else value.device
                what = f"{path} of {type(self.wrapped).__name__}"
                like = torch.empty_like(value, device="meta")
                if isinstance(value, nn.Parameter):
                    like = like.to(self._travels(value.dtype))
                setattr(module, name, Absent(like, device=device, what=what, reach=self._reach))
                gone.append((module, name))
        return gone

    def _names_here(
        self, found: ModelTrace, blocks: range, *, first: bool, last: bool
    ) -> frozenset[str]:
        phases = {*blocks, *([STEM] if first else []), *([self.num_blocks] if last else [])}
        here = {
            name for name, used in found.phases.items() if used & phases or (first > bool(used))
        }
        first_names = aliases_of(self.wrapped)
        return frozenset(here | {name for name, before in first_names.items() if before in here})

    def traced(self) -> ModelTrace:
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
        found = self._traced()
        if not self._is_checked:
            inputs = self._prepared(self._example_of(NUM_ROWS[1]))
            blocks = [self._block(number) for number in range(self.num_blocks)]
            with without_trace(self.wrapped, self._output):
                found = check_passes(self.wrapped, blocks, inputs, self._output, found)
            self._trace = found
            self._is_checked = True
        return found

    def _traced(self) -> ModelTrace:
        assert self._example is not None, "the callers have asked"
        if self._trace is None:
            given = {rows: self._example_of(rows) for rows in NUM_ROWS}
            inputs = given[NUM_ROWS[0]]
            self._names = tuple(inputs) if isinstance(inputs, dict) else None
            example = {rows: self._prepared(each) for rows, each in given.items()}
            blocks = [self._block(number) for number in range(self.num_blocks)]
            with without_trace(self.wrapped, self._output):
                self._trace = trace(self.wrapped, blocks, example, self._output)
            self._input_shapes = tuple(map(shape, *map(leaves, given.values())))
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
        # Known of a module without layers too, if its inputs are.
        is_whole = self._first and self._last and self._example is not None
        return (self._traced() if is_whole else self.traced()).logits.of(batch_size)

    def hidden_shape_before(self, block: int, batch_size: int) -> tuple[int, ...]:
        return self.traced().before[block].of(batch_size)

    def input_shape(self, batch_size: int) -> Any:
        """Describe what this stage takes, as a tuple of meta tensors."""
        if self._first:
            return leaves(self.data_shape(batch_size))
        came = tuple(each for each in self._came_of if each.key != self._hidden_key)
        return self._described(min(self._own), came, batch_size)

    def output_shape(self, batch_size: int) -> Any:
        """Describe what this stage gives, as meta tensors."""
        if self._last:
            return self._empty(self.traced().logits, batch_size)
        return self._described(max(self._own) + 1, self._goes, batch_size)

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
            found = self.traced()
            makes = any(each.key.block is None for each in found.handed)
            if tp > 1 and (makes or found.calls.filled_later):
                raise ConfigError(
                    f"mesh.tp is {tp} and mesh.pp {num_stages} stages, expected one of them: "
                    f"{kind} hands tensors past its layers that it makes outside of them, which "
                    "are found by the functions that it calls, and tp calls others; let a layer "
                    "make them, or leave mesh.tp or mesh.pp out"
                )
        super().check_mesh(num_stages=num_stages, tp=tp)
        if tp > 1 and not self._plan:
            raise ConfigError(
                f"mesh.tp is {tp}, but nothing says how {kind} is split; give Adapted(module, "
                'tp_plan={"path.*.of.a.layer": ColwiseParallel(), ...}), or leave mesh.tp out'
            )
        if tp > 1:
            check_divides(self.wrapped, self._plan, tp)
            self._check_split()

    def check_replicas(self, *, is_gathered: bool) -> None:
        """Refuse a forward pass that changes weights by its rows, or gathered ones, or goes back.

        Where it cannot be run on tensors without data, nothing is known of it.
        """
        kind = type(self.wrapped).__name__
        try:
            found = self._traced() if self._example is not None else None
        except Exception:
            found = None
        if found is None:
            return
        changed = found.weights_changed if is_gathered else found.weights_changed_by_rows
        if changed:
            raise ConfigError(
                f"{kind}.forward changes {min(changed)} in place, a parameter, "
                "expected only the optimizer to change it: each rank would change it by its own "
                "rows, and of gathered shards the change is lost; change a copy (as by a "
                "parametrization), or leave mesh.dp_replicate and mesh.dp_shard out"
            )
        if is_gathered and found.goes_back and self.num_blocks:
            raise ConfigError(
                f"{kind}.forward takes a gradient by torch.autograd outside of its layers, "
                "expected that to be left to the trainer: the shards gathered for a layer are "
                "gone by then; name no layers (Adapted(module)), or leave mesh.dp_shard out"
            )

    def _check_split(self) -> None:
        if self._example is None:
            return
        inputs = self._prepared(self._example_of(NUM_ROWS[0]))
        try:
            with without_trace(self.wrapped, self._output):
                paths = check_split(self.wrapped, self._plan, inputs)
            self._plan |= dict.fromkeys(paths, LocalPart(gradient=Partial()))
        except ConfigError:
            raise
        except Exception as error:
            # The first step's gradients say it then.
            logger.warning(
                "%s cannot be run on tensors without data, which shows whether its tp plan names "
                "all that it has to: %s: %s",
                type(self.wrapped).__name__, type(error).__name__, error,
            )  # fmt: skip

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
        except OutputError:
            raise
        except Exception:
            # A figure of the metrics only; where the module is to be cut, the reason is given.
            return 0

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # To another device or precision, as what stands for the weights of other stages.
        if self._first and self._last:
            # It may compute in another precision now.
            self._trace, self._is_checked = None, False
        applied = apply_plainly(self, fn, recurse)
        for module, name in self._hollow:
            before = vars(module)[name]
            zero = fn(torch.zeros((), dtype=before.dtype, device=before.device))
            like = torch.empty(before.shape, dtype=zero.dtype, device="meta")
            made = Absent(like, device=zero.device, what=before.what, reach=self._reach)
            setattr(module, name, made)
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

    def _described(self, cut: int, handed: Iterable[Handed], batch_size: int) -> tuple[Tensor, ...]:
        """Describe what passes by a cut: the hidden tensor, others, and the module's inputs."""
        beside = (
            each.new_empty(each.shape, dtype=self._travels(each.dtype))
            for each in leaves(self.data_shape(batch_size))
        )
        others = (
            self._empty(each.shape, batch_size, has_gradient=each.has_gradient) for each in handed
        )
        return (self._empty(self.traced().before[cut], batch_size), *others, *beside)

    def _empty(self, its: Shape, batch_size: int, *, has_gradient: bool = True) -> Tensor:
        dtype = self._travels(its.dtype)
        has_gradient = has_gradient and dtype.is_floating_point
        return torch.empty(
            its.of(batch_size), dtype=dtype, device="meta", requires_grad=has_gradient
        )

    def _travels(self, dtype: torch.dtype) -> torch.dtype:
        """Say in which precision a tensor passes by a cut."""
        return (self.hidden_dtype or dtype) if dtype.is_floating_point else dtype

    def _key(self, handed: Handed) -> Key:
        return handed.key if self.training else handed.evaluated

    def _sent(self, handed: Handed, kept: Mapping[Key | None, Tensor]) -> Tensor:
        if self._key(handed) not in kept:
            raise ConfigError(
                f"{type(self.wrapped).__name__}.forward did not make what it hands past its layers "
                "as it was followed, expected the same in each pass; let it do the same in each "
                "pass, training and evaluating, or leave mesh.pp out"
            )
        return _sendable(kept[self._key(handed)], self._travels(handed.shape.dtype))

    def _rows_of(self, inputs: Inputs) -> int:
        """Count the rows of a pass; asked for where blocks of other stages are passed over."""
        if self._first:
            return 0
        for its, value in zip(self._input_shapes, leaves(inputs), strict=True):
            if (rows := its.rows(tuple(value.shape))) is not None:
                return rows
        return NUM_ROWS[0]

    def absent(self, its: Shape, number: int) -> Absent:
        """Stand in for what a block of another stage gives."""
        value = torch.empty(its.of(self._num_rows), dtype=self._travels(its.dtype), device="meta")
        what = f"what layer {number} of {type(self.wrapped).__name__} gives"
        return Absent(value, device=self._device(), what=what, reach=self._reach)

    def _device(self) -> torch.device:
        hidden = self._came.get(None)
        return torch.device("cpu") if hidden is None else hidden.device

    def _watch(self) -> None:
        """Follow the own blocks' calls: before and behind all other hooks, so as late as now."""
        for number, block in zip(self._own, self._boundaries, strict=True):
            before, after = self._entered, partial(self._left, number)
            self._handles += [
                block.register_forward_pre_hook(before, prepend=True),
                block.register_forward_hook(after),
            ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _entered(self, *_: object) -> None:
        self._reach.is_own = True
        if self._following is not None:
            self._following.is_in_block = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _left(self, number: int, block: nn.Module, args: object, given: Any) -> None:
        if self._following is not None:
            self._following.is_in_block = False
        if self._goes:
            for position, value in enumerate(tree_leaves(given)):
                key = Key(number, 0, position)
                if any(each.key == key for each in self._goes):
                    self._came[key] = value

    def _block(self, number: int) -> nn.Module:
        owner, name = self._owners[number]
        block = children_of(owner)[name]
        assert block is not None, "found when this was made"
        return block


class _Reached(BaseException):
    """Ends a forward pass behind the last own block; no ``except Exception`` stops it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _PassedOver:
    """What a block of another stage does in place of its own ``forward``."""

    def __init__(self, model: Adapted, number: int, *, ends: bool) -> None:
        self._model, self._number, self._ends = model, number, ends

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Give what came from the stage before, or end the pass with what came here."""
        if self._ends:
            hidden = first_tensor(args, kwargs)
            assert hidden is not None, "seen as the module was traced"
            raise _Reached(hidden)
        following = self._model._following
        if following is not None:
            following.is_in_block = True
        try:
            return self._given(tensors_of(args, kwargs))
        finally:
            if following is not None:
                following.is_in_block = False

    def _given(self, taken: list[Tensor]) -> Any:
        model = self._model
        outputs, spec = model.traced().gives[self._number]
        given: list[Tensor | None] = []
        for position, output in enumerate(outputs):
            came = model._came.get(Key(self._number, 0, position))
            if position == 0 and self._number == min(model._own) - 1:
                given.append(model._came[None])
            elif output.position is not None:
                given.append(taken[output.position])
            elif came is None and output.shape is not None:
                given.append(model.absent(output.shape, self._number))
            else:
                given.append(came)
        return tree_unflatten(given, spec)


class _Following(TorchFunctionMode):
    """Follows a stage's forward pass by the functions that it calls outside of its blocks.

    What another stage has made by one of them is put in its place, and what is to be sent is kept.

    Args:
        model: The stage.
        found: How it was followed.
        handed: What is put in its place or kept.
    """

    def __init__(self, model: Adapted, found: ModelTrace, handed: Iterable[Handed]) -> None:
        super().__init__()
        self._model = model
        # In training, and in evaluation.
        self._plans = {
            True: (found.calls, frozenset(each.key for each in handed)),
            False: (found.calls_evaluated, frozenset(each.evaluated for each in handed)),
        }
        self.is_in_block = False

    def __enter__(self) -> "_Following":
        self._calls, self._keys = self._plans[self._model.training]
        self.is_in_block, self._number = False, 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if self.is_in_block:
            return given
        items, spec = tree_flatten(given)
        places = [place for place, item in enumerate(items) if isinstance(item, Tensor)]
        if not counts(tensors_of(args, kwargs or {}), [items[place] for place in places], given):
            return given
        number, names = self._number, self._calls.names
        self._number += 1
        if number >= len(names) or names[number] != name_of(func):
            raise ConfigError(
                f"{type(self._model.wrapped).__name__}.forward calls {name_of(func)} where it "
                f"called {names[number] if number < len(names) else 'nothing'} as it was followed, "
                "expected the same in each pass: it hands tensors past its layers, which are known "
                "by that; let it do the same in each pass, or leave mesh.pp out"
            )
        for position, place in enumerate(places):
            items[place] = self._put(Key(None, number, position), items[place])
        return tree_unflatten(items, spec)

    def _put(self, key: Key, value: Tensor) -> Tensor:
        came, model = self._model._came, self._model
        if key in self._keys:
            return came.setdefault(key, value)
        if key in self._calls.filled_later and not model._reach.is_own:
            what = f"a tensor that {type(model.wrapped).__name__}.forward makes and fills"
            return Absent(value, device=value.device, what=what, reach=model._reach)
        return value


def _sendable(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Make a tensor one that is sent as it lies in memory, and that hooks stay on."""
    if dtype is None:
        return value.clone() if is_view(value) else value
    if value.dtype != dtype:
        value = value.to(dtype)
    value = value.clone() if is_view(value) else value
    return value.contiguous()


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
