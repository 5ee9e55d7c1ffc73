"""Which blocks compute their activations again in the backward pass, and how."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.writable import writable
from tonari.trainer.models.fake import fake_tensors
from tonari.trainer.models.staged import StagedModel, without_data
from tonari.trainer.models.trace import leaves
from tonari.trainer.private.autograd import version_of
from tonari.trainer.private.dispatch import OpOverload
from tonari.trainer.private.modules import buffers_of, set_buffers
from tonari.trainer.private.storages import storage_id
from tonari.trainer.private.trees import tree_flatten, tree_unflatten

Checkpointing = Literal["none", "full", "selective"]

NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")
"""Attributes of a module that hold the number of its block."""


def choose_blocks(
    numbers: Iterable[int], block_worths: Sequence[float], count: int
) -> frozenset[int]:
    """Choose which of a stage's blocks to compute again: those that are worth most.

    Args:
        numbers: Of the stage's blocks.
        block_worths: See `worths`.
        count: How many; of equal ones the first. 0: all of them.

    Source: to compute again what frees most memory for its time, as KARMA's planner does between
    swapping and computing again, Wahib et al., Scaling distributed deep learning workloads beyond
    the memory capacity with KARMA, SC 2020.
    """
    own = [*numbers]
    if count:
        own = sorted(own, key=lambda number: (-block_worths[number], number))[:count]
    return frozenset(own)


def worths(model: StagedModel) -> tuple[float, ...]:
    """Find how many bytes each block keeps for an operation of its forward pass.

    Where all blocks are of one kind they are worth the same, and nothing is run; else each kind is,
    on tensors without data.

    Args:
        model: The whole of it, before it is split.

    Raises:
        ConfigError: If a block cannot be run so.
    """
    kinds = {int(number): module_kind(block, int(number)) for number, block in model.blocks.items()}
    if len(set(kinds.values())) == 1:
        return (1.0,) * len(kinds)
    found: dict[Hashable, float] = {}
    for number, kind in kinds.items():
        if kind not in found:
            found[kind] = _worth(model, number)
    return tuple(found[kinds[number]] for number in sorted(kinds))


def _worth(model: StagedModel, number: int) -> float:
    part = without_data(model)
    part.keep(range(number, number + 1), first=False, last=False)
    try:
        with fake_tensors():
            part.to_empty(device="cpu")
            values = [
                torch.empty(shape.shape, dtype=shape.dtype, requires_grad=shape.requires_grad)
                for shape in leaves(part.input_shape(1))
            ]
            with FlopCounterMode(display=False) as counter:
                num_bytes = saved_bytes(part, values)
    except Exception as error:
        raise ConfigError(
            f"mesh.checkpointing_blocks: block {number} cannot be run on tensors without data, by "
            f"which blocks are compared: {type(error).__name__}: {error}; leave "
            "mesh.checkpointing_blocks out, which computes all blocks again"
        ) from error
    return num_bytes / max(int(counter.get_total_flops()), 1)


def module_kind(module: nn.Module, number: int) -> Hashable:
    """Say what a module of a block does to a shape: class, attributes, parameters, children.

    That a module notes its block's number, as all of Hugging Face's do, makes it no other kind.
    """
    plain = [
        (name, None if name in NUMBERS and value == number else repr(value))
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, tuple, torch.dtype, type(None)))
    ]
    parameters = [
        (name, parameter.shape, parameter.dtype)
        for name, parameter in module.named_parameters(recurse=False)
    ]
    children = [(name, module_kind(child, number)) for name, child in module.named_children()]
    return (type(module), tuple(plain), tuple(parameters), tuple(children))


@contextmanager
def counting_saved(model: nn.Module) -> Iterator[dict[int, int]]:
    """Note the storages that autograd keeps meanwhile, and their bytes, beside a model's weights.

    What the forward pass gives must be kept until all is counted: a storage that was freed may
    come again under its address.
    """
    weights = {storage_id(parameter.untyped_storage()) for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage_id(storage) not in weights:
            saved[storage_id(storage)] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


def saved_bytes(model: nn.Module, values: Sequence[Tensor]) -> int:
    """Count the bytes that autograd keeps of a forward pass, beside the weights."""
    with counting_saved(model) as saved:
        result = model(*values)
    del result
    return sum(saved.values())


def recompute(block: nn.Module, *, selective: bool) -> None:
    """Keep of a block's activations its input only, or what is dear to compute again."""
    save = _save_products if selective else _save_nothing
    # Not checkpoint_wrapper: it puts itself into the parameters' names.
    again = partial(checkpoint, use_reentrant=False, context_fn=partial(_contexts, block, save))
    # Selective contexts take no operation that the first pass had not, and go back once.
    block.forward = _Recomputed(block, again, copy=writable if selective else torch.clone)


class _Recomputed:
    """A block's ``forward``, computed again from what it was given, as that was then.

    Where the block changes its inputs in place, copies are kept: of all in the first pass, then of
    those that it changed.
    """

    def __init__(
        self, block: nn.Module, again: Callable[..., Any], *, copy: Callable[[Tensor], Tensor]
    ) -> None:
        self._kind, self._forward = type(block).__name__, block.forward
        self._again, self._copy = again, copy
        self._changed: frozenset[int] | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **named)
        given, spec = tree_flatten((args, named))
        tensors = {place: each for place, each in enumerate(given) if isinstance(each, Tensor)}
        versions = {place: version_of(each) for place, each in tensors.items()}
        copied = frozenset(tensors) if self._changed is None else self._changed & set(tensors)
        kept = [_kept(each) if place in copied else each for place, each in enumerate(given)]
        waiting = [given]

        def run(*kept: Any) -> Any:
            if waiting:
                taken = waiting.pop()
            else:
                taken = [self._copy(v) if n in copied else v for n, v in enumerate(kept)]
            args, named = tree_unflatten(taken, spec)
            return self._forward(*args, **named)

        result = self._again(run, *kept)
        changed = frozenset(n for n, each in tensors.items() if version_of(each) != versions[n])
        if self._changed is None:
            self._changed = changed
        elif not changed <= copied:
            raise ConfigError(
                f"{self._kind}.forward changes its input in place, and did not in the first pass, "
                "expected the same in each pass of a block that is computed again, as no copy of "
                "the input was kept; change a copy, or leave mesh.checkpointing out"
            )
        return result


def _kept(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""Of the forward pass, and of its repetition."""


def _contexts(block: nn.Module, save: Callable[[], Contexts]) -> Contexts:
    first, again = save()
    return first, _Repeated(block, again)


class _Repeated:
    """Keeps a block's batch statistics out of what is computed again: they have counted it.

    Entered once more where a schedule goes back over a stage twice.
    """

    def __init__(self, block: nn.Module, context: AbstractContextManager[object]) -> None:
        self._block, self._context = block, context

    def __enter__(self) -> None:
        self._kept = [
            (each, buffers_of(each)) for each in self._block.modules() if buffers_of(each)
        ]
        for module, buffers in self._kept:
            copies = {name: b if b is None else b.clone() for name, b in buffers.items()}
            set_buffers(module, copies)
        self._context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.__exit__(kind, error, trace)
        for module, buffers in self._kept:
            set_buffers(module, buffers)
        if isinstance(error, RuntimeError) and "has been mutated" in str(error):
            raise ConfigError(
                f"{type(self._block).__name__} changes in place what a product, a convolution or "
                "attention gave, which mesh.checkpointing=selective keeps to compute from it "
                "again; change a copy (inplace=False), or give mesh.checkpointing=full"
            ) from error


def _save_nothing() -> Contexts:
    return nullcontext(), nullcontext()


def dear_products() -> list[OpOverload[..., Any]]:
    """List the operators whose results selective recomputation keeps: products and attention."""
    aten = torch.ops.aten
    attention = [
        getattr(aten, f"_scaled_dot_product_{kind}").default
        for kind in (
            "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
        )
    ]  # fmt: skip
    return [
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default, *attention
    ]  # fmt: skip


def _save_products() -> Contexts:
    contexts: Contexts = create_selective_checkpoint_contexts(dear_products())  # type: ignore[no-untyped-call]
    return contexts
