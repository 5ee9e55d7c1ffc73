"""Bring what every rank saw together: a verdict over all nodes, the bytes of all nodes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace

from benchmarks.storage.site.counters import Moved
from benchmarks.storage.site.evidence import (
    Evidence,
    Residency,
    Verdict,
    judge,
    judge_nodes,
    merge,
)
from benchmarks.storage.site.site import Site
from dataio import World


def gather_verdict(mine: Evidence, site: Site, world: World) -> Verdict:
    """Judge what all ranks did together, each node by the evidence of its ranks. Collective."""
    return judge_nodes(
        {f"node {node}": judge(merge(ranks), site) for node, ranks in _by_node(mine, world).items()}
    )


def gather_moved(mine: Moved, world: World) -> Moved:
    """Add up the nodes' bytes; a counter that one of them lacks is None. Collective."""
    nothing = Residency(bytes_in_files=0, bytes_resident=None, said_by="none")
    seen = Evidence(asked_bytes=0, resident_before=nothing, resident_after=nothing, moved=mine)
    nodes = [merge(ranks).moved for ranks in _by_node(seen, world).values()]
    sums = {
        field.name: _sum([getattr(node, field.name) for node in nodes]) for field in fields(mine)
    }
    return Moved(**sums)


def _by_node(mine: Evidence, world: World) -> Mapping[int, list[Evidence]]:
    told = world.allgather(json.dumps(asdict(mine)).encode(), doing="gather what was seen")
    return {
        node: [_read(told[rank]) for rank in ranks]
        for node, ranks in enumerate(world.topology.ranks_of_node)
    }


def _read(told: bytes) -> Evidence:
    values = json.loads(told)
    before, after = (Residency(**values[name]) for name in ("resident_before", "resident_after"))
    plain = Evidence(**{**values, "resident_before": before, "resident_after": after})
    return replace(plain, moved=Moved(**values["moved"]))


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
