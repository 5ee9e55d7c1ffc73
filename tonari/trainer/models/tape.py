"""What was done to tensors that have no memory; repeats in memory what one of them depends on."""

import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from tonari.trainer.private.dispatch import disable_current_modes
from tonari.trainer.private.trees import tree_leaves, tree_map

LARGE_BYTES = 1 << 16
"""Memory from this size on goes back to the system as soon as it is freed."""

Held = dict[int, torch.UntypedStorage]
"""Memory by its number, while operations are repeated."""


@dataclass(frozen=True)
class View:
    """Where a tensor lies.

    Attributes:
        storage: The number of its memory.
        storage_bytes: The size of that memory.
        dtype: Of its elements.
        size, stride, offset: In elements.
    """

    storage: int
    storage_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, held: Held) -> Tensor:
        """See the tensor in real memory, which is allocated if it is not there yet."""
        if self.storage not in held:
            held[self.storage] = _allocate(self.storage_bytes)
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        return empty.set_(held[self.storage], self.offset, self.size, self.stride)

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is all that its memory holds."""
        numel = 1
        for length in self.size:
            numel *= length
        return self.offset == 0 and numel * self.dtype.itemsize == self.storage_bytes


@dataclass(frozen=True)
class Constant:
    """A real tensor that an operation took."""

    value: Tensor


@dataclass(frozen=True)
class Entry:
    """One operation.

    Attributes:
        func: Of ``torch.ops``.
        args, kwargs: With a `View` or `Constant` in the place of each tensor.
        depends: The memory whose earlier contents the result depends on.
        writes: The memory that it changes or makes.
        makes: The position among the results of each tensor that has memory of its own, and where
            it lies.
        state: Of the random number generator before the operation, if it draws.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    depends: frozenset[int]
    writes: frozenset[int]
    makes: tuple[tuple[int, View], ...] = ()
    state: Tensor | None = None

    def repeat(self, held: Held) -> None:
        """Do it in real memory; the caller restores torch's generator."""

        def real(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                assert self.state is not None, "an operation that is given a generator draws"
                return torch.Generator().set_state(self.state)
            if isinstance(value, View):
                return value.of(held)
            return value.value if isinstance(value, Constant) else value

        if self.state is not None:
            torch.set_rng_state(self.state)
        args, kwargs = tree_map(real, (self.args, dict(self.kwargs)))
        results = tree_leaves(self.func(*args, **kwargs))
        for position, view in self.makes:
            made: Tensor = results[position]
            if made.stride() == view.stride and made.storage_offset() == view.offset:
                held[view.storage] = made.untyped_storage()
            else:
                # Without data torch chose another order in memory, in which others see it.
                view.of(held).copy_(made)


class Tape:
    """Operations in their order; repeats those that a tensor depends on."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        # Of each memory, the numbers of the entries that write it, ascending.
        self._writers: dict[int, list[int]] = {}

    def add(self, entry: Entry) -> None:
        """Note what has been done."""
        for storage in entry.writes:
            self._writers.setdefault(storage, []).append(len(self._entries))
        self._entries.append(entry)

    def replay(self, view: View) -> Tensor:
        """Make a tensor in real memory, with the contents that it has now; leaves no trace."""
        needed = self._needed(view.storage)
        last = {view.storage: len(self._entries)}
        for number in reversed(needed):
            for storage in self._entries[number].depends | self._entries[number].writes:
                last.setdefault(storage, number)
        held: Held = {}
        # It may be asked for where operations are recorded: these are not.
        with disable_current_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
            for number in needed:
                entry = self._entries[number]
                entry.repeat(held)
                for storage in entry.depends | entry.writes:
                    if last[storage] == number:
                        held.pop(storage, None)
            return view.of(held)

    def digests(self) -> dict[int, int]:
        """Sum up how the contents of each memory come to be: the same sum, the same contents."""
        sums: dict[int, int] = {}

        def plain(value: Any) -> object:
            if isinstance(value, View):
                its = value.dtype, value.size, value.stride, value.offset
                return sums.get(value.storage), value.storage_bytes, its
            if isinstance(value, Constant):
                return digest_of(value.value)
            return None if isinstance(value, torch.Generator) else value

        for entry in self._entries:
            given = [plain(value) for value in tree_leaves((entry.args, dict(entry.kwargs)))]
            state = None if entry.state is None else digest_of(entry.state)
            changed = xxhash.xxh3_64_intdigest(repr((str(entry.func), given, state)).encode())
            sums.update(dict.fromkeys(entry.writes, changed))
        return sums

    def _needed(self, storage: int) -> list[int]:
        """List the entries that the contents of some memory follow from, ascending."""
        needed: set[int] = set()
        asked: list[tuple[int, int]] = [(storage, len(self._entries))]
        while asked:
            of, before = asked.pop()
            writers = self._writers.get(of, [])
            place = bisect_left(writers, before)
            if place and writers[place - 1] not in needed:
                needed.add(writers[place - 1])
                entry = self._entries[writers[place - 1]]
                asked += [(other, writers[place - 1]) for other in entry.depends]
        return sorted(needed)


def digest_of(value: Tensor) -> int:
    """Sum up the bytes of a tensor in memory."""
    flat = value.detach().cpu().contiguous().flatten()
    flat = torch.view_as_real(flat.resolve_conj()).flatten() if flat.is_complex() else flat
    with disable_current_modes():
        return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data)


def storages(views: Iterable[View]) -> frozenset[int]:
    """List the memory of some tensors."""
    return frozenset(view.storage for view in views)


def _allocate(num_bytes: int) -> torch.UntypedStorage:
    """Allocate memory of zeros."""
    if num_bytes < LARGE_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
    # Not by malloc: it puts small tensors that stay into the room of a large one that was freed,
    # where the next large one does not fit any more.
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()
