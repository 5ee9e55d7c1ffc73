"""One rank that stands for all, to be simulated beside its loader. Pure.

All replicas of a configuration do the same at the same time. So one of them is simulated, on a
machine on which everything that they share is asked for by as many at once.
"""

import math
from dataclasses import dataclass

from tonari.oracle.costs import Resource, TaskCost
from tonari.oracle.probe.messages import EXCHANGE
from tonari.oracle.record import Message, Wait
from tonari.oracle.stopwatch import Timed

LINK: Resource = ("link",)
"""Of a node, or of a larger unit whose link is the busiest."""
OF_STEP = "all_reduce"
"""The kind of the one message that stands for all of a step's."""


@dataclass(frozen=True, kw_only=True)
class FoldedMachine:
    """What a simulation of one reader takes, on a node of many.

    Attributes:
        readers: Of a node.
        ranks: Of a node, each of which computes on a core.
        cores_of_node: Infinite: nobody counted them.
        link_s: For which a step's messages keep the node's link.
        exchange_byte_s: For which a byte of one reader's leaving rows keeps it.
    """

    readers: int
    ranks: int
    cores_of_node: float = math.inf
    link_s: float = 0.0
    exchange_byte_s: float = 0.0

    def cores(self, rank: int) -> Resource:
        """Name the processors of the node."""
        return ("cores",)

    def compute(self, rank: int, seconds: float) -> TaskCost:
        """Price computation: one core of each rank."""
        return TaskCost(seconds, ((self.cores(rank), self.ranks / self.readers),))

    def message(self, kind: str, ranks: tuple[int, ...], num_bytes: int) -> TaskCost:
        """Price rows that leave, or the messages of a step, which are one for all readers."""
        if kind == EXCHANGE:
            return TaskCost(num_bytes * self.exchange_byte_s, ((LINK, 1.0),))
        return TaskCost(self.link_s, ((LINK, 1.0 / self.readers),))

    def slowdown(self, resource: Resource, demand: float) -> float:
        """Compute how many times longer everything lasts, where each reader asks for so much."""
        asked = self.readers * demand
        return max(1.0, asked / self.cores_of_node if resource == ("cores",) else asked)


def folded_program(seconds: float, *, link_s: float = 0.0) -> Timed:
    """Make a program of computation, and of messages on the node's link at its end, if any."""
    events = (Message(OF_STEP, (0,), 0), Wait(0)) if link_s else ()
    laps_s = (seconds - link_s, *(0.0 for _ in events))
    return Timed(rank=0, events=events, laps_s=(laps_s,), step_s=(seconds,))
