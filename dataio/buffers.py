"""Buffers that come back when nobody can see them any more.

Fresh memory costs page faults, so a batch's buffers are reused; but a batch that a user keeps must
never change under them. So a buffer is handed out as an array whose death, and with it the death of
all tensors and views made from it, puts the memory back.
"""

import weakref
from collections import defaultdict

import numpy as np
from numpy.typing import DTypeLike, NDArray


class BufferRing:
    """Reused memory for arrays. Any thread may take it, and any may drop the last view."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[memoryview]] = defaultdict(list)
        self.num_allocated = 0

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """Hand out an uninitialised array, its memory reused when some is idle."""
        kind = np.dtype(dtype)
        num_bytes = max(int(np.prod(shape, dtype=np.int64)) * kind.itemsize, 1)
        idle = self._idle[num_bytes]
        try:
            memory = idle.pop()  # the last one back is the likeliest in cache
        except IndexError:
            memory = np.empty(num_bytes, np.uint8).data
            self.num_allocated += 1
        # Views of an array point at the nearest array that is not itself a view of another array.
        # Over a memoryview that is `whole`, so `whole` lives as long as any view or tensor made
        # from it.
        whole = np.frombuffer(memory, np.uint8)
        weakref.finalize(whole, idle.append, memory).atexit = False
        used = whole[: num_bytes if kind.itemsize and np.prod(shape) else 0]
        return used.view(kind).reshape(shape)
