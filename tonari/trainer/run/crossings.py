"""Axes of a mesh whose groups reach over nodes, though smaller ones would lie within. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tonari.trainer.mesh.mesh import AXES

BOUND = ("tp", "cp", "dp_shard")
"""Axes along which ranks exchange activations or parameters in every block; innermost first."""


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """An axis of which a group's messages leave a node.

    Attributes:
        axis: Its name.
        ranks: Of a group.
        nodes: That the widest group spans.
        ranks_within: Of the largest groups along this axis that would lie within a node.
    """

    axis: str
    ranks: int
    nodes: int
    ranks_within: int


def crossings(sizes: Sequence[int], *, num_nodes: int) -> tuple[Crossing, ...]:
    """Find the axes whose groups cross nodes and could lie within one, the innermost first.

    An axis is left out where the axes inside of it fill a node already.

    Args:
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``.
        num_nodes: Nodes, each with as many ranks.
    """
    per_node = math.prod(sizes) // num_nodes
    node_of_rank = (np.arange(math.prod(sizes)) // per_node).reshape(sizes)
    found = []
    for axis in BOUND:
        number = AXES.index(axis)
        # int64[groups, ranks along the axis]: their nodes, ascending
        groups = np.moveaxis(node_of_rank, number, -1).reshape(-1, sizes[number])
        nodes = int((np.diff(groups, axis=1) > 0).sum(axis=1).max()) + 1
        inner = math.prod(sizes[number + 1 :])
        within = [n for n in range(2, sizes[number]) if per_node % (n * inner) == 0]
        if nodes > 1 and within:
            found.append(
                Crossing(axis=axis, ranks=sizes[number], nodes=nodes, ranks_within=max(within))
            )
    return tuple(found)
