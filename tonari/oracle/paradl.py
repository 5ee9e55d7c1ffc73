"""What simple equations give for a step, term by term. Pure.

Source: ParaDL, Kahira et al., HPDC 2021: rows are divided over dp, layers over pp, operators over
tp and cp; every message is a ring that nothing overlaps with.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tonari.oracle.cluster.cluster import Cluster
from tonari.oracle.errors import OracleError
from tonari.oracle.machine import MeasuredCurve
from tonari.oracle.probe.messages import MessageTimes
from tonari.oracle.record import Event, Message
from tonari.oracle.traffic import axes_of
from tonari.trainer.mesh.mesh import AXES

LARGE_BYTES = 1 << 24
"""Of a message by which bandwidth is taken."""


@dataclass(frozen=True)
class Link:
    """What a message takes between two ranks.

    Attributes:
        latency_s: Of one without bytes.
        byte_s: For each byte more.
    """

    latency_s: float
    byte_s: float


@dataclass(frozen=True, kw_only=True)
class RingTimes:
    """Messages of one kind along the same axes, in a step of a rank.

    Attributes:
        axes: Of the mesh, in its order.
        kind: As of `Message`.
        ranks: Of the group.
        messages: How many.
        num_bytes: Of all of them.
        link: Between neighbours.
    """

    axes: tuple[str, ...]
    kind: str
    ranks: int
    messages: int
    num_bytes: int
    link: Link

    @property
    def name(self) -> str:
        """Its axes and kind; see `name_of`."""
        return name_of(self.axes, self.kind)

    @property
    def is_between_two(self) -> bool:
        """Whether it has two ends; either counts half of it."""
        return self.kind in ("send", "receive")

    @property
    def rounds(self) -> int:
        """Of each message: how often a rank passes a part of it on."""
        return (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1)

    @property
    def seconds(self) -> float:
        """Of all messages, one after another."""
        latency_s, byte_s = self.messages * self.link.latency_s, self.num_bytes * self.link.byte_s
        if self.is_between_two:
            return (latency_s + byte_s) / 2
        return self.rounds * (latency_s + byte_s / self.ranks)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A step of a rank as the sum of its terms.

    Attributes:
        computation_s: Of its stage.
        bubble_s: For which it waits while the pipeline fills and empties.
        rings: Its messages, by axis in the order of the mesh.
    """

    computation_s: float
    bubble_s: float
    rings: tuple[RingTimes, ...]

    @property
    def step_s(self) -> float:
        """Their sum."""
        return self.computation_s + self.bubble_s + sum(ring.seconds for ring in self.rings)


def price(
    events: Sequence[Event], *, computation_s: float, sizes: Sequence[int], microbatches: int,
    link_of: Callable[[tuple[int, ...]], Link],
) -> Terms:  # fmt: skip
    """Price a rank's step.

    Args:
        events: Of its step; only messages among several ranks count.
        computation_s: What its stage computes in a step.
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``.
        microbatches: Parts of a batch.
        link_of: Finds what joins the ranks of a group.
    """
    counts: defaultdict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
    for event in events:
        if isinstance(event, Message) and len(event.ranks) > 1:
            counts[event.ranks, event.kind].append(event.num_bytes)
    rings = [
        RingTimes(
            axes=axes_of(ranks, sizes), kind=kind, ranks=len(ranks), messages=len(found),
            num_bytes=sum(found), link=link_of(ranks),
        ) for (ranks, kind), found in counts.items()
    ]  # fmt: skip
    return Terms(
        computation_s=computation_s,
        bubble_s=computation_s * (sizes[0] - 1) / microbatches,
        rings=tuple(sorted(rings, key=lambda ring: [AXES.index(axis) for axis in ring.axes])),
    )


def name_of(axes: Sequence[str], kind: str) -> str:
    """Name messages of a kind along some axes, such as ``"dp_shard x cp: all-gather"``."""
    return f"{' x '.join(axes)}: {kind.replace('_', '-')}"


def probed_link(messages: Sequence[MessageTimes]) -> Link:
    """Take latency and bandwidth of the sends that a probe timed.

    Raises:
        OracleError: If it timed none.
    """
    for each in messages:
        if (each.kind, each.ranks) == ("send", 2):
            curve = MeasuredCurve(tuple(map(float, each.num_bytes)), each.seconds)
            latency_s = curve(0)
            return Link(latency_s, (curve(LARGE_BYTES) - latency_s) / LARGE_BYTES)
    raise OracleError(
        "the probe timed no sends between two ranks, by which rings are priced; probe with two "
        "ranks at least"
    )


def link_across(cluster: Cluster, ranks: Sequence[int], *, inside: Link | None) -> Link:
    """Find the slowest of what a group's neighbours cross, up to the outermost level.

    That other groups want the same link at that moment is not counted.

    Args:
        cluster: The machine.
        ranks: Of the group.
        inside: Between two ranks of a node, as probed; None: only links are counted.
    """
    spans = cluster.spans()
    links = [inside] if inside is not None else []
    for number, level in enumerate(cluster.level):
        if len({rank // spans[number] for rank in ranks}) > 1:
            byte_s = 0.0 if level.gbyte_s is None else 1 / (level.gbyte_s * 1e9)
            links.append(Link(level.latency_us * 1e-6, byte_s))
    return Link(
        max((link.latency_s for link in links), default=0.0),
        max((link.byte_s for link in links), default=0.0),
    )
