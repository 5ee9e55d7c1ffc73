"""What a rank computes, sends and allocates, operator by operator, in the order torch issues it.

Works on tensors with data and without: a trace of tensors without data is held against the record
of a real job, operator by operator, in ``tests/oracle``.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import ScriptObject, Tensor
from torch.distributed import Work
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry
from typing_extensions import Self

from tonari.trainer.models.absent import Absent
from tonari.trainer.private.dispatch import TorchDispatchMode, schema_of
from tonari.trainer.private.fakes import shapes_found_unseen
from tonari.trainer.private.messages import groups_of, waits_replaced
from tonari.trainer.private.storages import resize_replaced, storage_id
from tonari.trainer.private.trees import tree_leaves

MESSAGES = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "reduce_scatter_": "reduce_scatter",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast_": "broadcast", "broadcast": "broadcast", "send": "send", "recv_": "receive",
    "barrier": "barrier",
}  # fmt: skip
"""What torch calls its messages, and what we do."""

MESSAGE_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

SILENT = ("prim", "profiler")
"""Spaces of operators that compute nothing."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operator:
    """A call of an operator, on this rank's own tensors.

    Attributes:
        name: As torch has it: ``"aten.mm.default"``.
        inputs: Shapes of its tensors.
        outputs: Shapes of what it makes, or writes to.
        dtype: Of the first output, as torch has it; empty if there is none.
        flops: Floating-point operations of products, convolutions and attention; 0 of others.
        moved_bytes: Bytes read and written; 0 of a view.
    """

    name: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dtype: str
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class Message:
    """A message among ranks, where it is issued.

    Attributes:
        kind: One of the values of `MESSAGES`.
        ranks: The group's, by their numbers in the job, ascending.
        num_bytes: Of what is gathered, scattered or reduced as a whole, or of what travels.
        peer: Rank at the other end of a ``"send"`` or ``"receive"``; else None.
    """

    kind: str
    ranks: tuple[int, ...]
    num_bytes: int
    peer: int | None = None


@dataclass(frozen=True)
class Wait:
    """A wait until a message is complete.

    Attributes:
        message: Its number among the messages of the record, from 0.
    """

    message: int


Event = Operator | Message | Wait


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the messages of this rank, and its waits for them, while it is entered.

    Several entries add to one record.

    Attributes:
        events: In the order of their calls.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._num_messages = 0
        self._patches: list[list[Any]] = []
        # The message that fills a storage, and that each handle stands for; handles are kept, as
        # an identity may be another's after its end
        self._filled: dict[int, int] = {}
        self._works: dict[int, tuple[Work, int]] = {}

    def __enter__(self) -> Self:
        patches = self.patches()
        for patch in patches:
            patch.start()
        self._patches.append(patches)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for patch in self._patches.pop():
            patch.stop()

    def patches(self) -> list[Any]:
        """Make what sees that which is no operator: a wait for a handle."""

        def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
            def wait(work: Work, *args: Any, **named: Any) -> Any:
                if id(work) not in self._works:
                    return plain(work, *args, **named)
                number = self._works.pop(id(work))[1]
                return self.exchange(
                    lambda: plain(work, *args, **named), lambda _: self.events.append(Wait(number))
                )

            return wait

        return waits_replaced(watched)

    def mark(self) -> None:
        """Begin a new list of events."""
        self.events = []
        self._num_messages = 0
        self._filled.clear()
        self._works.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Of a tensor that several ranks hold parts of, what it is made of comes here next.
        if any(
            issubclass(kind, DTensor) or kind.__name__ == "AsyncCollectiveTensor" for kind in types
        ):
            return NotImplemented
        named = kwargs or {}
        if any(issubclass(kind, Absent) for kind in types):  # of another stage: nothing is done
            return func(*args, **named)
        if func.namespace in MESSAGE_SPACES:
            return self.exchange(
                lambda: self.call(func, args, named),
                lambda result: self._take_message(func, args, named, result),
            )
        return self.compute(func, args, named)

    def call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Carry out an operator."""
        return func(*args, **named)

    def compute(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Carry out an operator that is no message."""
        return self.call(func, args, named)

    def exchange(self, carry_out: Callable[[], Any], note: Callable[[Any], None]) -> Any:
        """Send a message, or wait for one, and note it."""
        result = carry_out()
        note(result)
        return result

    def _take_message(
        self, func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any
    ) -> None:
        given, made = _tensors((args, named)), _tensors(result)
        if func.overloadpacket.__name__ == "wait_tensor":
            number = self._filled.pop(storage_id(given[0].untyped_storage()), None)
            if number is not None:  # else it was waited for before
                self.events.append(Wait(number))
            return
        message = _message(func, args, given, made)
        if message is None:
            return
        number = self._num_messages
        self._num_messages += 1
        self.events.append(message)
        works = [leaf for leaf in tree_leaves(result) if isinstance(leaf, ScriptObject)]
        for leaf in works:
            work = Work.unbox(leaf)
            self._works[id(work)] = work, number
        if not works:  # functional: who takes the tensor waits
            self._filled.update((storage_id(each.untyped_storage()), number) for each in made)


class Recorder(Watcher):  # type: ignore[no-untyped-call]
    """Records operators and memory too.

    Attributes:
        live_bytes: Of storages that were made while it was entered and are still there.
        peak_bytes: The most of these at a time, since `mark`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        # Bytes of each storage that is there, by its identity
        self._known: dict[int, int] = {}

    def patches(self) -> list[Any]:
        """Make what sees FSDP free what it gathered: it cuts a storage to nothing."""
        known = self._known

        def watched(resize: Callable[..., Any]) -> Callable[..., Any]:
            def resize_(storage: torch.UntypedStorage, size: int) -> Any:
                result = resize(storage, size)
                if storage_id(storage) in known:
                    self._note(storage_id(storage), size)
                return result

            return resize_

        return [*super().patches(), resize_replaced(watched), *shapes_found_unseen()]

    def mark(self) -> None:
        """Begin a new list of events, and a new peak from what is there."""
        super().mark()
        self.peak_bytes = self.live_bytes

    def compute(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Carry out an operator, and record it."""
        result = self.call(func, args, named)
        if func.namespace not in SILENT:
            made = _tensors(result)
            self._count(made)
            self.events.append(_operator(func, args, named, _tensors((args, named)), made, result))
        return result

    def exchange(self, carry_out: Callable[[], Any], note: Callable[[Any], None]) -> Any:
        """Send a message, or wait for one, and count what it makes."""
        result = super().exchange(carry_out, note)
        self._count(_tensors(result))
        return result

    def _count(self, made: list[Tensor]) -> None:
        for tensor in made:
            storage = tensor.untyped_storage()
            identity = storage_id(storage)
            if identity not in self._known:
                weakref.finalize(storage, self._drop, identity)
            self._note(identity, storage.nbytes())

    def _note(self, identity: int, num_bytes: int) -> None:
        self.live_bytes += num_bytes - self._known.get(identity, 0)
        self._known[identity] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _drop(self, identity: int) -> None:
        self.live_bytes -= self._known.pop(identity)


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _operator(
    func: Any, args: tuple[Any, ...], named: dict[str, Any], given: list[Tensor],
    made: list[Tensor], result: object,
) -> Operator:  # fmt: skip
    count = flop_registry.get(func.overloadpacket)
    flops = 0 if count is None else int(count(*args, **named, out_val=result))
    # A view makes nothing: what it shows is where it was.
    is_view = func.is_view or (bool(made) and not _writes(func) and _is_shared(made, given))
    moved = 0 if is_view else sum(_num_bytes(tensor) for tensor in [*given, *made])
    return Operator(
        str(func),
        tuple(tuple(tensor.shape) for tensor in given),
        tuple(tuple(tensor.shape) for tensor in made),
        str(made[0].dtype).removeprefix("torch.") if made else "",
        flops,
        moved,
    )


def _writes(func: Any) -> bool:
    return bool(schema_of(func).is_mutable)


def _is_shared(made: list[Tensor], given: list[Tensor]) -> bool:
    own = {storage_id(tensor.untyped_storage()) for tensor in given}
    return all(storage_id(tensor.untyped_storage()) in own for tensor in made)


def _num_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.itemsize


def _message(
    func: Any, args: tuple[Any, ...], given: list[Tensor], made: list[Tensor]
) -> Message | None:
    kind = MESSAGES.get(func.overloadpacket.__name__)
    group = next(groups_of(args), None)
    if kind is None or group is None:
        return None
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    num_bytes = max(sum(map(_num_bytes, given[:1])), sum(map(_num_bytes, made[:1])))
    tensors = _tensor_lists(args)
    if tensors:
        num_bytes = max(num_bytes, *(sum(map(_num_bytes, part)) for part in tensors))
    peer = None
    if kind in ("send", "receive"):
        peer = ranks[int(args[2])]
    return Message(kind, ranks, num_bytes, peer)


def _tensor_lists(args: tuple[Any, ...]) -> list[list[Tensor]]:
    """List the tensors of each argument: what goes in as a whole, and what comes out."""
    parts = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
    return [part for part in parts if part]
