"""Batches under way: begun in order, made on other threads, handed over in order."""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class in Python 3.10
from typing import Generic, Protocol, TypeVar

from dataio.base.errors import StallError

T = TypeVar("T")
W = TypeVar("W")
T_co = TypeVar("T_co", covariant=True)


class UnderWay(Protocol[T_co]):
    """What is being made: a `Future`, or what is awaited as one."""

    def done(self) -> bool: ...
    def result(self, timeout: float, /) -> T_co: ...
    def exception(self, timeout: float, /) -> BaseException | None: ...


class Prefetcher(Generic[W, T]):
    """Keep some items under way while the caller uses the last one.

    Only the caller's thread touches the queue: what is under way is made by whoever `begin` gave it
    to.

    Args:
        begin: Starts the making of an item.
        work: What to make, in order.
        depth: Items under way beside the one asked for, >= 0.
        may_wait: Whether `begin` would wait for something now; then it is not called while other
            items are under way.
        timeout_s: Longest wait for one item.
    """

    def __init__(
        self,
        begin: Callable[[W], UnderWay[T]],
        work: Iterator[W],
        *,
        depth: int,
        timeout_s: float,
        may_wait: Callable[[W], bool] = lambda _: False,
    ) -> None:
        self._begin = begin
        self._work = work
        self._may_wait = may_wait
        self._next: W | None = None
        self._depth = depth
        self._timeout_s = timeout_s
        self._under_way: deque[UnderWay[T]] = deque()
        self._closed, self._process = False, os.getpid()

    def __iter__(self) -> Iterator[T]:
        while not self._closed:
            while len(self._under_way) <= self._depth and self._has_next():
                self._under_way.append(self._begin_next())
            if not self._under_way:
                return
            yield self._result()

    def _has_next(self) -> bool:
        """Whether there is an item to be begun now."""
        if self._next is None:
            self._next = next(self._work, None)
        return self._next is not None and not (self._under_way and self._may_wait(self._next))

    def _begin_next(self) -> UnderWay[T]:
        work, self._next = self._next, None
        assert work is not None, "there is one"
        return self._begin(work)

    def _result(self) -> T:
        future = self._under_way[0]  # after a Ctrl-C `close` waits for it
        try:
            made = future.result(self._timeout_s)
        except FutureTimeoutError:
            if future.done():
                raise
            raise StallError(
                f"loader: no batch was ready within {self._timeout_s:.0f} s, expected one every "
                "few; a transform or the cache's disk hangs: look at the threads with py-spy dump, "
                "or raise timeout_s"
            ) from None
        if self._under_way:  # a signal's handler may have closed it meanwhile
            self._under_way.popleft()
        return made

    @property
    def ready(self) -> int:
        """Items that are ready now."""
        return sum(future.done() for future in [*self._under_way])  # any thread may look

    def close(self) -> None:
        """Begin nothing more, and wait for what is under way; idempotent."""
        self._closed = True
        with contextlib.suppress(FutureTimeoutError):
            # A fork has none of the threads that would end it.
            for future in self._under_way if os.getpid() == self._process else ():
                future.exception(self._timeout_s)
        self._under_way.clear()
