"""The scheduler in place of what code takes from `threading` and `time`, within `rehearsed`.

Locks, threads, clocks and sleeps made within it are the scheduler's; those of before are as they
were.
"""

import concurrent.futures.thread
import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import dataio.source.storage.deadline
from tests.rehearsal.scheduler import Scheduler


class _Lock:
    """A lock whose waits are the scheduler's; also taken and given back outside of it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._scheduler.task() is not None:
            if blocking:
                limit_s = None if timeout < 0 else timeout
                if not self._scheduler.wait(lambda: not self._held, "lock", timeout_s=limit_s):
                    return False
            else:
                self._scheduler.point("try lock")
        if self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._held = False


@contextlib.contextmanager
def replaced(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put values in the places of attributes, within."""
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(mock.patch.object(*place))
        yield


@contextlib.contextmanager
def rehearsed(scheduler: Scheduler) -> Iterator[None]:
    """Put the scheduler in place of threads, locks, clocks and sleeps."""

    def lock() -> _Lock:
        return _Lock(scheduler)

    def clock() -> float:
        return scheduler.now

    places: list[tuple[Any, str, Any]] = [
        (threading, "Lock", lock),
        (threading, "_allocate_lock", lock),
        (threading, "RLock", threading._PyRLock),  # type: ignore[attr-defined]
        (threading, "_CRLock", None),
        (threading, "Thread", scheduler.thread_type),
        *(
            (module, "SimpleQueue", queue._PySimpleQueue)  # type: ignore[attr-defined]
            for module in (queue, dataio.source.storage.deadline)
        ),
        # Of the end of the interpreter; who is killed while holding it would hold it for all.
        (concurrent.futures.thread, "_global_shutdown_lock", contextlib.nullcontext()),
        (time, "sleep", scheduler.sleep),
        *((time, name, clock) for name in ("monotonic", "perf_counter", "thread_time")),
        (time, "process_time", clock),
        (time, "time", lambda: scheduler.wall_s + scheduler.now),
        (threading, "_time", clock),
        (queue, "time", clock),
    ]
    with replaced(places):
        yield
