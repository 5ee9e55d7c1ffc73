"""Messages between the ranks of a rehearsal: they take a drawn time, and are lost with their ranks.

A sender's bytes are taken when it sends, and compared when it may use them again: who changes what
is still being sent is found.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from dataio.base.errors import WorldError
from dataio.world.base import Bytes
from dataio.world.topology import Topology
from dataio.world.world import World
from tests.rehearsal.scheduler import Scheduler

Route = tuple[int, int, int]
"""Source, destination and tag."""

USUAL_S, LATE_S = 50e-6, 0.015
LATE_FRACTION = 0.01


class _Message:
    def __init__(self, data: Bytes, arrives_s: float) -> None:
        self.lent, self.data, self.arrives_s = data, data.tobytes(), arrives_s


class Network:
    """What all ranks of one start of a job share.

    Args:
        scheduler: Draws how long messages take.
        timeout_s: Of the ranks' worlds, in virtual time.

    Attributes:
        ended: Why the job was ended by one of its ranks; None: it was not.
    """

    def __init__(self, scheduler: Scheduler, *, timeout_s: float) -> None:
        self.scheduler, self.timeout_s = scheduler, timeout_s
        self.ended: str | None = None
        self._under_way: defaultdict[Route, deque[_Message]] = defaultdict(deque)
        self._posted: defaultdict[Route, deque[_Receive]] = defaultdict(deque)

    def worlds(self, nodes: Sequence[int]) -> list[World]:
        """Make the worlds of all ranks."""
        topology = Topology.from_layout(nodes)
        return [
            World(Rank(self, rank, topology.world_size), topology, timeout_s=self.timeout_s)
            for rank in range(topology.world_size)
        ]

    def send(self, data: Bytes, route: Route) -> "_Sent":
        """Begin to send."""
        draw = self.scheduler.random
        late = draw.random() < LATE_FRACTION
        arrives_s = self.scheduler.now + draw.expovariate(1 / (LATE_S if late else USUAL_S))
        sent, before = self._under_way[route], self._under_way[route]
        message = _Message(data, max([arrives_s, *(each.arrives_s for each in before)]))
        sent.append(message)
        # The medium may copy what is small, and waits for the receiver with what is not.
        return _Sent(self, message, route, is_copied=len(data) < 4096 and draw.random() < 0.5)

    def receive(self, into: Bytes, route: Route) -> "_Receive":
        """Begin to receive."""
        request = _Receive(self, route, into)
        self._posted[route].append(request)
        return request

    def deliver(self, route: Route) -> None:
        """Hand over what has arrived by now: the oldest receive takes the oldest message."""
        under_way, posted = self._under_way[route], self._posted[route]
        while under_way and posted and under_way[0].arrives_s <= self.scheduler.now:
            posted.popleft().take(under_way.popleft())

    def is_under_way(self, message: _Message, route: Route) -> bool:
        return any(each is message for each in self._under_way[route])

    def check(self, route: Route) -> None:
        """Raise what ended the job, or a connection."""
        if self.ended is not None:
            raise WorldError(self.ended)


class _Sent:
    def __init__(
        self, network: Network, message: _Message, route: Route, *, is_copied: bool
    ) -> None:
        self._network, self._message, self._route = network, message, route
        self._is_copied = is_copied
        self._done = False

    def test(self) -> bool:
        if self._done:
            return True
        self._network.scheduler.point("test a send")
        self._network.check(self._route)
        self._network.deliver(self._route)
        self._done = self._is_copied or not self._network.is_under_way(self._message, self._route)
        if self._done:
            assert self._message.lent.tobytes() == self._message.data, (
                f"{self._route}: what was being sent was changed before it had been sent"
            )
        return self._done


class _Receive:
    def __init__(self, network: Network, route: Route, into: Bytes) -> None:
        self._network, self._route, self._into, self._done = network, route, into, False

    def test(self) -> bool:
        self._network.scheduler.point("test a receive")
        self._network.check(self._route)
        self._network.deliver(self._route)
        return self._done

    def take(self, message: _Message) -> None:
        source, dest, tag = self._route
        if len(message.data) != len(self._into):
            raise WorldError(
                f"rank {dest}: received {len(message.data)} bytes from rank {source} with tag "
                f"{tag}, expected {len(self._into)}"
            )
        self._into[:] = np.frombuffer(message.data, np.uint8)
        self._done = True


class Rank:
    """The transport of one rank."""

    threaded = True

    def __init__(self, network: Network, rank: int, world_size: int) -> None:
        self._network, self.rank, self.world_size = network, rank, world_size

    def isend(self, data: Bytes, *, dest: int, tag: int) -> _Sent:
        self._network.scheduler.point(f"send {len(data)} to {dest} as {tag}")
        route = self.rank, dest, tag
        self._network.check(route)
        return self._network.send(data, route)

    def irecv(self, into: Bytes, *, source: int, tag: int) -> _Receive:
        self._network.scheduler.point(f"receive {len(into)} from {source} as {tag}")
        route = source, self.rank, tag
        self._network.check(route)
        return self._network.receive(into, route)

    def abort(self, message: str) -> NoReturn:
        self._network.ended = self._network.ended or message
        raise WorldError(message)

    def close(self) -> None:
        return None
