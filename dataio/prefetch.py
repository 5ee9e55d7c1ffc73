"""A bounded queue of ready batches, filled by one thread in order."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dataio.errors import StallError

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Make items ahead of their use.

    The producer thread writes the queue, the caller's thread reads it; nothing else is shared.

    Args:
        make: Makes the item of a step; called on the producer thread, in order.
        steps: The steps to make.
        depth: Items ready at most; 0 makes each when it is asked for, without a thread.
        timeout_s: Longest wait for one item.
    """

    def __init__(
        self, make: Callable[[int], T], steps: range, *, depth: int, timeout_s: float
    ) -> None:
        self._make = make
        self._steps = steps
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._queue: queue.Queue[T | BaseException] = queue.Queue(max(depth, 1))
        self._thread: threading.Thread | None = None
        if depth > 0 and len(steps):
            self._thread = threading.Thread(
                target=self._produce, name="tonari-prefetch", daemon=True
            )
            self._thread.start()

    def _produce(self) -> None:
        for step in self._steps:
            try:
                item: T | BaseException = self._make(step)
            except BaseException as error:  # handed to the caller, who raises it
                item = error
            self._put(item)
            if self._stopped.is_set() or isinstance(item, BaseException):
                return

    def _put(self, item: T | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[T]:
        for step in self._steps:
            if self._thread is None:
                yield self._make(step)
                continue
            try:
                item = self._queue.get(timeout=self._timeout_s)
            except queue.Empty:
                raise StallError(
                    f"step {step}: no batch was ready within {self._timeout_s:.0f} s; a transform "
                    "or the cache's disk hangs: look at the threads with py-spy dump, or raise "
                    "timeout_s"
                ) from None
            if isinstance(item, BaseException):
                raise item
            yield item

    @property
    def ready(self) -> int:
        """Items in the queue now."""
        return self._queue.qsize()

    def close(self) -> None:
        """Stop the thread and wait for it; idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            self._thread = None
            self._steps = range(0)
