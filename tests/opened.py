"""Pools and gathers of tests: what a loader would make of these arguments, without the loader."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataio import NodeCache, Reports, Staging, Workers
from dataio.arguments import Arguments
from dataio.batch.gather import Gather
from dataio.plan.placement import Placement
from dataio.rows.fields import Field
from dataio.source.base import Source
from dataio.store.open import NodeRows
from dataio.store.pool import Pool
from dataio.store.share import Share
from dataio.world import World


def make_pool(
    source: Source,
    fields: Mapping[str, Field],
    *,
    world: World,
    root: Path,
    num_slots: int,
    num_leaving: int = 0,
    wanted: Placement | None = None,
    columns: tuple[str, ...] = (),
    foreign: bool = False,
    **staging: Any,
) -> Pool:
    """A pool whose scores have these columns; a cache of another user is read if it is named."""
    policy: Any = SimpleNamespace(columns=columns) if columns else None
    arguments = Arguments(
        source=source, batch_size=1, fields=fields, importance=policy,
        cache=NodeCache(root if foreign else "auto"), staging=Staging(**staging),
        reports=Reports(progress=False),
    )  # fmt: skip
    share = Share(num_slots, wanted, num_leaving)
    return Pool(NodeRows(source, fields, share, arguments, world, root))


def make_gather(
    pool: Pool,
    fields: Mapping[str, Field],
    *,
    num_threads: int,
    num_processes: int = 0,
    prefetch: int = 2,
    feeders: Path | None = None,
    verify: Any = "once",
    repair: Callable[[NDArray[np.int64]], None] | None = None,
    timeout_s: float | None = None,
    **arguments: Any,
) -> Gather:
    """Batches of these fields of a pool's rows, which are repaired by this alone.

    What was refused while they were staged is found again as they are decoded.
    """
    seen: Any = copy.copy(pool)
    seen.fields, seen.repair = fields, repair
    seen.checked_source = copy.copy(pool.checked_source)
    seen.checked_source.refused = []
    if timeout_s is not None:
        seen.world = copy.copy(pool.world)
        seen.world.timeout_s = timeout_s
    return Gather(
        seen,
        Arguments(
            source=pool.source, batch_size=8, fields=fields, cache=NodeCache(verify=verify),
            workers=Workers(
                threads=num_threads, processes=num_processes, prefetch=prefetch, feeders=feeders
            ),
            **arguments,
        ),
    )  # fmt: skip
