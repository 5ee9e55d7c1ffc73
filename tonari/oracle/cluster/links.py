"""What a message puts on which links, and what it takes there by itself. Pure.

Of collectives the common algorithm for large messages is meant, a ring through the ranks in their
order, and for small ones a tree where that is faster.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tonari.oracle.cluster.cluster import Cluster
from tonari.oracle.costs import Resource

RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often a ring carries all but one part of the whole past each rank."""


@dataclass(frozen=True)
class Route:
    """How a group's messages of one kind lie on a cluster.

    Attributes:
        shares: Bytes on each link over those of the message: one for each way of each unit.
        rounds: Of messages one after another, each as long as `latency_s`.
        latency_s: Of the farthest two neighbours.
        tree_rounds: Of the whole message, where a tree is as good; 0: there is none.
    """

    shares: tuple[tuple[Resource, float], ...]
    gbyte_s: tuple[float, ...]
    rounds: int
    latency_s: float
    tree_rounds: int

    @cached_property
    def slowest_s(self) -> float:
        """Seconds that a message of one byte keeps the busiest link."""
        pairs = zip(self.shares, self.gbyte_s, strict=True)
        return max((share / rate / 1e9 for (_, share), rate in pairs), default=0.0)

    def seconds(self, num_bytes: int) -> float:
        """Price a message where nobody else is on the links."""
        seconds = self.rounds * self.latency_s + num_bytes * self.slowest_s
        if self.tree_rounds:
            # A link carries the whole each time
            one_s = num_bytes / (min(self.gbyte_s, default=math.inf) * 1e9)
            seconds = min(seconds, self.tree_rounds * (self.latency_s + one_s))
        return seconds

    def demands(self, num_bytes: int, seconds: float) -> tuple[tuple[Resource, float], ...]:
        """List which part of each link a message asks for that lasts so long."""
        if not seconds:
            return ()
        pairs = zip(self.shares, self.gbyte_s, strict=True)
        return tuple(
            (link, min(num_bytes * share / (rate * 1e9) / seconds, 1.0))
            for (link, share), rate in pairs
        )


def lay_route(cluster: Cluster, kind: str, ranks: Sequence[int]) -> Route:
    """Find the links that a group's messages take.

    Args:
        cluster: The machine.
        kind: As of `tonari.oracle.record.Message`.
        ranks: Of the group; of a send the first sends to the second.
    """
    num, spans = len(ranks), cluster.spans()
    loads: defaultdict[tuple[int, str, int], float] = defaultdict(float)
    latency_us = 0.0
    if kind == "all_to_all":
        # Each of a unit's ranks sends a part to each rank outside: no need to go through all pairs
        for number, level in enumerate(cluster.level):
            for unit, inside in Counter(rank // spans[number] for rank in ranks).items():
                if inside < num:
                    share = inside * (num - inside) / num**2
                    loads[number, "out", unit] += share
                    loads[number, "in", unit] += share
                    latency_us = max(latency_us, level.latency_us)
    for source, target, share in _edges(kind, ranks):
        for number, level in enumerate(cluster.level):
            own, other = source // spans[number], target // spans[number]
            if own == other:
                break
            loads[number, "out", own] += share
            loads[number, "in", other] += share
            latency_us = max(latency_us, level.latency_us)
    found = [
        ((cluster.level[number].name, way, str(unit)), share, cluster.level[number].gbyte_s)
        for (number, way, unit), share in loads.items()
    ]
    limited = [(link, share, rate) for link, share, rate in found if rate is not None]
    depth = math.ceil(math.log2(num)) if num > 1 else 0
    rounds = {
        "all_reduce": 2 * (num - 1), "barrier": depth, "broadcast": depth, "send": 1
    }.get(kind, num - 1)  # fmt: skip
    return Route(
        shares=tuple((link, share) for link, share, _ in limited),
        gbyte_s=tuple(rate for *_, rate in limited),
        rounds=rounds,
        latency_s=latency_us * 1e-6,
        tree_rounds={"all_reduce": 2 * depth}.get(kind, 0),
    )


def _edges(kind: str, ranks: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """Yield who sends to whom, and which share of the message."""
    num = len(ranks)
    if kind == "send":
        yield ranks[0], ranks[1], 1.0
    elif num > 1 and kind not in ("barrier", "all_to_all"):
        share = RINGS[kind] * (num - 1) / num if kind in RINGS else 1.0
        last = num if kind in RINGS else num - 1
        for at in range(last):
            yield ranks[at], ranks[(at + 1) % num], share
