"""Open the cache of a node's pool: its directory, what it holds, and its part of a quota."""

from collections.abc import Mapping
from pathlib import Path

import xxhash

from dataio.cache.cache import Cache
from dataio.cache.choice import open_cache
from dataio.cache.identity import Identity
from dataio.cache.quota import Budget, Need
from dataio.plan.placement import Placement
from dataio.pool.quota_agreement import agree_on_budget
from dataio.pool.source_sizes import guess_heap_bytes, guess_shard_bytes, guess_variable_bytes
from dataio.rows.fields import Field, declarations, row_schema
from dataio.source import ImageFolderSource
from dataio.source.base import Source
from dataio.source.wrap.growing import GrowingSource
from dataio.source.wrap.transformed import TransformedSource
from dataio.world import World


def open_node_cache(
    source: Source,
    fields: Mapping[str, Field],
    *,
    world: World,
    root: Path,
    num_slots: int,
    num_leaving: int,
    purpose: str,
    wanted: Placement | None,
    foreign: bool,
    quota_bytes: int | None,
    batch_size: int,
) -> tuple[Cache, Budget | None]:
    """Find or make this node's cache of a dataset, and lock it. Collective; see `Pool`.

    Returns:
        The cache, not loaded yet, and what it may hold under the quota, if there is one.

    Raises:
        QuotaError: If the quota is too small on any node.
        CacheError: If the cache cannot be used.
    """
    schema, declared = row_schema(fields), declarations(fields)
    # A relative pattern means another dataset in another working directory.
    place = source.name if "://" in source.name else str(Path(source.name).absolute())
    origin = f"{source.made_as}:{place}" if source.made_as else place
    identity = f"{place}|{schema}|{declared}|{purpose}"
    # Two functions, or two orders of classes, make different rows of one source.
    if isinstance(source, TransformedSource | ImageFolderSource) and source.variant:
        identity += f"|{source.variant}"
    name = xxhash.xxh3_64_hexdigest(identity.encode())[:12]
    directory = root / f"{_slug(source.name)}-{name}" / f"node{world.node}"
    prefixes = frozenset(source.prefixes if isinstance(source, GrowingSource) else ())
    num_arrivals = 2 * num_leaving * world.local_size
    num_positions = num_slots + num_arrivals
    budget = None
    if quota_bytes is not None:
        need = Need(
            schema,
            source.num_samples,
            num_slots,
            num_arrivals,
            world.local_size,
            batch_size,
            # Counted always: a job without scores leaves a cache for one with them.
            True,
            guess_variable_bytes(source, schema),
            guess_shard_bytes(source, schema),
        )
        budget = agree_on_budget(quota_bytes, need, world)
        num_positions = min(num_positions, budget.positions)

    def cache_in(directory: Path) -> Cache:
        return Cache(
            directory,
            Identity(origin, source.fingerprint, schema, declared, prefixes),
            num_slots=num_slots,
            num_positions=num_positions,
            local_rank=world.local_rank,
            local_size=world.local_size,
            budget=budget,
            num_arriving=num_leaving,
        )

    cache = open_cache(
        cache_in,
        directory,
        world=world,
        exchanging=num_leaving > 0,
        wanted=wanted,
        foreign=foreign,
        expected_bytes=guess_heap_bytes(source, schema, num_slots=num_slots),
    )
    return cache, budget


def _slug(name: str) -> str:
    base = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(letter if letter.isalnum() else "-" for letter in base)[:40].strip("-")
