"""How a dataset is shared out among nodes, and how large its rows and shards are likely to be."""

from dataclasses import dataclass

import numpy as np

from dataio.base.errors import SourceError
from dataio.plan.layout import Layout
from dataio.plan.placement import Placement
from dataio.rows.rows import RowSchema
from dataio.source.base import Source
from dataio.world import World


@dataclass(frozen=True)
class Share:
    """The rows of a dataset that one node has room for.

    Attributes:
        num_slots: How many.
        wanted: Which, where they never leave: a cache that holds them already is shared with other
            jobs. None: not known yet.
        num_leaving: Rows that each local rank gives and takes an epoch.
        purpose: Pools of one dataset that are open at once must differ in it; each has its cache.
        num_copied: Rows of another node that lie here too, in slots behind these.
    """

    num_slots: int
    wanted: Placement | None = None
    num_leaving: int = 0
    purpose: str = "training"
    num_copied: int = 0


def consecutive(layout: Layout, *, node: int, named: str, purpose: str = "training") -> Share:
    """Share out a dataset in the order of its samples; none ever leaves its node.

    Args:
        layout: Replicas and samples.
        node: Whose share.
        named: What its placement is called, before its first sample.
        purpose: See `Share`.
    """
    first, rows = layout.pool_start(node), layout.pool_rows(node)
    wanted = Placement(f"{named} from {first}", 0, rows, lambda: first + np.arange(rows))
    return Share(rows, wanted, purpose=purpose)


def lay_out(source: Source, world: World) -> Layout:
    """Divide a dataset among the world's replicas.

    Raises:
        SourceError: If there are fewer samples than replicas.
    """
    if source.num_samples < world.num_replicas:
        raise SourceError(
            f"{source.name}: holds {source.num_samples} samples, expected at least one for each of "
            f"the {world.num_replicas} replicas; start fewer ranks, or name more shards"
        )
    return Layout(world.replicas_per_node, source.num_samples)


def guess_heap_bytes(source: Source, schema: RowSchema, *, num_slots: int) -> int:
    """Guess the bytes of a pool's variable fields: its part of the source, or 0 if unknown."""
    if not schema.variable:
        return 0
    return source.total_bytes * num_slots // max(source.num_samples, 1)


def guess_variable_bytes(source: Source, schema: RowSchema) -> int:
    """Guess the bytes of a row's variable fields; 0 if unknown."""
    mean = source.total_bytes // max(source.num_samples, 1)
    return max(mean - schema.fixed_bytes, 0) if schema.variable else 0


def guess_shard_bytes(source: Source, schema: RowSchema) -> int:
    """Guess the bytes of the largest shard; 0 if unknown, or if the source has no shards."""
    starts = np.append(source.shard_starts, source.num_samples)
    most = int(np.diff(starts).max())
    if len(starts) < 3 or source.made_as == "ArrayFiles":
        return 0
    total = source.total_bytes
    return most * schema.fixed_bytes if not total else total * most // source.num_samples
