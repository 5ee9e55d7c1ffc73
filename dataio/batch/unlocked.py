"""Pictures of batches, delivered by threads that do not hold Python's lock.

They wait for pictures, and deliver them, within compiled code (dataio/rows/pictures.c). They come
back to Python for pictures that it leaves to others: rare kinds, and those with a fault.
"""

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class in Python 3.10
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from dataio.rows.at_once import LEFT, PicturesCall, library

T = TypeVar("T")
CHECK_S = 0.2
"""Longest wait of a thread that would not see Ctrl-C meanwhile."""


class _CallKept(NamedTuple):
    """What threads need of a call; it stays until that is done, also if nobody waits any more."""

    call: PicturesCall
    deliver_left: Callable[[list[int]], None]
    errors: list[BaseException]


@dataclass(frozen=True)
class PendingPictures(Generic[T]):
    """Pictures under way, awaited as a `Future` is.

    Attributes:
        threads: Deliver them.
        calls: The pictures, by field.
        errors: What was raised for pictures that were left.
        end: Called with the seconds that threads have spent, and those of their processors, by
            `result`, which gives its result.
    """

    threads: "UnlockedThreads"
    calls: Sequence[PicturesCall]
    errors: list[BaseException]
    end: Callable[[float, float], T]

    def done(self) -> bool:
        """Say whether all are delivered."""
        return not any(call.undone for call in self.calls)

    def exception(self, timeout: float) -> BaseException | None:
        """Wait, and give what was raised. Raises `FutureTimeoutError`."""
        until = time.monotonic() + timeout
        for call in self.calls:
            while not self.threads.wait(call, min(max(until - time.monotonic(), 0.0), CHECK_S)):
                if time.monotonic() >= until:
                    raise FutureTimeoutError
        return self.errors[0] if self.errors else None

    def result(self, timeout: float) -> T:
        """Wait, and end it."""
        if (error := self.exception(timeout)) is not None:
            raise error
        calls = self.calls
        seconds = sum(call.nanoseconds for call in calls) / 1e9
        return self.end(seconds, sum(call.cpu_nanoseconds for call in calls) / 1e9)


class UnlockedThreads:
    """Threads that deliver pictures.

    Args:
        num_threads: How many.

    Attributes:
        close: Ends them when all that was put is delivered; idempotent.
    """

    def __init__(self, num_threads: int) -> None:
        found = library()
        assert found is not None, "as pictures are delivered at once"
        num_bytes = ctypes.c_int64.in_dll(found, "tonari_queue_bytes").value
        # Whoever may use it holds it: a thread, or who waits.
        self._library, self._queue = found, ctypes.create_string_buffer(num_bytes)
        found.tonari_open(self._queue)
        self._under_way: dict[int, _CallKept] = {}
        arguments = found, self._queue, self._under_way
        threads = [
            threading.Thread(target=_serve, args=arguments, name=f"tonari-decode-{n}", daemon=True)
            for n in range(num_threads)
        ]
        # Also where a loader is never closed: what threads write to must not go before them.
        self.close = weakref.finalize(self, _end, found, self._queue, threads, os.getpid())
        for thread in threads:
            thread.start()

    def put(
        self,
        calls: Sequence[PicturesCall],
        deliver_left: Callable[[int, list[int]], None],
        end: Callable[[float, float], T],
    ) -> PendingPictures[T]:
        """Have pictures delivered, behind those that were put before.

        Args:
            calls: By field.
            deliver_left: Called with a field's number and rows that were left, on any thread.
            end: See `PendingPictures`.

        Raises:
            RuntimeError: If they were closed.
        """
        if not self.close.alive:
            raise RuntimeError("the threads that deliver pictures have ended")
        for address, kept in [*self._under_way.items()]:
            if not kept.call.undone:  # nobody waited for it, as after a Ctrl-C
                del self._under_way[address]
        errors: list[BaseException] = []
        for number, call in enumerate(calls):
            address = ctypes.addressof(call)
            self._under_way[address] = _CallKept(call, partial(deliver_left, number), errors)
            self._library.tonari_put(self._queue, address)
        return PendingPictures(self, calls, errors, end)

    def wait(self, call: PicturesCall, seconds: float) -> bool:
        """Wait for a call for some seconds at most; false: it is not done."""
        address = ctypes.addressof(call)
        is_done = bool(self._library.tonari_wait(self._queue, address, seconds))
        if is_done:
            self._under_way.pop(address, None)
        return is_done


def _serve(library: ctypes.CDLL, queue: object, under_way: dict[int, _CallKept]) -> None:
    address, rows = None, (ctypes.c_int64 * 4)()
    while address := library.tonari_serve(queue, address, rows):
        call, deliver_left, errors = under_way[address]
        try:
            if not errors:
                left = np.flatnonzero(call.states[rows[0] : rows[1]] == LEFT) + rows[0]
                deliver_left(left.tolist())
        except BaseException as error:  # handed to the caller, who raises it
            errors.append(error)
        del call, deliver_left, errors


def _end(
    library: ctypes.CDLL, queue: object, threads: list[threading.Thread], process: int
) -> None:
    if process != os.getpid():  # a fork has none of the threads, and maybe their lock
        return
    library.tonari_close(queue)
    for thread in threads:
        # Garbage may be collected on one of them.
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join()
