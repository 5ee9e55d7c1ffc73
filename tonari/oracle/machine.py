"""What computation and messages take on a machine that was measured. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from tonari.oracle.costs import Resource, TaskCost
from tonari.oracle.errors import OracleError
from tonari.oracle.probe.messages import MessageTimes


@dataclass(frozen=True)
class MeasuredCurve:
    """A quantity that was measured at some points, linear between them.

    Attributes:
        at: Ascending, at least one.
        values: One for each.
    """

    at: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, x: float) -> float:
        """Read it at a point; before the first as there, behind the last one as it went on."""
        if len(self.at) == 1 or x <= self.at[0]:
            return self.values[0]
        high = min(bisect_left(self.at, x), len(self.at) - 1)
        low = high - 1
        slope = (self.values[high] - self.values[low]) / (self.at[high] - self.at[low])
        return max(self.values[low] + slope * (x - self.at[low]), 0.0)


class OneNode:
    """A node that was measured with as many ranks as it is to run.

    Args:
        messages: Of a probe with that many ranks.
        slowdowns: How many times longer each rank computes where so many do at a time, from 1 on.
        cores: That there are; 0: more than anybody asks for.
    """

    def __init__(
        self, messages: Sequence[MessageTimes], slowdowns: Sequence[tuple[int, float]],
        *, cores: int = 0,
    ) -> None:  # fmt: skip
        self._most = max(float(slowdowns[-1][0]), float(cores or "inf"))
        self._slowdown = MeasuredCurve(
            tuple(float(count) for count, _ in slowdowns), tuple(value for _, value in slowdowns)
        )
        self._seconds: dict[tuple[str, int], MeasuredCurve] = {}
        self._cores: dict[tuple[str, int], MeasuredCurve] = {}
        for each in messages:
            key = each.kind, each.ranks
            at = tuple(map(float, each.num_bytes))
            self._seconds[key] = MeasuredCurve(at, each.seconds)
            self._cores[key] = MeasuredCurve(at, each.cores)

    def cores(self, rank: int) -> Resource:
        """Name the processors that a rank computes on: all share those of the node."""
        return ("cores",)

    def compute(self, rank: int, seconds: float) -> TaskCost:
        """Price computation of a rank: one core."""
        return TaskCost(seconds, ((self.cores(rank), 1.0),))

    def knows(self, kind: str) -> bool:
        """Whether messages of a kind were timed."""
        return any(of == kind for of, _ in self._seconds)

    def message(self, kind: str, ranks: tuple[int, ...], num_bytes: int) -> TaskCost:
        """Price a message, and the cores that it takes."""
        counts = sorted(count for of, count in self._seconds if of == kind)
        if not counts:
            known = ", ".join(sorted({of for of, _ in self._seconds})) or "none"
            raise OracleError(
                f"the probe timed no {kind} among ranks, only: {known}; probe with as many ranks "
                "as the job has on a node, two at least"
            )
        # Of more ranks than were timed, as of the most: a ring carries hardly more past each.
        key = kind, min((count for count in counts if count >= len(ranks)), default=counts[-1])
        seconds, cores = self._seconds[key](num_bytes), self._cores[key](num_bytes)
        # What was measured includes what the message's own demand does to it.
        return TaskCost(seconds / self.slowdown(("cores",), cores), ((("cores",), cores),))

    def slowdown(self, resource: Resource, demand: float) -> float:
        """Compute how much longer everything lasts on a node of which this many cores are wanted.

        Of anything else, there is one.
        """
        if resource[0] != "cores":
            return max(1.0, demand)
        # Of more than there are, and than were timed, each gets its part
        known = min(demand, self._most)
        return max(1.0, self._slowdown(known)) * demand / known if demand else 1.0
