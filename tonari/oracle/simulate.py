"""A step of all ranks, event by event: who computes, who waits for whom, what shares a link. Pure.

Every task (what a rank computes between two messages, or a message) takes some seconds by itself,
and asks for some of each resource that it uses: cores of a node, a link. Where the tasks of a
moment ask for more than a resource has, all of them go on more slowly, by as much.

Of a rank with a GPU, host and GPU are two: the host waits for batches, copies them and issues laps,
ahead of the GPU; the GPU computes laps that are issued, and waits for messages.
"""

import heapq
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from tonari.oracle.costs import Feed, Machine, Resource, TaskCost
from tonari.oracle.errors import OracleError
from tonari.oracle.record import Message
from tonari.oracle.stopwatch import Timed

AHEAD_STEPS = 1
"""That a host has issued at most before its GPU begins them: it queues a thousand kernels or so."""


@dataclass(frozen=True)
class Span:
    """Something that lasted; of a rank with a GPU, there.

    Attributes:
        rank: Whose.
        name: ``"compute"``, or what the rank waited for: ``"data"``, the ``"copy"`` of a batch,
            the ``"issuing"`` of kernels, or a message by its kind.
        start_s: From the beginning of the simulation.
        end_s: From there too.
        ranks: Of the message's group; of anything else none.
    """

    rank: int
    name: str
    start_s: float
    end_s: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """How steps went.

    Attributes:
        step_ends_s: Of each step, when the last rank was through.
        spans: What the ranks did, in the order of its end.
        behind_s: After the last step, until all has left that leaves beside the steps.
    """

    step_ends_s: tuple[float, ...]
    spans: tuple[Span, ...]
    behind_s: float = 0.0

    @property
    def steps_s(self) -> tuple[float, ...]:
        """Seconds of each step but the first, or of the only one."""
        ends = self.step_ends_s
        return tuple(end - start for start, end in pairwise(ends)) or ends

    @property
    def step_s(self) -> float:
        """Seconds of a step among others: the median."""
        return statistics.median(self.steps_s)

    def parts_s(self) -> dict[str, float]:
        """Split a rank's mean time: computing, and waiting for each kind of message."""
        ranks = {span.rank for span in self.spans}
        parts: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            parts[span.name] += (span.end_s - span.start_s) / len(ranks) / len(self.step_ends_s)
        return dict(parts)


def simulate(
    programs: Sequence[Timed], machine: Machine, *, feeds: Mapping[int, Feed] | None = None,
    steps: int = 3, seed: int = 0,
) -> Simulation:  # fmt: skip
    """Let all ranks make some steps.

    How long a rank computes between two messages is drawn anew each time from what was timed
    there: where ranks meet often, each meeting waits for the slower one.

    Args:
        programs: What each rank does in a step, in the order of the ranks.
        machine: What it takes.
        feeds: By rank, what makes its batches; the others wait for none.
        steps: How many, >= 1.
        seed: Of what is drawn.

    Raises:
        OracleError: If ranks wait for each other for ever.
    """
    return _Run(programs, machine, feeds or {}, steps, np.random.default_rng(seed)).finish()


@dataclass(eq=False)
class _Task:
    """Something under way.

    Attributes:
        left_s: Of what it takes by itself, as of `since_s`.
        demands: See `TaskCost`.
        busy: Of each demand, see `TaskCost`.
        then: What comes after it.
    """

    left_s: float
    demands: tuple[tuple[Resource, float], ...]
    busy: tuple[float, ...]
    then: Callable[[], None]
    since_s: float = 0.0
    slowdown: float = 1.0
    version: int = 0


@dataclass(eq=False)
class _Meeting:
    """A message: who is there, and who waits for it."""

    here: int = 0
    done: bool = False
    waiting: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Loader:
    """Where a rank's loader is.

    Attributes:
        ready: Batches that are made, and not yet asked for.
        is_busy: Whether one is being made.
        is_awaited: Whether the rank waits for one.
        sends: What is to leave, the first of which is under way.
    """

    feed: Feed
    ready: int = 0
    is_busy: bool = False
    is_awaited: bool = False
    sends: list[TaskCost] = field(default_factory=list)
    sending: _Task | None = None


@dataclass(eq=False)
class _Host:
    """Where the host of a rank's GPU is.

    Attributes:
        batches: That it has from its loader: one more than it issues steps of, as it copies one
            while the one before is trained.
        copied: Of these, that are on the GPU.
        begun: Steps that it issues, or has issued.
        issued: Steps, all of whose laps it has issued.
        laps: Of the next one, that it has.
        is_held: Whether it is as far ahead of the GPU as it may be.
        is_awaited: Whether the GPU waits for a batch.
        is_late: Whether the GPU waits for the rest of a lap.
    """

    batches: int = 0
    copied: int = 0
    begun: int = 0
    issued: int = 0
    laps: int = 0
    is_held: bool = False
    is_awaited: bool = False
    is_late: bool = False


@dataclass(eq=False)
class _Rank:
    """Where a rank is in its program; of one with a GPU, where that is."""

    program: Timed
    loader: _Loader | None = None
    host: _Host | None = None
    step: int = 0
    event: int = 0
    awaits: int = -1
    waits_since_s: float = 0.0
    counts: defaultdict[tuple[object, ...], int] = field(default_factory=lambda: defaultdict(int))
    # Keys of the messages of this step, in order, and these
    issued: list[tuple[tuple[object, ...], Message]] = field(default_factory=list)


class _Run:
    def __init__(
        self, programs: Sequence[Timed], machine: Machine, feeds: Mapping[int, Feed], steps: int,
        rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self._machine, self._steps, self._rng = machine, steps, rng
        self._ranks = [
            _Rank(
                program, _Loader(feeds[number]) if number in feeds else None,
                _Host() if program.issuing_s else None,
            )
            for number, program in enumerate(programs)
        ]  # fmt: skip
        self._now_s = 0.0
        self._meetings: defaultdict[tuple[object, ...], _Meeting] = defaultdict(_Meeting)
        # Demand of each task, and the share of its time that it is busy with the resource
        self._on: defaultdict[Resource, dict[_Task, tuple[float, float]]] = defaultdict(dict)
        self._queue: list[tuple[float, int, int, _Task]] = []
        self._number = 0
        self._spans: list[Span] = []
        self._ends_s = [0.0] * steps
        self._left = len(programs)

    def finish(self) -> Simulation:
        for number, rank in enumerate(self._ranks):
            if rank.host is not None:
                rank.host.is_awaited = True
            self._take_batch(number)
        while self._queue and self._left:
            self._go_on()
        if self._left:
            stuck = [number for number, rank in enumerate(self._ranks) if rank.step < self._steps]
            event = self._ranks[stuck[0]].event
            raise OracleError(
                f"ranks {stuck[:8]} wait for messages that nobody sends: rank {stuck[0]} at event "
                f"{event} of its step; traces of one job's ranks are needed, all of the same "
                "settings"
            )
        stepped_s = self._now_s
        loaders = [rank.loader for rank in self._ranks if rank.loader is not None]
        while self._queue and any(loader.sends for loader in loaders):
            self._go_on()
        return Simulation(
            step_ends_s=tuple(self._ends_s), spans=tuple(self._spans),
            behind_s=self._now_s - stepped_s,
        )  # fmt: skip

    def _go_on(self) -> None:
        """Go to the next end of a task, and begin what comes after it."""
        end_s, _, version, task = heapq.heappop(self._queue)
        if version == task.version:
            self._now_s = end_s
            self._end(task)
            task.then()

    # Loaders

    def _take_batch(self, number: int) -> None:
        """Let a rank begin its next step, or its host, once a batch is there."""
        rank = self._ranks[number]
        loader = rank.loader
        if rank.host is None:
            rank.waits_since_s = self._now_s
        if loader is None:
            self._fed(number)
            return
        loader.is_awaited = True
        self._hand_over(number, loader)
        # A host takes batches of steps to come, with which nothing leaves yet
        if loader.feed.sends and (rank.host is None or rank.host.batches < self._steps):
            loader.sends.extend(loader.feed.sends)
            self._send(loader)

    def _hand_over(self, number: int, loader: _Loader) -> None:
        """Give the rank the batch that it waits for, if there is one, and begin the next."""
        if loader.is_awaited and loader.ready:
            loader.ready -= 1
            loader.is_awaited = False
            self._fed(number)
        if not loader.is_busy and loader.ready < loader.feed.ahead + loader.is_awaited:
            loader.is_busy = True
            self._start(loader.feed.batch, partial(self._made, number, loader))

    def _made(self, number: int, loader: _Loader) -> None:
        loader.is_busy = False
        loader.ready += 1
        self._hand_over(number, loader)

    def _send(self, loader: _Loader) -> None:
        if loader.sending is None and loader.sends:
            loader.sending = self._start(loader.sends[0], partial(self._sent, loader))

    def _sent(self, loader: _Loader) -> None:
        loader.sending = None
        del loader.sends[0]
        self._send(loader)

    # Hosts of GPUs

    def _fed(self, number: int) -> None:
        """Go on with a batch that is there."""
        rank, host = self._ranks[number], self._ranks[number].host
        if host is None:
            self._note(number, "data", rank.waits_since_s)
            self._compute(number)
            return
        host.batches += 1
        if host.batches == host.copied + 1:
            self._copy(number, host)
        if host.batches < host.begun + 2:
            self._take_batch(number)
            return
        host.begun += 1
        if host.is_awaited and host.begun == rank.step + 1:
            self._note(number, "data", rank.waits_since_s)
            rank.waits_since_s = self._now_s
        self._begin_if_there(number, host)
        self._issue_lap(number, host)

    def _copy(self, number: int, host: _Host) -> None:
        cost = TaskCost(self._ranks[number].program.copy_s)
        self._start(cost, partial(self._copied, number, host))

    def _copied(self, number: int, host: _Host) -> None:
        host.copied += 1
        if host.batches > host.copied:
            self._copy(number, host)
        self._begin_if_there(number, host)

    def _begin_if_there(self, number: int, host: _Host) -> None:
        """Let a GPU begin a step that its host has begun, once it has the batch."""
        rank = self._ranks[number]
        if host.is_awaited and min(host.begun, host.copied) > rank.step:
            host.is_awaited = False
            self._note(number, "copy", rank.waits_since_s)
            self._compute(number)

    def _issue_lap(self, number: int, host: _Host) -> None:
        lap = self._draw(self._ranks[number].program.issuing_s)
        cost = self._machine.compute(number, lap[host.laps])
        self._start(cost, partial(self._lap_issued, number, host))

    def _lap_issued(self, number: int, host: _Host) -> None:
        rank = self._ranks[number]
        host.laps += 1
        if host.laps <= len(rank.program.events):
            self._issue_lap(number, host)
        else:
            host.issued, host.laps = host.issued + 1, 0
            host.is_held = host.issued > rank.step + AHEAD_STEPS
            if not host.is_held:
                self._take_batch(number)
        if host.is_late:
            host.is_late = False
            self._note(number, "issuing", rank.waits_since_s)
            self._go_on_with(number)

    def _is_issued(self, rank: _Rank, host: _Host) -> bool:
        return (host.issued, host.laps) > (rank.step, rank.event)

    # Ranks

    def _draw(self, laps: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
        return laps[self._rng.integers(len(laps))] if len(laps) > 1 else laps[0]

    def _compute(self, number: int) -> None:
        rank = self._ranks[number]
        seconds = self._draw(rank.program.laps_s)[rank.event]
        cost = self._machine.compute(number, seconds) if rank.host is None else TaskCost(seconds)
        self._start(cost, partial(self._computed, number, self._now_s))

    def _computed(self, number: int, since_s: float) -> None:
        self._note(number, "compute", since_s)
        rank, host = self._ranks[number], self._ranks[number].host
        if host is not None and not self._is_issued(rank, host):
            host.is_late, rank.waits_since_s = True, self._now_s
            return
        self._go_on_with(number)

    def _go_on_with(self, number: int) -> None:
        """Go on with what comes after a lap."""
        rank = self._ranks[number]
        events = rank.program.events
        if rank.event == len(events):
            self._step_done(number)
            return
        event = events[rank.event]
        rank.event += 1
        if isinstance(event, Message):
            self._issue(number, event)
            self._compute(number)
            return
        meeting = self._meetings[rank.issued[event.message][0]]
        if meeting.done:
            self._compute(number)
            return
        rank.waits_since_s = self._now_s
        rank.awaits = event.message
        meeting.waiting.append(number)

    def _step_done(self, number: int) -> None:
        rank = self._ranks[number]
        self._ends_s[rank.step] = max(self._ends_s[rank.step], self._now_s)
        rank.step += 1
        rank.event = 0
        rank.issued = []
        host = rank.host
        if rank.step == self._steps:
            self._left -= 1
        elif host is None:
            self._take_batch(number)
        else:
            host.is_awaited, rank.waits_since_s = True, self._now_s
            self._begin_if_there(number, host)
            if host.is_held:
                host.is_held = False
                self._take_batch(number)

    def _note(self, number: int, name: str, since_s: float, ranks: tuple[int, ...] = ()) -> None:
        if self._now_s > since_s:
            self._spans.append(Span(number, name, since_s, self._now_s, ranks))

    # Messages

    def _issue(self, number: int, message: Message) -> None:
        rank = self._ranks[number]
        ranks: tuple[int, ...]
        if message.kind in ("send", "receive"):
            assert message.peer is not None
            kind, ranks = "send", (number, message.peer)
            ranks = ranks if message.kind == "send" else ranks[::-1]
        else:
            kind, ranks = message.kind, message.ranks
        about = (kind == "send", ranks)
        key = (*about, rank.counts[about])
        rank.counts[about] += 1
        rank.issued.append((key, message))
        meeting = self._meetings[key]
        meeting.here += 1
        if meeting.here == len(ranks):
            cost = self._machine.message(kind, ranks, message.num_bytes)
            self._start(cost, partial(self._arrived, meeting))

    def _arrived(self, meeting: _Meeting) -> None:
        meeting.done = True
        for number in meeting.waiting:
            rank = self._ranks[number]
            message = rank.issued[rank.awaits][1]
            self._note(number, message.kind, rank.waits_since_s, message.ranks)
            self._compute(number)
        meeting.waiting.clear()

    # Tasks

    def _start(self, cost: TaskCost, then: Callable[[], None]) -> _Task:
        busy = cost.busy or (1.0,) * len(cost.demands)
        task = _Task(cost.seconds, cost.demands, busy, then, since_s=self._now_s)
        for (resource, demand), share in zip(cost.demands, busy, strict=True):
            self._on[resource][task] = demand, share
        self._pace({resource for resource, _ in cost.demands}, new=task)
        return task

    def _end(self, task: _Task) -> None:
        task.version = -1
        for resource, _ in task.demands:
            del self._on[resource][task]
        self._pace({resource for resource, _ in task.demands})

    def _pace(self, changed: set[Resource], new: _Task | None = None) -> None:
        """Find anew when tasks end that use what has changed."""
        tasks = {task: None for resource in changed for task in self._on[resource]}
        if new is not None:
            tasks[new] = None
        slowdowns: dict[Resource, float] = {}
        for task in tasks:
            slowest = 1.0
            for (resource, _), busy in zip(task.demands, task.busy, strict=True):
                if resource not in slowdowns:
                    slowdowns[resource] = self._slowdown(resource)
                slowest = max(slowest, busy * slowdowns[resource])
            if slowest == task.slowdown and task is not new:
                continue
            task.left_s -= (self._now_s - task.since_s) / task.slowdown
            task.since_s, task.slowdown = self._now_s, slowest
            task.version += 1
            self._number += 1
            end_s = self._now_s + max(task.left_s, 0.0) * slowest
            heapq.heappush(self._queue, (end_s, self._number, task.version, task))

    def _slowdown(self, resource: Resource) -> float:
        """Compute how many times longer a resource takes for what its tasks ask of it.

        A task that is busy with it for a part of its time is so for longer, the more slowly that
        goes, up to all of its time. Without that, tasks would have more of it than there is.
        """
        asked = self._on[resource].values()
        found = self._machine.slowdown(resource, sum(demand for demand, _ in asked))
        slowdown = 1.0
        while found > slowdown * (1 + 1e-9) and any(busy < 1 for _, busy in asked):
            slowdown = found
            wanted = (
                demand * slowdown if slowdown * busy < 1 else demand / busy
                for demand, busy in asked
            )
            found = self._machine.slowdown(resource, sum(wanted))
        return found
