"""Calls that may never return, made in threads that can be left behind.

The thread that calls writes a worker's inbox and reads its outbox; the worker does the reverse;
`CallDeadline` guards the list of idle workers with its lock.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

LATE_S = 10.0
IDLE_S = 2.0
"""A worker without work ends after this long."""


class _CallOutcome(Generic[T]):
    """What a call came to."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.error: BaseException | None = None
        try:
            self.value = work()
        except BaseException as error:
            self.error = error


class _Worker:
    def __init__(self, deadline: "CallDeadline") -> None:
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.abandoned = False
        self._deadline = deadline
        # A daemon: a call that hangs in the kernel must not keep the process from ending.
        threading.Thread(target=self._run, name="source-read", daemon=True).start()

    def _run(self) -> None:
        while not self.abandoned:
            try:
                work = self.inbox.get(timeout=IDLE_S)
            except Empty:
                if self._deadline.retire(self):
                    return
                continue
            work()
            # Nothing of it is kept while the worker waits.
            del work


class CallDeadline:
    """Gives up waiting for a call that does not return; its thread ends when the call does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def call(
        self, work: Callable[[], T], *, timeout_s: float, late: Callable[[], object] = int
    ) -> T:
        """Return what ``work`` returns, or raise what it raises. Blocks for ``timeout_s`` at most.

        It calls ``late`` after `LATE_S`, if that is sooner.

        Raises:
            TimeoutError: If it did not return in time. It may still go on.
        """
        outbox: SimpleQueue[_CallOutcome[T]] = SimpleQueue()
        with self._lock:
            worker = self._idle.pop() if self._idle else _Worker(self)
        worker.inbox.put(lambda: outbox.put(_CallOutcome(work)))
        try:
            left_s = max(timeout_s - LATE_S, 0)
            try:
                outcome = outbox.get(timeout=timeout_s - left_s)
            except Empty:
                if not left_s:
                    raise
                late()
                outcome = outbox.get(timeout=left_s)
        except BaseException as error:
            worker.abandoned = True
            if isinstance(error, Empty):
                raise TimeoutError(f"no answer in {timeout_s:g} s") from None
            raise
        with self._lock:
            self._idle.append(worker)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def retire(self, worker: _Worker) -> bool:
        """Let a worker end that has no work; not one that is about to get some."""
        with self._lock:
            if worker in self._idle:
                self._idle.remove(worker)
                return True
        return worker.abandoned
