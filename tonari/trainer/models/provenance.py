"""Which tensors of a forward pass follow from weights, draws and blocks, by their memory."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tonari.trainer.models.absent import OF_A_SHAPE
from tonari.trainer.models.fake import written
from tonari.trainer.private.dispatch import TorchDispatchMode
from tonari.trainer.private.storages import storage_id
from tonari.trainer.private.trees import tree_leaves


@dataclass
class Moment:
    """Where a forward pass is.

    Attributes:
        phase: See `tonari.trainer.models.trace`.
        block: Whether in a block, rather than before, between or behind them.
        call: Number of the call of a function of torch's, of those that no block makes.
    """

    phase: int
    block: bool = False
    call: int = 0


@dataclass
class TracedMemory:
    """What is known of the memory of tensors.

    Attributes:
        of: Kept, so that no address comes twice.
        made: When it came to be.
        follows: Whether its contents are more than the module's inputs make of themselves.
        of_rows: Whether its contents follow from the module's inputs, or are drawn.
        changes: When it was changed in place.
    """

    of: torch.UntypedStorage
    made: Moment
    follows: bool = False
    of_rows: bool = False
    changes: list[Moment] = field(default_factory=list)


class Provenance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows tensors without data, operation by operation.

    Args:
        now: Where the pass is; its owner moves it on.
    """

    def __init__(self, now: Moment) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = now
        self._known: dict[int, TracedMemory] = {}

    def root(self, values: Iterable[Tensor]) -> None:
        """Begin with tensors that only some stages have."""
        for value in values:
            self.memory(value).follows = True

    def root_rows(self, values: Iterable[Tensor]) -> None:
        """Begin with tensors that are others on each replica."""
        for value in values:
            self.memory(value).of_rows = True

    def memory(self, value: Tensor) -> TracedMemory:
        """Find what is known of a tensor's memory."""
        storage = value.untyped_storage()
        now = self.now
        return self._known.setdefault(
            storage_id(storage), TracedMemory(storage, Moment(now.phase, now.block, now.call))
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        taken = _tensors((args, kwargs))
        of_rows = torch.Tag.nondeterministic_seeded in func.tags
        follows = self.now.block or of_rows
        if func.overloadpacket not in OF_A_SHAPE:
            follows = follows or any(self.memory(each).follows for each in taken)
            of_rows = of_rows or any(self.memory(each).of_rows for each in taken)
        changed = written(func, args, kwargs)
        if "batch_norm" in str(func):
            # Its schema does not say that it counts statistics.
            changed += [each for each in taken if each.dim() == 1 and not each.requires_grad]
        for each in changed:
            self.memory(each).follows |= follows
            self.memory(each).of_rows |= of_rows
        for each in _tensors(result):
            # A view of what is there already is no more than that.
            if storage_id(each.untyped_storage()) not in self._known:
                self.memory(each).follows, self.memory(each).of_rows = follows, of_rows
        for each in changed:
            now = self.now
            self.memory(each).changes.append(Moment(now.phase, now.block, now.call))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
