"""What computation and messages take on a cluster: nodes that were probed, and links between."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from tonari.oracle.cluster.cluster import Cluster
from tonari.oracle.cluster.links import Route, lay_route
from tonari.oracle.cluster.probed import ProbedCluster
from tonari.oracle.costs import Resource, TaskCost
from tonari.oracle.machine import MeasuredCurve, OneNode
from tonari.oracle.probe.messages import EXCHANGE


@dataclass(frozen=True)
class _Between:
    """Messages between nodes, by their bytes: seconds, and processors of all ranks together."""

    seconds: MeasuredCurve
    cores: MeasuredCurve
    nodes: int


class Nodes:
    """Nodes that are joined by links; each is as the one that was probed.

    A message takes what it takes among as many of a node's ranks, the work of processors, or what
    its links take, whichever is more; of a kind that was not timed, such as a send where a node has
    one rank, the links alone. Of a group that lies on nodes as one that was timed between them, it
    takes what was timed.

    Args:
        cluster: The nodes and links.
        node: What a node's ranks and the messages among them take; None: only links are counted.
        cores_of: Ranks that share processors, by rank: those of a node, unless something else is
            said.
    """

    def __init__(
        self, cluster: Cluster, node: OneNode | None, *, cores_of: tuple[int, ...] = ()
    ) -> None:
        self.cluster, self._node, self._cores_of = cluster, node, cores_of
        self._route = lru_cache(maxsize=None)(self._lay)
        self._timed_as = lru_cache(maxsize=None)(self._find)
        between = cluster.messages if isinstance(cluster, ProbedCluster) else ()
        self._between = {(each.kind, each.ranks, each.nodes): each for each in between}

    def _lay(self, kind: str, ranks: tuple[int, ...]) -> Route:
        return lay_route(self.cluster, kind, ranks)

    def _find(self, kind: str, ranks: tuple[int, ...]) -> "_Between | None":
        """Find messages that were timed between as many nodes, with as many ranks on each."""
        counts = Counter(rank // self.cluster.ranks_per_node for rank in ranks)
        if len(set(counts.values())) > 1:
            return None
        timed = self._between.get((kind, len(ranks), len(counts)))
        if timed is None:
            return None
        at = tuple(map(float, timed.num_bytes))
        return _Between(
            MeasuredCurve(at, timed.seconds), MeasuredCurve(at, timed.cores), len(counts)
        )

    def cores(self, rank: int) -> Resource:
        """Name the processors that a rank computes on."""
        own = self._cores_of[rank] if self._cores_of else rank // self.cluster.ranks_per_node
        return "cores", str(own)

    def compute(self, rank: int, seconds: float) -> TaskCost:
        """Price computation of a rank: one core."""
        return TaskCost(seconds, ((self.cores(rank), 1.0),))

    def message(self, kind: str, ranks: tuple[int, ...], num_bytes: int) -> TaskCost:
        """Price a message: processors of the nodes, and links.

        One of kind `tonari.oracle.probe.messages.EXCHANGE` that was not timed is a send.
        """
        timed = self._timed_as(kind, ranks)
        if timed is None and kind == EXCHANGE:
            return self.message("send", ranks, num_bytes)
        route = self._route(kind, ranks)
        # A message is what each rank has for all others, a route what all have together
        routed_bytes = num_bytes * (len(ranks) if kind == "all_to_all" else 1)
        if timed is not None:
            cores = timed.cores(num_bytes)
            # What was timed includes what the message's own demand does to a node
            slowdown = self.slowdown(("cores",), cores / timed.nodes)
            seconds = timed.seconds(num_bytes) / slowdown
        else:
            busy = TaskCost(0.0)
            if self._node is not None and self._node.knows(kind):
                busy = self._node.message(kind, ranks, num_bytes)
            seconds = max(busy.seconds, route.seconds(routed_bytes))
            if not seconds:
                return TaskCost(0.0)
            cores = sum(demand for _, demand in busy.demands) * busy.seconds / seconds
        shares: dict[Resource, float] = {}
        for rank in ranks if cores else ():
            shares[self.cores(rank)] = shares.get(self.cores(rank), 0.0) + cores / len(ranks)
        return TaskCost(seconds, (*shares.items(), *route.demands(routed_bytes, seconds)))

    def slowdown(self, resource: Resource, demand: float) -> float:
        """Compute how much longer everything lasts where so much of a resource is wanted."""
        if resource[0] == "cores":
            return 1.0 if self._node is None else self._node.slowdown(("cores",), demand)
        return max(1.0, demand)
