"""Number nodes, replicas and local ranks: a pure function of the ranks' nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The node of every rank. Each is a replica; replicas are numbered node by node, then by rank.

    Attributes:
        node_of_rank: Nodes, numbered from 0 in the order in which they first appear.
        by_host: Whether nodes are machines, each with disks of its own; else some share one.
        racks: The rack of every rank's node, "" where it is not known; empty if none is.
    """

    node_of_rank: tuple[int, ...]
    by_host: bool = False
    racks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.node_of_rank or self.node_of_rank != _by_appearance(self.node_of_rank):
            raise ValueError(
                f"topology: node_of_rank is {self.node_of_rank}; nodes must be numbered from 0 in "
                "the order in which they first appear, as Topology.from_names does"
            )

    @classmethod
    def from_names(
        cls, names: Sequence[str], *, by_host: bool = False, racks: Sequence[str] = ()
    ) -> "Topology":
        """Number the nodes from one name a rank; equal names are one node."""
        return cls(_by_appearance(names), by_host, tuple(racks) if any(racks) else ())

    @classmethod
    def from_layout(cls, layout: Sequence[int]) -> "Topology":
        """Fill node after node with consecutive ranks."""
        return cls(tuple(node for node, ranks in enumerate(layout) for _ in range(ranks)))

    @property
    def world_size(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1

    @cached_property
    def ranks_of_node(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on each node, in order."""
        ranks: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for rank, node in enumerate(self.node_of_rank):
            ranks[node].append(rank)
        return tuple(tuple(on_node) for on_node in ranks)

    @property
    def rack_of_node(self) -> tuple[str, ...]:
        """The rack of each node, "" where it is not known."""
        racks = self.racks or ("",) * self.world_size
        return tuple(racks[on_node[0]] for on_node in self.ranks_of_node)

    @cached_property
    def layout(self) -> tuple[int, ...]:
        """Replicas on each node."""
        return tuple(len(ranks) for ranks in self.ranks_of_node)

    @cached_property
    def rank_of_replica(self) -> tuple[int, ...]:
        return tuple(rank for ranks in self.ranks_of_node for rank in ranks)

    @cached_property
    def replica_of_rank(self) -> tuple[int, ...]:
        replicas = {rank: replica for replica, rank in enumerate(self.rank_of_replica)}
        return tuple(replicas[rank] for rank in range(self.world_size))

    def local_rank(self, rank: int) -> int:
        """Count the ranks of the same node that come before this one."""
        return self.ranks_of_node[self.node_of_rank[rank]].index(rank)


def _by_appearance(names: Sequence[str] | Sequence[int]) -> tuple[int, ...]:
    numbers: dict[str | int, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)
