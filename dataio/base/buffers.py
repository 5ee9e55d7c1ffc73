"""Buffers that come back when nobody can see them any more.

Fresh memory costs page faults, so a batch's buffers are reused; but a batch that a user keeps must
never change under them. So a buffer is handed out as an array whose death, and with it the death of
all tensors and views made from it, puts the memory back.
"""

import math
import weakref
from collections import deque

import numpy as np
from numpy.typing import DTypeLike, NDArray

MAX_IDLE = 4
"""Idle buffers kept of one size: what a short queue of batches needs one after the other."""


class _Lease(weakref.ref[NDArray[np.generic]]):
    """Knows the memory of an array without keeping the array alive."""

    __slots__ = ("memory",)
    memory: memoryview


class BufferRing:
    """Reused memory for arrays. Any thread may take it, and any may drop the last view.

    Dictionaries and lists are changed by single calls only, which the interpreter makes whole.

    Args:
        pinned: Take memory that a GPU copies from without waiting.
        max_idle: Idle buffers kept of one size.
    """

    def __init__(self, *, pinned: bool = False, max_idle: int = MAX_IDLE) -> None:
        self._pinned = pinned
        self._max_idle = max_idle
        self._idle: dict[int, list[memoryview]] = {}
        self._leases: dict[int, _Lease] = {}
        # Of arrays that died. Their leases get in by a call without a line of Python in it: a
        # Ctrl-C within a callback would be printed and forgotten.
        self._dead: deque[_Lease] = deque()
        self.num_allocated = 0

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """Hand out an uninitialised array, its memory reused when some is idle."""
        while self._dead:
            self._take_back()
        kind = np.dtype(dtype)
        count = math.prod(shape)
        capacity = _capacity(count * kind.itemsize)
        try:
            memory = self._idle[capacity].pop()  # the last one back is the likeliest in cache
        except (KeyError, IndexError):
            memory = self._allocate(capacity)
        # Views of an array point at the nearest array that is not itself a view of another array.
        # Over a memoryview that is `whole`, so `whole` lives as long as any view or tensor made
        # from it.
        whole: NDArray[np.generic] = np.frombuffer(memory, kind, count)
        lease = _Lease(whole, self._dead.append)
        lease.memory = memory
        self._leases[id(lease)] = lease
        return whole.reshape(shape)

    def _allocate(self, num_bytes: int) -> memoryview:
        self._idle.setdefault(num_bytes, [])
        self.num_allocated += 1
        if self._pinned:
            import torch  # sources take buffers too, and need none of it

            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
        return np.empty(num_bytes, np.uint8).data

    def _take_back(self) -> None:
        try:
            lease = self._dead.popleft()
        except IndexError:  # another thread was faster
            return
        del self._leases[id(lease)]
        idle = self._idle[len(lease.memory)]
        if len(idle) < self._max_idle:
            idle.append(lease.memory)


def _capacity(num_bytes: int) -> int:
    """Round up by at most a quarter, so that batches of varying length share buffers."""
    step = 1 << max(num_bytes.bit_length() - 3, 6)
    return max(-(-num_bytes // step) * step, step)
