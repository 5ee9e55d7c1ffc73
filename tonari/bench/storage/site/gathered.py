"""Bring together what every rank saw: a verdict over all nodes, the bytes of all nodes."""

from collections.abc import Mapping

import msgspec

from dataio import World
from tonari.bench.storage.site.counters import Moved, add_nodes
from tonari.bench.storage.site.evidence import (
    CacheVerdict,
    Evidence,
    Residency,
    judge,
    judge_nodes,
    merge,
)
from tonari.bench.storage.site.site import Site


def gather_verdict(mine: Evidence, site: Site, world: World) -> CacheVerdict:
    """Judge what all ranks did together, each node by the evidence of its ranks. Collective."""
    return judge_nodes(
        {f"node {node}": judge(merge(ranks), site) for node, ranks in _by_node(mine, world).items()}
    )


def gather_moved(mine: Moved, world: World) -> Moved:
    """Add up the nodes' bytes; a counter that one of them lacks is None. Collective."""
    nothing = Residency(bytes_in_files=0, bytes_resident=None, said_by="none")
    seen = Evidence(asked_bytes=0, resident_before=nothing, resident_after=nothing, moved=mine)
    return add_nodes([merge(ranks).moved for ranks in _by_node(seen, world).values()])


def _by_node(mine: Evidence, world: World) -> Mapping[int, list[Evidence]]:
    received = world.allgather(msgspec.json.encode(mine), doing="gather what was seen")
    return {
        node: [msgspec.json.decode(received[rank], type=Evidence) for rank in ranks]
        for node, ranks in enumerate(world.topology.ranks_of_node)
    }
