"""How the batches of each replica would reach its ranks, on a world that is not there."""

import math
from dataclasses import dataclass

import numpy as np

from tonari.trainer.config.config import Config
from tonari.trainer.mesh.place import feed_of, last_stage_reads, tile_of
from tonari.trainer.run.build import RunLayout, build_place, make_fields
from tonari.trainer.run.own import own_of
from tonari.trainer.run.tiled import are_tiled


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How batches reach the ranks of the replicas that are fed alike.

    The ranks are those of the first of these replicas. Another's lie as far behind them as its
    ``reader`` lies behind this one's: cp x tp ranks for each replica between.

    Attributes:
        replicas: Their numbers, ascending.
        reader: The rank that reads and decodes them.
        target_reader: The rank that reads the last stage's columns; None: the reader does.
        maps: Ranks on the node of who reads for them that take their columns from shared memory.
        receives: Ranks elsewhere that take them in messages.
        nothing: Ranks of middle stages: they hold no batch.
        scorer: The rank whose losses go back to the reader.
    """

    replicas: tuple[int, ...]
    reader: int
    target_reader: int | None
    maps: tuple[int, ...]
    receives: tuple[int, ...]
    nothing: tuple[int, ...]
    scorer: int


def deliveries(config: Config, layout: RunLayout, *, num_nodes: int) -> tuple[Delivery, ...]:
    """Find how each replica is fed; one answer for all that are fed alike, by the first of them.

    Args:
        config: The settings.
        layout: The sizes of the mesh.
        num_nodes: Nodes, each with as many ranks.

    Raises:
        ConfigError: If the scorers cannot read their targets: see `last_stage_reads`.
    """
    first, world_size = build_place(config, layout, 0), math.prod(layout.sizes)
    node_of_rank = np.arange(world_size) // (world_size // num_nodes)
    apart = last_stage_reads(first, node_of_rank.tolist(), config.mesh.targets)
    ranks = np.array(first.ranks)
    places = [build_place(config, layout, rank) for rank in first.ranks]
    if are_tiled(config, make_fields(config, own_of(config))):
        places = [tile_of(place) for place in places]
    readers = np.array([feed_of(place, last_stage_reads=apart).reader for place in places])
    is_fed = np.isin(ranks, (*first.input_ranks, *first.target_ranks))
    # int64[replica, 1]: how far a replica's ranks lie behind the first replica's.
    behind = np.array(first.readers)[:, None]
    # bool[replica, rank of a replica]
    is_near = node_of_rank[ranks + behind] == node_of_rank[readers + behind]
    _, starts, kinds = np.unique(is_near, axis=0, return_index=True, return_inverse=True)
    found = []
    for kind in np.argsort(starts):
        start = starts[kind]
        own, own_readers = ranks + behind[start], readers + behind[start]
        reader, scorer = int(own[0]), int(first.scorer + behind[start, 0])
        target_reader = int(own_readers[own == scorer][0])
        others = own != own_readers
        maps, receives, nothing = (
            tuple(own[others & chosen].tolist())
            for chosen in (is_fed & is_near[start], is_fed & ~is_near[start], ~is_fed)
        )
        found.append(
            Delivery(
                replicas=tuple(np.flatnonzero(kinds == kind).tolist()),
                reader=reader,
                target_reader=target_reader if target_reader != reader else None,
                maps=maps,
                receives=receives,
                nothing=nothing,
                scorer=scorer,
            )
        )
    return tuple(found)
