"""Blocks whose activations wait for their backward pass in the host's memory.

The blocks of a stage that swap are spread evenly over it, so that each one's copies have the
computation of all blocks up to the next one to hide behind. Copies of a block begin as its forward
pass makes what autograd keeps; they come back while the next swapped block goes backward. So at
most two blocks' activations are on the device at a time, beside those of blocks that do not swap.

Not by torch's ``save_on_cpu``, nor by the ``offload_wrapper`` that calls it: they copy each tensor
that autograd keeps, weights and views of the same memory too, along the stream that computes, which
waits for each copy, there and back. FSDP's ``CPUOffloadPolicy`` moves parameters, not activations.

Sources: which blocks to swap, and which to compute again, Wahib et al., Scaling distributed deep
learning workloads beyond the memory capacity with KARMA, SC 2020; torch's hooks on saved tensors.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from tonari.trainer.mesh.kept import KeptTensor, Lanes, Visit
from tonari.trainer.mesh.recompute import counting_saved, saved_bytes
from tonari.trainer.private.dispatch import is_traceable_wrapper_subclass
from tonari.trainer.private.storages import storage_id
from tonari.trainer.private.trees import tree_leaves

LEAST_BYTES = 1 << 16
"""Of a storage that is worth a copy: smaller ones stay."""

NO_COPIES = sys.maxsize
"""As `Swap.least_bytes`: all stays."""


def swapped_blocks(numbers: Iterable[int], count: int) -> tuple[int, ...]:
    """Choose which of a stage's blocks swap: the first one, and others as far apart as can be.

    Args:
        numbers: Of the stage's blocks, in their order.
        count: How many, at the most.
    """
    own = [*numbers]
    count = min(count, len(own))
    return tuple(own[number * len(own) // count] for number in range(count))


class Swap:
    """Swaps the activations of blocks of one rank.

    Not for schedules that go back over a stage twice: what came back would stay until the second
    time. Runs in the thread that computes; on a GPU, copies go along two streams of their own.

    Args:
        num_blocks: Of each stage, that swap; see `swapped_blocks`.
        device: Where the blocks compute. On the CPU, copies are made and waited for, which is of
            use to tests alone.
        least_bytes: Storages of fewer bytes stay.

    Attributes:
        num_blocks: As given.
    """

    def __init__(
        self, num_blocks: int, device: torch.device, *, least_bytes: int = LEAST_BYTES
    ) -> None:
        self.num_blocks, self._least_bytes = num_blocks, least_bytes
        self._lanes = Lanes(device)
        self._stored: WeakSet[KeptTensor] = WeakSet()
        # Of the last forward passes, those whose copies may be under way
        self._leaving: deque[Visit] = deque()
        # Of the backward pass, that which nothing has waited for
        self._coming: Visit | None = None

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Have a stage's blocks swap; those that compute again must have been made to before."""
        chosen = swapped_blocks(range(len(blocks)), self.num_blocks)
        stage, last = _Stage(), len(blocks) - 1
        for number in chosen:
            block = blocks[number]
            block.forward = partial(
                self._pass, block, block.forward, stage, number == chosen[0], number == last
            )
        if chosen and chosen[-1] != last:
            blocks[last].forward = partial(self._end, blocks[last].forward, stage)

    @property
    def device_bytes(self) -> int:
        """What swapped blocks keep on the device now."""
        return sum(each.here.numel() for each in self._stored if each.here is not None)

    @property
    def host_bytes(self) -> int:
        """What they keep in the host's memory now, and not for copies back that have begun."""
        return sum(each.host.numel() for each in self._stored if each.host is not None)

    def _pass(
        self, block: nn.Module, forward: Callable[..., Any], stage: "_Stage", is_first: bool,
        is_last: bool, *args: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """Go forward over a block that swaps."""
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        before, stage.latest = None if is_first else stage.latest, None
        # The one before may be on its way still, but none before that
        while len(self._leaving) > 1:
            self._leaving.popleft().leave()
        visit = Visit(self, self._lanes, _staying(block, (args, named)), self._least_bytes)
        with saved_tensors_hooks(visit.pack, visit.unpack):
            result = forward(*args, **named)
        visit.end()
        self._leaving.append(visit)
        if is_last:
            _on_backward(result, visit.bring_back)
        else:
            stage.latest = visit
        if before is not None:
            _on_backward(result, before.bring_back)
        return result

    def _end(self, forward: Callable[..., Any], stage: "_Stage", *args: Any, **named: Any) -> Any:
        """Go forward over a stage's last block, which does not swap."""
        result = forward(*args, **named)
        last, stage.latest = stage.latest, None
        if last is not None:
            _on_backward(result, last.bring_back)
        return result

    def note(self, stored: KeptTensor) -> None:
        """Count what a visit keeps, as long as it is there."""
        self._stored.add(stored)

    def begin_return(self, visit: Visit) -> bool:
        """Note that a visit is wanted again, and report whether it has left the device."""
        # Memory that nobody took must not go to another while it is being filled
        self.wait_for_coming()
        self._coming, has_left = visit, visit not in self._leaving
        if not has_left:
            self._leaving.remove(visit)
        return has_left

    def wait_for_coming(self, visit: Visit | None = None) -> None:
        """Have the computation wait for what comes back: for a visit, or else for any."""
        if self._coming is not None and visit in (None, self._coming):
            coming, self._coming = self._coming, None
            coming.wait()


@dataclass
class _Stage:
    """The pass over a stage at hand: its last block that swapped."""

    latest: Visit | None = None


def _staying(block: nn.Module, given: object) -> set[int]:
    """Find storages that are there anyway: weights, buffers, and what other blocks are given too.

    Weights as FSDP has gathered them, since the forward pass has begun.
    """
    tensors = [*block.parameters(), *block.buffers()]
    # Such as a mask: of a sequence of activations autograd wants the gradient
    tensors += [
        leaf for leaf in tree_leaves(given)
        if isinstance(leaf, Tensor) and not leaf.requires_grad
    ]  # fmt: skip
    return {storage_id(storage) for tensor in tensors for storage in _storages(tensor)}


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [one for each in inner if isinstance(each, Tensor) for one in _storages(each)]
    return [tensor.untyped_storage()]


def _on_backward(result: object, act: Callable[..., None]) -> None:
    """Act as the backward pass comes to what a block has given."""
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if made:
        register_multi_grad_hook(made, act, mode="any")


def device_bytes(
    model: nn.Module, swapped: Sequence[nn.Module], values: Sequence[Tensor]
) -> tuple[int, int]:
    """Count what autograd keeps of a forward pass where some blocks swap.

    Args:
        model: A stage; used up.
        swapped: Its blocks that swap.
        values: What it is given.

    Returns:
        The bytes beside the weights that these blocks do not keep, and the most that one of them
        does.
    """
    most = 0

    def count(block: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        nonlocal most
        with counting_saved(block) as saved:
            result = forward(*args, **named)
        most = max(most, sum(saved.values()))
        return result

    for block in swapped:
        block.forward = partial(count, block, block.forward)
    return saved_bytes(model, values), most
