"""Open a node's cache of a dataset: which directory it is, who shares it, how large it may be.

`open_cache` is all that others call. It finds the directory: shared with other jobs where it can
be, else one beside it. What is done in a directory before it is used is in `prepare`.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from dataio.base.errors import CacheBusyError, CacheError, CacheStagingError, OtherDatasetError
from dataio.base.filesystem import cache_directory, filesystem_of
from dataio.base.own import distrust
from dataio.rows.fields import Array, Field, declarations, row_schema
from dataio.source import ImageFolderSource
from dataio.source.base import Source
from dataio.source.wrap.growing import GrowingSource
from dataio.source.wrap.transformed import TransformedSource
from dataio.store.cache import Cache
from dataio.store.manifest_files import Identity
from dataio.store.prepare import prepare
from dataio.store.quota import Budget, Need, without_history
from dataio.store.quota_agreement import agree_on_budget
from dataio.store.share import Share, guess_heap_bytes, guess_shard_bytes, guess_variable_bytes
from dataio.world import World

if TYPE_CHECKING:  # it imports torch, and the commands of caches do without
    from dataio.arguments import Arguments

log = logging.getLogger(__name__)

POLL_S = 0.05


@dataclass(frozen=True)
class NodeRows:
    """One node's rows of a dataset: what a session of them is opened by.

    Attributes:
        source: Where they come from.
        fields: What is kept of a sample, as rows are stored.
        share: Which rows the node has room for.
        arguments: Those of the loader: its cache, staging, reports, and what scores remember.
        world: All ranks.
        root: The directory of caches; the rows get their own below it.
    """

    source: Source
    fields: Mapping[str, Field]
    share: Share
    arguments: "Arguments"
    world: World
    root: Path


def open_cache(rows: NodeRows) -> tuple[Cache, Budget | None]:
    """Find or make this node's cache of a dataset, and lock it. Collective; see `Pool`.

    The first choice of a directory follows from the source and its fields. Where a job holds it
    that shares nothing, the choice is the first free one of ``NAME.1``, ``NAME.2``, ...: these
    stay, for later jobs. Where a job stages what this one needs too, and will share it, this one
    waits for as long as that job gets on. Meanwhile it lets go of its other nodes now and then:
    each of two jobs that begin together may have some.

    Returns:
        The cache, not loaded yet, and what it may hold under the quota, if there is one.

    Raises:
        QuotaError: If the quota is too small on any node.
        OtherDatasetError: On all ranks where the source grows, if a cache is another's.
        CacheError: If the cache cannot be used; see `prepare`.
    """
    wanted, world = _wanted(rows), rows.world
    leader = world.topology.ranks_of_node[world.node][0]
    patience = _Patience(world)
    cache, other = None, b""
    while True:
        if world.rank == leader and cache is None:
            try:
                cache = patience.try_for(wanted.choose)
            except OtherDatasetError as error:
                if not wanted.identity.prefixes:
                    raise
                other = b"!" + str(error).encode()
        chosen = other if cache is None else _described(cache)
        everyone = world.allgather(chosen, doing="open the caches")
        if others := [each[1:].decode() for each in everyone if each[:1] == b"!"]:
            if cache is not None:
                cache.close()
            raise OtherDatasetError(others[0], on_all_ranks=True)
        # Ranks that wait meet now and then: none takes another for lost.
        if all(everyone[ranks[0]] for ranks in world.topology.ranks_of_node):
            break
        if cache is not None and not cache.hold.shared:
            # Another job may wait for it, and hold what this job waits for.
            cache.close()
            cache = None
            time.sleep(2 * POLL_S)
    if cache is None:
        cache = wanted.cache_in(Path(os.fsdecode(everyone[leader][1:])))
        cache.hold.follow(shared=everyone[leader][:1] == b"r")
    return cache, wanted.budget


def _described(cache: Cache) -> bytes:
    return (b"r" if cache.hold.shared else b"w") + os.fsencode(cache.directory)


def _wanted(rows: NodeRows) -> "_Wanted":
    """Describe the cache that a job needs. Collective with a quota."""
    source, share, world = rows.source, rows.share, rows.world
    schema, declared = row_schema(rows.fields), declarations(rows.fields)
    # A relative pattern means another dataset in another working directory.
    place = source.name if "://" in source.name else str(Path(source.name).absolute())
    origin = f"{source.made_as}:{place}" if source.made_as else place
    identity = f"{place}|{schema}|{declared}|{share.purpose}"
    # Two functions, or two orders of classes, make different rows of one source.
    if isinstance(source, TransformedSource | ImageFolderSource) and source.variant:
        identity += f"|{source.variant}"
    name = xxhash.xxh3_64_hexdigest(identity.encode(errors="surrogatepass"))[:12]
    prefixes = frozenset(source.prefixes if isinstance(source, GrowingSource) else ())
    num_slots = share.num_slots + share.num_copied
    num_arrivals = 2 * share.num_leaving * world.local_size * (2 if share.num_copied else 1)
    num_positions = num_slots + num_arrivals
    budget = None
    if (quota_bytes := rows.arguments.cache.quota_bytes) is not None:
        columns = rows.arguments.columns
        need = Need(
            schema,
            source.num_samples,
            share.num_slots,
            num_arrivals,
            world.local_size,
            rows.arguments.batch_size,
            # Counted always: a job without scores leaves a cache for one with them.
            True,
            guess_variable_bytes(source, schema),
            guess_shard_bytes(source, schema),
        )
        budget = agree_on_budget(
            without_history(quota_bytes, columns, share.num_slots), need, world
        )
        num_positions = min(num_positions, budget.positions)
    fields = rows.fields.values()
    tiles = [field.tiles.num_tiles for field in fields if isinstance(field, Array) and field.tiles]
    return _Wanted(
        first=rows.root / f"{_slug(source.name)}-{name}" / f"node{world.node}",
        identity=Identity(origin, source.fingerprint, schema, declared, prefixes),
        share=share,
        num_positions=num_positions,
        budget=budget,
        expected_bytes=guess_heap_bytes(source, schema, num_slots=num_slots),
        foreign=rows.arguments.foreign,
        world=world,
        num_tiles=max(tiles, default=1),
    )


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The cache that a job needs, in whatever directory.

    Attributes:
        first: The node's own directory of the dataset.
        identity: What it must hold.
        share: Which rows.
        num_positions: See `Cache`.
        budget: What its files may take; None: no limit.
        expected_bytes: Of the variable fields, as far as they are known.
        foreign: Whether another user's cache may be read.
        world: All ranks.
        num_tiles: Caches of the node that memory holds beside one another: one for each tile.
    """

    first: Path
    identity: Identity
    share: Share
    num_positions: int
    budget: Budget | None
    expected_bytes: int
    foreign: bool
    world: World
    num_tiles: int

    def cache_in(self, directory: Path) -> Cache:
        """Make it, without a look at what lies there."""
        return Cache(
            directory,
            self.identity,
            num_slots=self.share.num_slots + self.share.num_copied,
            num_positions=self.num_positions,
            local_rank=self.world.local_rank,
            local_size=self.world.local_size,
            budget=self.budget,
            num_arriving=self.share.num_leaving * (2 if self.share.num_copied else 1),
            num_tiles=self.num_tiles,
        )

    def choose(self) -> Cache:
        """Take the first directory that will do. Leader only."""
        first, world = self.first, self.world
        home, root, uid = first.parent, first.parents[1], os.getuid()
        reason = "it holds no cache of this dataset"
        if os.path.lexists(home):
            owner = home.lstat().st_uid
            if owner != uid or not os.access(home, os.W_OK | os.X_OK):
                reason = f"it belongs to user {owner}"
                if self.share.num_leaving:
                    reason += (
                        ", and only its owner may exchange rows in it, where it can be written"
                    )
                elif not os.access(home, os.R_OK | os.X_OK):
                    reason += ", and nobody else may look into it"
                elif self.foreign and (why := distrust(root, home)):
                    reason = why
                    log.warning("[rank %d] %s: is not read: %s", world.rank, home, why)
                elif owner == uid or self.foreign:
                    cache, reason = self._read_only()
                    if cache is not None:
                        return cache
                first = home.with_name(f"{home.name}-{uid}") / first.name
        if root.exists() and not os.access(root, os.W_OK | os.X_OK):
            raise CacheError(
                f"cache directory {root} is not writable for user {uid}, and what is there cannot "
                f"serve ({home.name}: {reason}); make it writable or give another directory "
                "(cache=..., TONARI_CACHE)"
            )
        return self._writable(first)

    def _writable(self, first: Path) -> Cache:
        """Take the first that no other job has in a way that cannot be shared."""
        taken: CacheBusyError | None = None
        for directory in self._candidates(first):
            try:
                cache = self._prepared(directory)
            except CacheStagingError:
                raise
            except CacheBusyError as busy:
                taken = taken or busy
                continue
            if taken is not None:
                log.warning(
                    "[rank %d] %s; this job uses %s", self.world.rank, taken, cache.directory
                )
            return cache
        raise AssertionError("candidates never end")

    def _read_only(self) -> tuple[Cache | None, str]:
        """Open what lies there, changing nothing; or say why not."""
        reason = "it holds no cache of this node"
        for directory in itertools.takewhile(Path.exists, self._candidates(self.first)):
            try:
                return self._prepared(directory, read_only=True), ""
            except CacheStagingError:
                raise
            except CacheError as error:
                reason = str(error)
        return None, reason

    def _candidates(self, first: Path) -> Iterator[Path]:
        """Yield directories to try; those of any number, where this machine had another before."""
        topology, home = self.world.topology, first.parent
        if topology.by_host and not first.exists() and not filesystem_of(home).is_shared:
            yield from sorted(path for path in home.glob("node*") if path.name[4:].isdecimal())
        yield first
        for number in itertools.count(1):
            yield first.with_name(f"{first.name}.{number}")

    def _prepared(self, directory: Path, *, read_only: bool = False) -> Cache:
        cache = self.cache_in(directory)
        try:
            prepare(
                cache,
                exchanging=self.share.num_leaving > 0,
                wanted=self.share.wanted,
                read_only=read_only,
                expected_bytes=self.expected_bytes,
            )
        except BaseException:
            cache.close()
            raise
        return cache


def scores_directory(directory: Path) -> Path:
    """Choose where a job's scores lie for a moment: in its cache, or in its user's own directory.

    Args:
        directory: The cache, which may be read-only.
    """
    is_own = os.access(directory, os.W_OK) and directory.stat().st_uid == os.getuid()
    return directory if is_own else cache_directory("auto")


class _Patience:
    """Waits for jobs that stage, as long as they get on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sign: int | None = None
        self._deadline = 0.0

    def try_for(self, choose: Callable[[], Cache]) -> Cache | None:
        """Try again and again for a part of the world's time limit; None if there is more to wait.

        Raises:
            CacheStagingError: If the other job has shown no sign of life for that limit.
        """
        until = time.monotonic() + self._world.timeout_s / 4
        while True:
            try:
                return choose()
            except CacheStagingError as busy:
                self._check(busy)
            if time.monotonic() > until:
                return None
            time.sleep(POLL_S)

    def _check(self, busy: CacheStagingError) -> None:
        files = list(busy.directory.iterdir()) if busy.directory.is_dir() else []
        sign = max((_mtime_ns(path) for path in files), default=0)
        now = time.monotonic()
        if self._sign is None:
            log.warning("[rank %d] waiting to share a cache: %s", self._world.rank, busy)
        if sign != self._sign:
            self._sign, self._deadline = sign, now + self._world.timeout_s
        elif now > self._deadline:
            raise CacheStagingError(
                f"{busy}; nothing was written there for {self._world.timeout_s:.0f} s",
                busy.directory,
            ) from None


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _slug(name: str) -> str:
    base = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(letter if letter.isalnum() else "-" for letter in base)[:40].strip("-")
