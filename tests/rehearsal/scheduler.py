"""All threads of a rehearsal, one at a time, in an order drawn from a seed and in virtual time.

A thread runs until it comes to a *point*: it takes a lock, sleeps, sends, receives, or touches a
file. There the scheduler draws who goes on. A thread that cannot go on waits for a condition; where
nobody can, the clock moves on to the next time that somebody waits for. So a seed stands for one
course of events, however busy the machine is: `Scheduler.digest` is a hash of it.

What puts it in place of `threading` and `time` is in `threads`.
"""

import _thread
import itertools
import random  # noqa: TID251 - of no sample: of the order of threads
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_128

TICK_S = 1e-6
"""What each point takes of virtual time, so that a loop that polls gets on."""

SHORTEST_SLEEP_S = 1e-4
"""A thread that polls is looked at no more often: a message takes about as long."""


class DeadlockError(AssertionError):
    """No thread can go on, and none waits for a time."""


@dataclass(eq=False)
class Task:
    """A thread under the scheduler.

    Attributes:
        name: In the course of events: no address, no number of the system.
        rank: Whose it is: that of the thread which started it.
        until: What it waits for; None: it can go on.
        wake_s: When it goes on at the latest.
        frozen: It never goes on: its process was killed.
        resumes_s: It does not go on before: its process was stopped.
    """

    name: str
    rank: int
    baton: Any = field(default_factory=_thread.allocate_lock)
    until: Callable[[], bool] | None = None
    wake_s: float = float("inf")
    doing: str = ""
    frozen: bool = False
    resumes_s: float = 0.0
    done: bool = False

    def __post_init__(self) -> None:
        self.baton.acquire()


class Scheduler:
    """Draws which thread goes on at each point.

    Args:
        seed: Of all that is drawn.
        on_point: Called at each point with the rank and what it does: what is to fail, fails here.

    Attributes:
        now: Virtual time, seconds.
        wall_s: What the clock of the day says at time 0.
        latest_s: When all must be over.
        num_points: Passed so far.
        tasks: Threads that have begun and not ended.
    """

    def __init__(
        self, seed: int, *, on_point: Callable[[Task, str], None] = lambda task, what: None
    ) -> None:
        self.random = random.Random(seed)
        self.now, self.wall_s, self.latest_s = 0.0, 1.8e9, 0.0
        self.num_points = 0
        self.tasks: list[Task] = []
        self.on_point = on_point
        self.thread_type = type("Thread", (Thread,), {"_scheduler": self})
        # How gladly a thread goes on by itself: one seed explores few switches, another many.
        self._stays = self.random.choice([0.0, 0.5, 0.9, 0.98])
        self._hash = xxh3_128()
        self._numbers, self.thread_numbers = itertools.count(), itertools.count()
        self._current: dict[int, Task] = {}
        self._main = _thread.allocate_lock()
        self._error: BaseException | None = None

    def digest(self) -> str:
        """Hash the course of events so far."""
        return self._hash.hexdigest()

    def task(self) -> Task | None:
        """The task of the calling thread; None: it is not under the scheduler."""
        return self._current.get(_thread.get_ident())

    def spawn(
        self, function: Callable[[], None], *, name: str, rank: int,
        thread: "Thread | None" = None,
    ) -> Task:  # fmt: skip
        """Begin a thread, which first runs when the scheduler draws it.

        Args:
            function: What it does.
            name: Its name, before a number.
            rank: Whose it is.
            thread: Of `thread_type`: what it is to Python; None: one is made.
        """
        task = Task(f"{name}/{next(self._numbers)}", rank)
        self.tasks.append(task)
        known = thread or self.thread_type(name=task.name)
        known._task = task

        def body() -> None:
            ident = _thread.get_ident()
            self._current[ident] = task
            threading._active[ident] = known  # type: ignore[attr-defined]
            task.baton.acquire()
            try:
                function()
            finally:
                task.done = True
                self.tasks.remove(task)
                del self._current[ident], threading._active[ident]  # type: ignore[attr-defined]
                self._hand_over(None)

        _thread.start_new_thread(body, ())
        return task

    def run(self, *, until: Callable[[], bool], latest_s: float) -> None:
        """Run the threads that were begun until a condition holds; called by no task.

        Raises:
            DeadlockError: If nobody can go on before, or it does not hold at this time.
        """
        self._until, self.latest_s = until, latest_s
        self._main.acquire()
        self._hand_over(None)
        self._main.acquire()
        self._main.release()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def point(self, what: str) -> None:
        """Come to a point: somebody else may go on first."""
        task = self.task()
        if task is None:
            return
        self._pass(task, what)
        if self._stays < self.random.random() or self._is_stopped(task):
            self._hand_over(task)

    def wait(self, until: Callable[[], bool], what: str, *, timeout_s: float | None = None) -> bool:
        """Let others go on until a condition holds or the time is over; say whether it does."""
        task = self.task()
        assert task is not None, f"{what}: a thread of before the rehearsal would wait for ever"
        self._pass(task, what)
        if not self._is_stopped(task) and until():
            if self._stays < self.random.random():
                self._hand_over(task)
            if until():
                return True
        task.until = until
        task.wake_s = float("inf") if timeout_s is None else self.now + timeout_s
        self._hand_over(task)
        task.until, task.wake_s = None, float("inf")
        return until()

    def sleep(self, duration_s: float) -> None:
        """Let virtual time go by."""
        self.wait(lambda: False, "sleep", timeout_s=max(duration_s, SHORTEST_SLEEP_S))

    def freeze(self, rank: int) -> None:
        """End a rank's threads where they are, as a kill does: nothing of theirs runs any more."""
        for task in self.tasks:
            task.frozen |= task.rank == rank
        self.tasks = [task for task in self.tasks if not task.frozen]

    def suspend(self, rank: int, duration_s: float) -> None:
        """Stop a rank's threads where they are for a while."""
        for task in self.tasks:
            if task.rank == rank:
                task.resumes_s = self.now + duration_s

    def _is_stopped(self, task: Task) -> bool:
        return task.frozen or self.now < task.resumes_s

    def _pass(self, task: Task, what: str) -> None:
        self.num_points += 1
        self.now += TICK_S
        task.doing = what
        self._hash.update(f"{task.name} {what}\n".encode())
        self.on_point(task, what)

    def _hand_over(self, mine: Task | None) -> None:
        """Draw who goes on; blocks the calling thread until it is drawn again."""
        try:
            drawn = self._draw()
        except BaseException as error:
            self._error = error
            drawn = None
        if drawn is mine and mine is not None and not mine.frozen:
            return
        if drawn is None:
            self._main.release()
        else:
            drawn.baton.release()
        if mine is not None:
            mine.baton.acquire()

    def _draw(self) -> Task | None:
        if self._until():
            return None
        while True:
            now = self.now
            ready = [
                task
                for task in self.tasks
                if task.resumes_s <= now
                and (task.until is None or task.wake_s <= now or task.until())
            ]
            if ready:
                return ready[self.random.randrange(len(ready))] if len(ready) > 1 else ready[0]
            wake_s = min(
                (t.resumes_s if self.now < t.resumes_s else t.wake_s for t in self.tasks),
                default=float("inf"),
            )
            if wake_s > self.latest_s:
                doing = "; ".join(f"{task.name} {task.doing}" for task in self.tasks)
                raise DeadlockError(
                    f"nobody has come to an end at {self.now:.6f} s, of {self.latest_s:.6f}: "
                    f"{doing or 'no thread'}"
                )
            self.now = max(self.now, wake_s)


class Thread(threading.Thread):
    """A thread that the scheduler runs, if one of its own starts it."""

    _scheduler: Scheduler
    _task: Task | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(self._scheduler.thread_numbers)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        # Pools join a set of threads: in an order that is not that of their addresses.
        return self._number

    def start(self) -> None:
        parent = self._scheduler.task()
        if parent is None:
            super().start()
            return
        self._scheduler.point(f"start {self._its_name()}")
        self._started.set()  # type: ignore[attr-defined]
        rank = parent.rank
        self._scheduler.spawn(self.run, name=self._its_name(), rank=rank, thread=self)

    def _its_name(self) -> str:
        return self.name.split("-")[0] if "Thread" in self.name else self.name

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        if task is None:
            super().join(timeout)
            return
        self._scheduler.wait(lambda: task.done, f"join {task.name}", timeout_s=timeout)

    def is_alive(self) -> bool:
        return super().is_alive() if self._task is None else not self._task.done

    @property
    def ident(self) -> int | None:
        return id(self)
