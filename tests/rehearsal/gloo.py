"""What `dataio.live` takes of torch.distributed, TCP and shared files, on a rehearsal's network.

A connection ends with a process, or when a rank shuts it. Where a machine loses its power, or a
network falls in two, nothing arrives any more, and nobody is told.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import dataio.job.connect
import dataio.job.generations
import dataio.job.live
from dataio.base.errors import WorldError
from dataio.job.meeting import Meeting
from dataio.job.numbers import JOIN
from dataio.job.sockets import Sockets
from dataio.world import Topology, World
from tests.rehearsal.network import Network, Rank, Route
from tests.rehearsal.scheduler import Scheduler
from tests.rehearsal.threads import replaced

CLOSED = "Connection closed by peer"
TAG = 7
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
LIVE = (dataio.job.connect, dataio.job.generations, dataio.job.live)


class Connections(Network):
    """The network of a group's ranks, each pair of which has a connection."""

    def __init__(self, gloo: "Gloo", group: "Group", *, timeout_s: float) -> None:
        super().__init__(gloo.scheduler, timeout_s=timeout_s)
        self._gloo, self._group = gloo, group

    def deliver(self, route: Route) -> None:
        if self._gloo.are_linked(*self._ranks(route)):
            super().deliver(route)

    def check(self, route: Route) -> None:
        me, (source, dest) = self._gloo.rank(), self._ranks(route)
        closed = self._group.closed
        other = dest if me == source else source
        ended = other in closed and self._gloo.are_linked(me, other)
        # What was sent before the connection ended still arrives.
        if me in closed or (ended and (me == source or not self._under_way[route])):
            raise WorldError(f"rank {me}: {CLOSED}: rank {other}")

    def lose(self, rank: int) -> None:
        """Lose some of what a rank has sent."""
        for route, messages in self._under_way.items():
            if self._ranks(route)[0] == rank and self.scheduler.random.random() < 0.5:
                messages.clear()

    def _ranks(self, route: Route) -> tuple[int, int]:
        return self._group.members[route[0]], self._group.members[route[1]]


class Group:
    """Ranks that have met at a store.

    Args:
        gloo: Whose it is.
        master: The rank that has the store.

    Attributes:
        members: Ranks by their number in the group.
        keys: Of the store.
        closed: Those whose connections have ended.
        networks: Of the world, and of torch.
    """

    def __init__(self, gloo: "Gloo", master: int) -> None:
        self.master, self.number = master, len(gloo.groups)
        gloo.groups.append(self)
        self.members: dict[int, int] = {}
        self.keys: set[str] = set()
        self.closed: set[int] = set()
        self.networks = [Connections(gloo, self, timeout_s=gloo.timeout_s) for _ in range(2)]


class Gloo:
    """All groups of a job's ranks, and what keeps ranks apart.

    Args:
        scheduler: Of the rehearsal.
        nodes: Ranks of each node.
        timeout_s: Longest wait for another rank.

    Attributes:
        groups: In the order in which they were begun; launchers make some.
        dead: Ranks that were killed.
        halves: Ranks of one half while the network has fallen in two; and when it is whole again.
        late_s: Until when a rank sees the shared directory as it was.
    """

    def __init__(self, scheduler: Scheduler, nodes: Sequence[int], *, timeout_s: float) -> None:
        self.scheduler, self.timeout_s = scheduler, timeout_s
        self.node_of_rank = [node for node, ranks in enumerate(nodes) for _ in range(ranks)]
        self.groups: list[Group] = []
        self.dead: set[int] = set()
        self.halves: tuple[frozenset[int], float] = (frozenset(), 0.0)
        self.late_s: defaultdict[int, float] = defaultdict(float)
        self._of: dict[int, tuple[Group, World, World]] = {}
        self._joined: defaultdict[int, set[int]] = defaultdict(set)
        # Of each rank the group that its launcher makes, and the ranks that it starts.
        ranks = range(len(self.node_of_rank))
        self._launched = dict.fromkeys(ranks, (Group(self, 0), ranks))

    def add_node(self) -> int:
        """Add a node of one rank, which a launcher of its own starts to join the job."""
        rank = len(self.node_of_rank)
        self.node_of_rank.append(max(self.node_of_rank) + 1)
        self._launched[rank] = Group(self, rank), range(rank, rank + 1)
        return rank

    def rank(self) -> int:
        """The rank that runs."""
        task = self.scheduler.task()
        assert task is not None, "ranks alone use it"
        return task.rank

    def group(self) -> Group:
        """The default group of the rank that runs."""
        return self._of[self.rank()][0]

    def are_linked(self, one: int, other: int) -> bool:
        half, until_s = self.halves
        return (one in half) == (other in half) or until_s <= self.scheduler.now

    def kill(self, rank: int, *, silently: bool) -> None:
        """Note that a rank was killed; silently: with its machine, which cannot say so."""
        self.dead.add(rank)
        if not silently:
            self._close(rank, self.groups)

    def _close(self, rank: int, groups: Sequence[Group]) -> None:
        for group in groups:
            if rank in group.members.values() and rank not in group.closed:
                group.closed.add(rank)
                for network in group.networks:
                    network.lose(rank)

    # In place of torch.distributed.

    def init_process_group(
        self, backend: str, *, timeout: timedelta, store: Any = None, rank: int = -1,
        world_size: int = 0,
    ) -> None:  # fmt: skip
        me, limit_s = self.rank(), timeout.total_seconds()
        launched, ranks = self._launched[me]
        group = launched if store is None else store.group
        place, size = (ranks.index(me), len(ranks)) if store is None else (rank, world_size)
        group.members[place] = me
        self._joined[me].add(group.number)

        def has_failed() -> bool:
            return bool(group.closed)

        def is_whole() -> bool:
            ranks = group.members.values()
            return len(ranks) == size and all(self.are_linked(me, rank) for rank in ranks)

        self.scheduler.wait(lambda: has_failed() or is_whole(), "connect", timeout_s=limit_s)
        if has_failed() or not is_whole():
            why = CLOSED if has_failed() else f"timed out after {limit_s} s"
            raise RuntimeError(f"Gloo connectFullMesh failed: {why}")
        nodes = [str(self.node_of_rank[group.members[each]]) for each in range(size)]
        topology = Topology.from_names(nodes, by_host=True)
        worlds = [
            World(Rank(network, place, size), topology, timeout_s=limit_s)
            for network in group.networks
        ]
        self._of[me] = group, worlds[0], worlds[1]

    def is_initialized(self) -> bool:
        return self.rank() in self._of

    def destroy_process_group(self) -> None:
        del self._of[self.rank()]

    def all_reduce(self, values: torch.Tensor) -> None:
        self.scheduler.point("sum")
        found = self._together(
            lambda world: world.allreduce(values.numpy(), op="sum", doing="gloo sums")
        )
        values.copy_(torch.from_numpy(found))

    def send(self, values: torch.Tensor, dst: int) -> None:
        self.scheduler.point("take over")
        self._together(lambda world: world.wait(
            [world.isend(values.numpy(), dest=dst, tag=TAG)], peers=[dst], doing="gloo sends"
        ))  # fmt: skip

    def recv(self, values: torch.Tensor, src: int) -> None:
        self.scheduler.point("take over")
        self._together(lambda world: world.wait(
            [world.irecv(values.numpy(), source=src, tag=TAG)], peers=[src], doing="gloo receives"
        ))  # fmt: skip

    def _together(self, verb: Callable[[World], Any]) -> Any:
        try:
            return verb(self._of[self.rank()][2])
        except WorldError as error:
            raise RuntimeError(f"[gloo/transport/tcp/pair.cc] {error}") from error

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Put all this in place of what the shipped code takes from elsewhere, within."""
        gloo, scheduler = self, self.scheduler

        class Store:
            def __init__(
                self, host: str, port: int, size: int, *, timeout: timedelta,
                is_master: bool = False, wait_for_workers: bool = True,
            ) -> None:  # fmt: skip
                me = gloo.rank()
                self.group = Group(gloo, me) if is_master else gloo.groups[port]
                self.port, master = self.group.number, self.group.master
                if not scheduler.wait(
                    lambda: master not in gloo.dead and gloo.are_linked(me, master),
                    "connect to the store", timeout_s=timeout.total_seconds(),
                ):  # fmt: skip
                    raise RuntimeError("the client socket has timed out")

            def set(self, key: str, value: str) -> None:
                self.group.keys.add(key)

            def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
                me, group = gloo.rank(), self.group
                if not scheduler.wait(
                    lambda: group.master not in gloo.dead and gloo.are_linked(me, group.master)
                    and group.keys >= {*keys},
                    "wait for the store", timeout_s=timeout.total_seconds(),
                ):  # fmt: skip
                    raise RuntimeError("the client socket has timed out")

            def check(self, keys: Sequence[str]) -> bool:
                me, group = gloo.rank(), self.group
                is_there = group.master not in gloo.dead and gloo.are_linked(me, group.master)
                return is_there and group.keys >= {*keys}

        @contextlib.contextmanager
        def noting(sockets: Any, *, watched: bool = False) -> Iterator[None]:
            before = set(gloo._joined[gloo.rank()])
            try:
                yield
            finally:
                sockets._noted += sorted(gloo._joined[gloo.rank()] - before)

        def are_cut(sockets: Any) -> bool:
            me, groups = gloo.rank(), [gloo.groups[number] for number in sockets._noted]
            return any(
                me not in group.closed and any(gloo.are_linked(me, rank) for rank in group.closed)
                for group in groups
            )

        def shut(sockets: Any) -> None:
            scheduler.point("shut")
            gloo._close(gloo.rank(), [gloo.groups[number] for number in sockets._noted])
            sockets._noted.clear()

        def world(*, timeout_s: float) -> World:
            made = gloo._of[gloo.rank()][1]
            made.barrier(doing="finding nodes")
            return made

        class Environ(dict[str, str]):
            def get(self, name: str, default: Any = None) -> Any:
                joins = gloo._launched[gloo.rank()][0] is not gloo.groups[0]
                return ("1" if joins else None) if name == JOIN else super().get(name, default)

        class Seen(SeenLate):
            _gloo = gloo

        meeting = partial(Seen, clock=lambda: scheduler.now, sleep=scheduler.sleep)
        places: list[tuple[Any, str, Any]] = [
            (dataio.job.generations, "os", SimpleNamespace(environ=Environ(LAUNCHED))),
            (Sockets, "noting", noting), (Sockets, "shut", shut), (Sockets, "are_cut", are_cut),
            *((module, name, its)
              for name, its in (("dist", gloo), ("TCPStore", Store), ("torch_world", world),
                                ("Meeting", meeting))
              for module in LIVE if hasattr(module, name)),
        ]  # fmt: skip
        with replaced(places):
            yield


class SeenLate(Meeting):
    """A meeting whose directory a rank may see as it was a while ago, as NFS shows it."""

    _gloo: Gloo

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._was: dict[str, Any] = {}

    @property
    def is_called(self) -> bool:
        return bool(self._as_seen("called", lambda: Meeting.is_called.fget(self), False))  # type: ignore[attr-defined]

    def named(self, prefix: str) -> set[int]:
        found: set[int] = self._as_seen(prefix, lambda: Meeting.named(self, prefix), set())
        return found

    def read(self) -> list[int] | None:
        found: list[int] | None = self._as_seen("members", lambda: Meeting.read(self), None)
        return found

    def _as_seen(self, what: str, look: Callable[[], Any], first: Any) -> Any:
        if self._gloo.late_s[self._rank] <= self._gloo.scheduler.now:
            self._was[what] = look()
        return self._was.get(what, first)
