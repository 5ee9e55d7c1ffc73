"""Threads of one client that begin together, and what they did.

Each thread writes to calls of its own; the thread that started them reads these when all have
ended.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter

import numpy as np
from numpy.typing import NDArray

from tonari.bench.storage.patterns.calls import TimedCalls


class Deadline:
    """A time after which nothing new is begun; `stop` makes it pass sooner.

    Args:
        limit_s: Seconds from now.
    """

    def __init__(self, limit_s: float) -> None:
        self.end = monotonic() + limit_s
        self._stopped = threading.Event()

    @property
    def passed(self) -> bool:
        return self._stopped.is_set() or monotonic() >= self.end

    def stop(self) -> None:
        """Let it pass now."""
        self._stopped.set()


@dataclass(frozen=True, kw_only=True)
class ReadTask:
    """What one thread does.

    Attributes:
        calls: The calls that it makes; no other thread uses them.
        work: Makes the calls; it yields before each one that may be omitted.
        again: Whether it may be done again, to fill the least time.
    """

    calls: TimedCalls
    work: Callable[[TimedCalls], Iterator[None]]
    again: bool = True


@dataclass(frozen=True, kw_only=True)
class TimedReads:
    """What a client did.

    Attributes:
        ops: float32[operations] by name: seconds that each took.
        num_bytes: Bytes read and written.
        num_read: Bytes read.
        seconds_of_thread: Seconds from the common start to the end of each thread.
        whole: Whether all was done before the deadline.
    """

    ops: Mapping[str, NDArray[np.float32]]
    num_bytes: int
    num_read: int
    seconds_of_thread: Sequence[float]
    whole: bool

    @property
    def seconds(self) -> float:
        return max(self.seconds_of_thread)


class _Threads:
    """What the threads of one call share; each writes its own entry of `ends`."""

    def __init__(self, tasks: Sequence[ReadTask], until: Deadline, least_s: float) -> None:
        self.tasks, self.until, self.least_s = tasks, until, least_s
        self.gate = threading.Barrier(len(tasks) + 1)
        self.ends = [0.0] * len(tasks)
        self.errors: list[BaseException] = []
        self.whole = True

    def work(self, number: int) -> None:
        task = self.tasks[number]
        self.gate.wait()
        try:
            least = perf_counter() + self.least_s
            while True:
                for _ in task.work(task.calls):
                    if self.until.passed:
                        self.whole = False
                        return
                if not task.again or perf_counter() >= least:
                    return
        except BaseException as error:
            # Raised again by the thread that waits for this one.
            self.errors.append(error)
            self.until.stop()
        finally:
            self.ends[number] = perf_counter()


def run_tasks(tasks: Sequence[ReadTask], *, until: Deadline, least_s: float = 0.0) -> TimedReads:
    """Do tasks, a thread each. Blocks until all have ended.

    Args:
        tasks: At least one.
        until: When to begin nothing new; it passes if a task fails.
        least_s: Seconds for which tasks that may be repeated are: less cannot be timed.

    Raises:
        BaseException: The first that a task raised.
    """
    shared = _Threads(tasks, until, least_s)
    threads = [
        # Daemons: a call that hangs must not keep the process from ending.
        threading.Thread(target=shared.work, args=(number,), daemon=True)
        for number in range(len(tasks))
    ]
    for thread in threads:
        thread.start()
    try:
        started = perf_counter()
        shared.gate.wait()
        for thread in threads:
            thread.join()
    except BaseException:
        # By a signal, for example: calls under way are not waited for.
        until.stop()
        raise
    if shared.errors:
        raise shared.errors[0]
    ops: defaultdict[str, list[float]] = defaultdict(list)
    for task in tasks:
        for name, seconds in task.calls.seconds.items():
            ops[name] += seconds
    return TimedReads(
        ops={name: np.array(seconds, np.float32) for name, seconds in ops.items()},
        num_bytes=sum(task.calls.num_bytes for task in tasks),
        num_read=sum(task.calls.num_read for task in tasks),
        seconds_of_thread=[end - started for end in shared.ends],
        whole=shared.whole,
    )
