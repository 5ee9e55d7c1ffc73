"""What the forward pass of any module does with its blocks and weights, found without data."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from tonari.trainer.errors import ConfigError
from tonari.trainer.models.fake import fake_tensors
from tonari.trainer.models.given import Inputs, call, first_tensor, pick_logits
from tonari.trainer.models.provenance import Moment, Provenance
from tonari.trainer.models.staged import copied
from tonari.trainer.private.fakes import unset_fake_temporarily
from tonari.trainer.private.trees import TreeSpec, tree_flatten, tree_leaves, tree_map

STEM = -1
"""The phase before the first block; a block's is its number, the head's that of all blocks."""

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

    def rows(self, shape: tuple[int, ...]) -> int | None:
        """Say how many rows a tensor of that shape has; None where its shape does not say it."""
        for size, two, three in zip(shape, self.of_two, self.of_three, strict=True):
            if two != three:
                return NUM_ROWS[0] + (size - two) // (three - two)
        return None


@dataclass(frozen=True)
class Key:
    """Which tensor of a forward pass.

    Attributes:
        block: Whose output it is; None: of a call of a function outside of the blocks.
        call: The number of that call.
        position: Among the items that the block gives, or the tensors that the function gives.
    """

    block: int | None
    call: int
    position: int


@dataclass(frozen=True)
class Handed:
    """A tensor that stages beside those that make it use, and cannot make of the inputs.

    Attributes:
        key: Which.
        made: The phase that makes it.
        used: The last that uses it.
        shape: Of it.
        has_gradient: Whether a gradient goes back through it.
        evaluated: Which it is in an evaluation.
    """

    key: Key
    made: int
    used: int
    shape: Shape
    has_gradient: bool
    evaluated: Key

    def crosses(self, cut: int) -> bool:
        """Say whether it passes by a cut before that block."""
        return self.made < cut <= self.used


@dataclass(frozen=True)
class Refusal:
    """Why a module cannot be cut between two phases.

    Attributes:
        made: The earlier phase.
        used: The later one.
        why: In words.
    """

    made: int
    used: int
    why: str

    def holds(self, cut: int) -> bool:
        """Say whether it holds for a cut before that block."""
        return self.made < cut <= self.used


@dataclass(frozen=True)
class Output:
    """One item of what a block gives; None where both are None.

    Attributes:
        shape: Of a tensor that the block makes.
        position: Of the block's argument that it is, among the tensors that it takes.
    """

    shape: Shape | None = None
    position: int | None = None


@dataclass(frozen=True)
class Calls:
    """The functions that a forward pass calls outside of its blocks.

    Attributes:
        names: Of them, in their order.
        filled_later: Those that make a tensor which is later filled with what another stage has.
    """

    names: tuple[str, ...]
    filled_later: frozenset[Key]


@dataclass(frozen=True)
class ModelTrace:
    """How a module's forward pass goes through its blocks.

    Attributes:
        phases: Of each parameter and buffer, by its first name: those that use it.
        changed: Buffers that it changes.
        before: What each block takes, and last what the head takes.
        taken: Which that is.
        gives: What each block gives: its items, and how they are put together.
        logits: What the module gives.
        flops_per_row: Operations of one row's forward pass.
        handed: What passes by blocks.
        refusals: Why it cannot be cut where.
        calls: Outside of the blocks.
        calls_evaluated: The same in an evaluation.
        weights_changed: Parameters that it changes in place.
        weights_changed_by_rows: Those of them that it changes by its inputs, or by what it draws.
        changes_inputs: Whether it changes its inputs in place, in training or evaluating.
        goes_back: Whether it takes gradients itself, outside of its blocks.
    """

    phases: Mapping[str, frozenset[int]]
    changed: frozenset[str]
    before: tuple[Shape, ...]
    taken: tuple[Key | None, ...]
    gives: tuple[tuple[tuple[Output, ...], TreeSpec], ...]
    logits: Shape
    flops_per_row: int
    handed: tuple[Handed, ...]
    refusals: tuple[Refusal, ...]
    calls: Calls
    calls_evaluated: Calls
    weights_changed: frozenset[str]
    weights_changed_by_rows: frozenset[str]
    changes_inputs: bool
    goes_back: bool

    def __deepcopy__(self, memo: dict[int, object]) -> "ModelTrace":
        """Stay one: nothing changes it."""
        return self

    def crossing(self, cut: int) -> tuple[Handed, ...]:
        """List what passes by a cut before that block; what the block takes may be among it.

        Raises:
            ConfigError: If the module cannot be cut there.
        """
        for refusal in self.refusals:
            if refusal.holds(cut):
                raise ConfigError(refusal.why)
        return tuple(each for each in self.handed if each.crosses(cut))


def shape(left: Tensor, right: Tensor) -> Shape:
    """Describe a tensor by what it is for each of ``NUM_ROWS``."""
    return Shape(tuple(left.shape), tuple(right.shape), left.dtype)


def leaves(inputs: Inputs) -> tuple[Tensor, ...]:
    """List the tensors of a module's inputs, in their order."""
    if isinstance(inputs, Tensor):
        return (inputs,)
    return tuple(inputs.values()) if isinstance(inputs, dict) else tuple(inputs)


def trace(
    module: nn.Module, blocks: Sequence[nn.Module], example: Mapping[int, Inputs],
    output: Any = pick_logits,
) -> ModelTrace:  # fmt: skip
    """Follow forward passes of copies without data; changes nothing.

    Args:
        module: Whole.
        blocks: Of the module, in the order in which it calls them.
        example: Its inputs, as meta tensors, for each of ``NUM_ROWS``.
        output: Takes the logits from what it gives.

    Raises:
        ConfigError: If it cannot be run so, or cannot be cut between its blocks.
    """
    two = _Pass(module, blocks, output)
    two.follow(example[NUM_ROWS[0]])
    three = _Pass(module, blocks, output, changed=two.changed)
    three.follow(example[NUM_ROWS[1]])

    gives = []
    for (ones, spec), (others, _) in zip(two.gives, three.gives, strict=True):
        items = tuple(
            Output(shape(one, other))
            if isinstance(one, Tensor) and isinstance(other, Tensor)
            else Output(position=None if isinstance(one, Tensor) else one)
            for one, other in zip(ones, others, strict=True)
        )
        gives.append((items, spec))
    handed, refusals = [], [*three.refusals()]
    for key, (made, used, value) in three.handed().items():
        if key in two.objects:
            its = shape(two.objects[key], value)
            gradient = value.requires_grad and value.is_floating_point()
            handed.append(Handed(key, made, used, its, gradient, key))
        else:
            refusals.append(Refusal(made, used, _unlike(type(module).__name__)))
    refusals += three.stopped_gradients()
    return ModelTrace(
        phases={name: frozenset(found) for name, found in three.phases.items()},
        changed=three.changed,
        before=tuple(map(shape, two.taken, three.taken)),
        taken=tuple(three.taken_keys),
        gives=tuple(gives),
        logits=shape(two.logits, three.logits),
        flops_per_row=three.flops - two.flops,
        handed=tuple(sorted(handed, key=lambda each: _order(each.key))),
        refusals=tuple(refusals),
        calls=three.calls(),
        calls_evaluated=three.calls(),
        weights_changed=two.weights_changed,
        weights_changed_by_rows=two.weights_changed_by_rows | three.weights_changed_by_rows,
        changes_inputs=three.changes_inputs,
        goes_back=three.goes_back,
    )


def check_passes(
    module: nn.Module, blocks: Sequence[nn.Module], inputs: Inputs, output: Any, found: ModelTrace
) -> ModelTrace:
    """Follow a second pass of a module, and an evaluation, which may do other things than a first.

    Args:
        module: As `trace` takes it, as the others.
        blocks: Of the module.
        inputs: Of the larger number of rows.
        output: Takes the logits.
        found: Of a first pass.

    Returns:
        What was found, with what may not be cut for the sake of these.
    """
    again = _Pass(module, blocks, output, changed=found.changed)
    again.follow(inputs)
    again.follow(inputs)
    judged = _Pass(module, blocks, output, changed=found.changed, evaluates=True)
    judged.follow(inputs)
    refusals = [*found.refusals, *again.refusals(), *judged.refusals()]
    unlike = _unlike(type(module).__name__)
    ones = {each.key: (each.made, each.used) for each in found.handed}
    others = {key: its[:2] for key, its in again.handed().items()}
    by_call = any(key.block is None for key in ones) or bool(found.calls.filled_later)
    if ones != others or (by_call and again.calls() != found.calls):
        refusals += [Refusal(*its, unlike) for its in (ones | others).values()]
        if found.calls.filled_later:
            refusals.append(Refusal(STEM, len(blocks), unlike))
    evaluated = sorted(judged.handed().items(), key=lambda each: _order(each[0]))
    keys = [key for key, _ in evaluated]
    like = [(made, used, tuple(value.shape)) for _, (made, used, value) in evaluated]
    if like != [(each.made, each.used, each.shape.of_three) for each in found.handed]:
        keys = [each.key for each in found.handed]
        refusals += [Refusal(*its[:2], unlike) for its in like]
        refusals += [Refusal(each.made, each.used, unlike) for each in found.handed]
    handed = [replace(each, evaluated=key) for each, key in zip(found.handed, keys, strict=True)]
    return replace(
        found, refusals=tuple(refusals), handed=tuple(handed), calls_evaluated=judged.calls(),
        changes_inputs=found.changes_inputs or judged.changes_inputs,
    )  # fmt: skip


def _unlike(kind: str) -> str:
    return (
        f"{kind}.forward hands other tensors past its layers in a second pass, in evaluation or "
        "for another number of rows than in a first pass, expected the same in each: a pipeline "
        "sends the same tensors in every step; make them in one way, or leave mesh.pp out"
    )


def _order(key: Key) -> tuple[int, int, int]:
    return (STEM if key.block is None else key.block, key.call, key.position)


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Have torch's layers of transformers compute in evaluation as they do in training.

    Else they pass other tensors from one to the next then, for the sake of padding.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def copy_without_data(module: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """Copy a module, whose weights become tensors without data; list these by their first names.

    Raises:
        ConfigError: If it cannot be copied.
    """
    held = dict([*module.named_parameters(), *module.named_buffers()])
    weights = {id(value): _empty(value) for value in held.values()}
    kind = type(module).__name__
    try:
        with unset_fake_temporarily():
            copy_of = copied(module, weights)
    except Exception as error:
        raise ConfigError(
            f"{kind} cannot be copied, and it is a copy that is followed to see how it can be "
            f"spread: {type(error).__name__}: {error}; let the module keep nothing that "
            "copy.deepcopy refuses, or leave mesh.pp and mesh.tp out"
        ) from error
    return copy_of, {name: weights[id(value)] for name, value in held.items()}


class _Pass(TorchFunctionMode):
    """Forward passes of a copy: which phase uses which weight, and what passes by the blocks.

    Args:
        module: Whole; copied.
        blocks: Of it.
        output: Takes the logits.
        changed: Buffers that are known to be changed by a pass.
        evaluates: Whether to evaluate.
    """

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], output: Any, *,
        changed: frozenset[str] = frozenset(), evaluates: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._kind, self._output = type(module).__name__, output
        self._changed_before = changed
        with fake_tensors() as self._mode:
            self._module, self._held = copy_without_data(module)
        own = dict(zip(module.modules(), self._module.modules(), strict=True))
        self._evaluates = evaluates
        self._blocks = [own[block] for block in blocks]
        if evaluates:
            self._module.eval()
        self._names = {id(value): name for name, value in self._held.items()}
        self._is_weight = {name for name, _ in module.named_parameters()}
        self.phases: dict[str, set[int]] = {name: set() for name in self._held}
        self.now = Moment(STEM)
        self._memory = Provenance(self.now)
        # Of each tensor, where it comes from: the key of what may be sent, else None; its phase.
        self._origins: dict[int, tuple[Key | None, int]] = {}
        self._had_gradient: dict[int, bool] = {}
        self._kept: list[Any] = []
        self.objects: dict[Key, Tensor] = {}
        self._uses: dict[Key, tuple[int, int]] = {}
        self._refusals: list[Refusal] = []
        self.changes_inputs = self.goes_back = False

    def follow(self, inputs: Inputs) -> None:
        """Make a pass; a further one goes on with what the module has kept of the one before.

        Raises:
            ConfigError: If it cannot be run so, or its layers are called in another way.
        """
        self._begin()
        counter = FlopCounterMode(display=False)
        # By module it would call functions of its own, which would be followed as the module's.
        counter.mod_tracker = _NoTracker()
        with self._fake(), counter:
            roots = self._is_weight | self._changed_before
            self._memory.root(self._held[name] for name in roots)
            given = tree_map(_empty, inputs)
            changed = [self._held[name] for name in self._changed_before]
            self._memory.root_rows([*leaves(given), *changed])
            grad = torch.set_grad_enabled(not self._evaluates)
            with grad, without_fast_path(), self._followed(), self._memory, self:
                called = self._called(given)
            self.changes_inputs = any(self._memory.memory(its).changes for its in leaves(given))
        if self._blocks and self.now.phase != len(self._blocks):
            raise ConfigError(
                f"{self._kind}.forward called {self.now.phase + 1} of the {len(self._blocks)} "
                "layers named, expected each once, in their order; name the layers that it calls"
            )
        self.logits = self._output(called)
        # Logits may come out of an object that torch does not look into.
        self._given_back = [*tensors_of((called,), {}), self.logits]
        self.flops = int(counter.get_total_flops())

    @contextmanager
    def _fake(self) -> Iterator[None]:
        with fake_tensors(self._mode):
            yield

    def _begin(self) -> None:
        self.now.phase, self.now.block, self.now.call = STEM, False, 0
        self.taken: list[Tensor] = []
        self.taken_keys: list[Key | None] = []
        self.gives: list[tuple[list[Tensor | int | None], TreeSpec]] = []
        self._given: Tensor | None = None
        self._names_called: list[str] = []
        # What an earlier pass made is no result of this one's calls.
        self._origins = {name: (None, phase) for name, (_, phase) in self._origins.items()}
        self.objects, self._uses = {}, {}

    @property
    def changed(self) -> frozenset[str]:
        """The buffers that the pass has changed."""
        return self._changes - self._is_weight

    @property
    def weights_changed(self) -> frozenset[str]:
        """The parameters that the pass has changed."""
        return self._changes & self._is_weight

    @property
    def weights_changed_by_rows(self) -> frozenset[str]:
        """Those of them that other rows, or other draws, change otherwise."""
        changed = self.weights_changed
        return frozenset(n for n in changed if self._memory.memory(self._held[n]).of_rows)

    @property
    def _changes(self) -> frozenset[str]:
        held = self._held.items()
        return frozenset(name for name, value in held if self._memory.memory(value).changes)

    def handed(self) -> dict[Key, tuple[int, int, Tensor]]:
        """List what is made in one phase, used in a later one, and follows from no input alone.

        But for what each block takes, where nobody else uses it.
        """
        return {
            key: (made, used, self.objects[key])
            for key, (made, used) in self._uses.items()
            if self._memory.memory(self.objects[key]).follows
            and any(self.taken_keys[cut] != key for cut in range(made + 1, used + 1))
        }

    def calls(self) -> Calls:
        """List the functions called outside of the blocks."""
        filled = frozenset(
            key
            for key, value in self.objects.items()
            if key.block is None and any(
                change.call > key.call and not change.block
                for change in self._memory.memory(value).changes
            ) and self._memory.memory(value).follows
        )  # fmt: skip
        return Calls(tuple(self._names_called), filled)

    def stopped_gradients(self) -> list[Refusal]:
        """Refuse cuts by which no gradient goes back, of a tensor that was computed with one.

        A stage would get zeros for it, where one process has no gradient at all: weights decay.
        """
        ahead = [each.grad_fn for each in self._given_back if each.grad_fn is not None]
        reached = set(ahead)
        while ahead:
            for node, _ in ahead.pop().next_functions:
                if node is not None and node not in reached:
                    reached.add(node)
                    ahead.append(node)
        return [
            Refusal(
                cut - 1, cut,
                f"{self._kind}.forward stops the gradient in {_place(cut)}, expected that one goes "
                "back from each layer to those before it: weights of earlier stages would get "
                "zeros in place of no gradient; cut it elsewhere, or leave mesh.pp out",
            )
            for cut, hidden in enumerate(self.taken[: len(self._blocks)])
            if hidden.grad_fn is not None and hidden.grad_fn not in reached
        ]  # fmt: skip

    def refusals(self) -> list[Refusal]:
        """Say where the module cannot be cut."""
        found = [*self._refusals]
        for key, (made, used, value) in self.handed().items():
            memory = self._memory.memory(value)
            later = [
                change.phase
                for change in memory.changes
                if not change.block and (change.phase, change.call) > (made, key.call)
            ]
            if later:
                found.append(
                    Refusal(
                        made, used,
                        f"{self._kind}.forward changes a tensor {list(value.shape)} in place "
                        f"after {_place(made)} has made it and uses it in {_place(used)}, "
                        "expected it to stay as it was made: a stage sends it as it is; change a "
                        "copy, or leave mesh.pp out",
                    )
                )  # fmt: skip
        for name in self.changed | self._changed_before:
            used_in = self.phases[name]
            if len(used_in) > 1:
                found.append(
                    Refusal(
                        min(used_in), max(used_in),
                        f"{name} of {self._kind} changes in each pass and is used in "
                        f"{_place(min(used_in))} and in {_place(max(used_in))}, expected in one: "
                        "each stage would have another; leave mesh.pp out",
                    )
                )  # fmt: skip
        return found

    def _called(self, inputs: Inputs) -> Any:
        try:
            return call(self._module, inputs)
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
        if func in (torch.autograd.grad, torch.autograd.backward) and not self.now.block:
            self._go_back()
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        number = self.now.call = len(self._names_called)
        for leaf in taken:
            name = self._names.get(id(leaf))
            if name is not None:
                self.phases[name].add(self.now.phase)
        given = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        # Its shape, say, is not what it holds.
        if counts(taken, made, given):
            for leaf in taken:
                self._use(leaf)
            if not self.now.block:
                self._names_called.append(name_of(func))
        for position, leaf in enumerate(made):
            self._note(leaf, None if self.now.block else Key(None, number, position))
        return given

    def _go_back(self) -> None:
        self.goes_back = True
        self._refusals.append(
            Refusal(
                STEM, len(self._blocks),
                f"{self._kind}.forward takes a gradient by torch.autograd outside of its layers, "
                "expected that to be left to the trainer: no stage has all that it goes back "
                "over; leave mesh.pp out",
            )
        )  # fmt: skip

    def _note(self, value: Tensor, key: Key | None) -> None:
        if id(value) in self._names or id(value) in self._origins:
            return
        self._kept.append(value)
        self._origins[id(value)] = (key, self.now.phase)
        self._had_gradient[id(value)] = value.requires_grad
        if key is not None:
            self.objects[key] = value

    def _take(self, hidden: Tensor) -> None:
        self.taken.append(hidden)
        self.taken_keys.append(self._origins.get(id(hidden), (None, STEM))[0])

    def _use(self, value: Tensor) -> None:
        if id(value) in self._names:
            return
        memory = self._memory.memory(value)
        key, made = self._origins.get(id(value), (None, memory.made.phase))
        if made == self.now.phase or (made > self.now.phase and key is not None):
            return
        # It got one later: from a function of the module's own that goes back as it likes.
        if value.requires_grad != self._had_gradient.get(id(value)):
            key = None
        if key is not None:
            first, last = self._uses.get(key, (made, self.now.phase))
            self._uses[key] = (first, max(last, self.now.phase))
        elif memory.follows:
            early, late = sorted((made, self.now.phase))
            self._refusals.append(
                Refusal(
                    early, late,
                    f"{self._kind}.forward uses a tensor {list(value.shape)} in "
                    f"{_place(self.now.phase)} that {_place(made)} has made and does not give, "
                    "expected one that a layer gives, or that is made outside of the layers: a "
                    "stage sends these to the next; let the layer return it, or leave mesh.pp out",
                )
            )  # fmt: skip

    @contextmanager
    def _followed(self) -> Iterator[None]:
        handles = []
        for number, block in enumerate(self._blocks):
            handles.append(block.register_forward_pre_hook(self._before(number), with_kwargs=True))
            handles.append(
                block.register_forward_hook(self._after(number), with_kwargs=True, prepend=True)
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, number: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.now.phase != number - 1:
                raise ConfigError(
                    f"{self._kind}.forward calls layer {number} after "
                    f"{self.now.phase if self.now.phase >= 0 else 'none'}, expected each once, in "
                    "their order; name them in that order, or leave mesh.pp out"
                )
            hidden = first_tensor(args, kwargs)
            if hidden is None or (number and hidden is not self._given):
                raise ConfigError(
                    f"layer {number} of {self._kind} takes another tensor than layer "
                    f"{number - 1} gives, expected nothing to be computed between two layers; move "
                    "it into one of them, or leave mesh.pp out"
                )
            self._take(hidden)
            self.now.phase, self.now.block = number, True

        return hook

    def _after(self, number: int) -> Any:
        def hook(
            block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any
        ) -> None:
            items, spec = tree_flatten(given)
            tensors = [item for item in items if isinstance(item, Tensor)]
            if (
                any(item is not None and not isinstance(item, Tensor) for item in items)
                or not tensors
                or (isinstance(given, tuple) and not isinstance(given[0], Tensor))
                or not isinstance(given, (Tensor, tuple))
            ):
                raise ConfigError(
                    f"layer {number} of {self._kind} gives {type(given).__name__}, expected one "
                    "tensor, or a tuple of tensors; turn caches off, or leave mesh.pp out"
                )
            self._given = tensors[0]
            taken = [id(leaf) for leaf in tensors_of(args, kwargs)]
            found: list[Tensor | int | None] = []
            for position, value in enumerate(items):
                known = taken.index(id(value)) if id(value) in taken else None
                found.append(value if known is None else known)
                if value is not None and known is None:
                    # Made inside, it is known from now on as what the layer gives.
                    self._origins.pop(id(value), None)
                    self._note(value, Key(number, 0, position))
            self.gives.append((found, spec))
            self.now.block = False
            if number == len(self._blocks) - 1:
                self._take(self._given)
                self.now.phase = len(self._blocks)

        return hook


class _NoTracker(ModuleTracker):
    """Counts operations for the module as a whole."""

    def __enter__(self) -> "_NoTracker":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """List the tensors that a block is called with, in their order."""
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def counts(taken: Sequence[Tensor], made: Sequence[Tensor], given: Any) -> bool:
    """Say whether a function takes or gives what tensors hold, rather than a shape of them."""
    return bool(made or (taken and given is None))


def name_of(func: Any) -> str:
    """Name a function of torch's."""
    return str(getattr(func, "__qualname__", getattr(func, "__name__", func)))


def _place(phase: int) -> str:
    return "what is before its layers" if phase == STEM else f"layer {phase} or behind it"


def _empty(value: Tensor) -> Tensor:
    found = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    if not isinstance(value, nn.Parameter):
        return found.requires_grad_() if value.requires_grad else found
    parameter = nn.Parameter(found, value.requires_grad)
    parameter.__dict__.update(value.__dict__)
    return parameter
