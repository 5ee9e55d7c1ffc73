"""What tasks take, and of what: what a simulation and a machine exchange. Pure."""

from dataclasses import dataclass
from typing import Protocol

Resource = tuple[str, ...]
"""Such as ``("cores", "3")``: of node 3."""


@dataclass(frozen=True)
class TaskCost:
    """What a task takes where nobody else is.

    Attributes:
        seconds: Its time.
        demands: Of each resource, what it asks for as long as it lasts.
        busy: For each of these, the share of its time that it is busy with it, beside the others:
            that may take longer without making the task last longer. Empty: all of it.
    """

    seconds: float
    demands: tuple[tuple[Resource, float], ...] = ()
    busy: tuple[float, ...] = ()


class Machine(Protocol):
    """What a simulation asks of the machine."""

    def cores(self, rank: int) -> Resource:
        """Name the processors that a rank computes on."""
        ...

    def compute(self, rank: int, seconds: float) -> TaskCost:
        """Price computation of a rank, by the seconds that it was timed at."""
        ...

    def message(self, kind: str, ranks: tuple[int, ...], num_bytes: int) -> TaskCost:
        """Price a message; of a send, from the first of two ranks to the second."""
        ...

    def slowdown(self, resource: Resource, demand: float) -> float:
        """Compute how many times longer tasks last that together ask for this much, >= 1."""
        ...


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What a rank's loader does beside its steps.

    Attributes:
        batch: Of making a batch; one at a time.
        ahead: Batches made ahead of the one that is trained, >= 0.
        sends: What leaves with each step, one after another, and nobody waits for before the end
            of the epoch.
    """

    batch: TaskCost
    ahead: int
    sends: tuple[TaskCost, ...] = ()
