"""Choose a node's cache directory: shared where it can be, else one beside it."""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from dataio.base.errors import CacheBusyError, CacheError, CacheStagingError
from dataio.base.filesystem import cache_directory
from dataio.base.own import distrust
from dataio.cache.cache import Cache
from dataio.cache.opening import prepare
from dataio.plan.placement import Placement
from dataio.world import World

log = logging.getLogger(__name__)

POLL_S = 0.05


class _Prepare(Protocol):
    def __call__(self, directory: Path, *, read_only: bool = False) -> Cache: ...


def open_cache(
    make: Callable[[Path], Cache],
    first: Path,
    *,
    world: World,
    exchanging: bool,
    wanted: Placement | None,
    foreign: bool,
    expected_bytes: int,
) -> Cache:
    """Find or make the directory that this job uses on its node, and lock it. Collective.

    The first choice is ``first``. Where a job holds it that shares nothing, the choice is the first
    free one of ``first.1``, ``first.2``, ...: these stay, for later jobs. Where a job stages what
    this one needs too, and will share it, this one waits for as long as that job gets on.

    Args:
        make: Makes the cache of a directory.
        first: The node's own directory of the dataset.
        world: All ranks.
        exchanging: See `prepare`, as for ``wanted`` and ``expected_bytes``.
        wanted: The samples that it needs, as far as that is known.
        foreign: Whether another user's cache may be read.
        expected_bytes: Of the variable fields.

    Raises:
        CacheError: See `prepare`; or if a directory of somebody else is not what is needed.
    """

    def prepared(directory: Path, *, read_only: bool = False) -> Cache:
        cache = make(directory)
        try:
            prepare(
                cache,
                exchanging=exchanging,
                wanted=wanted,
                read_only=read_only,
                expected_bytes=expected_bytes,
            )
        except BaseException:
            cache.close()
            raise
        return cache

    leader = world.topology.ranks_of_node[world.node][0]
    patience = _Patience(world)
    cache = None
    while True:
        if world.rank == leader and cache is None:
            cache = patience.try_for(
                lambda: _choose(prepared, first, world, exchanging=exchanging, foreign=foreign)
            )
        chosen = b"" if cache is None else _described(cache)
        everyone = world.allgather(chosen, doing="open the caches")
        # Ranks that wait meet now and then: none takes another for lost.
        if all(everyone[ranks[0]] for ranks in world.topology.ranks_of_node):
            break
    return cache if cache is not None else _followed(make, everyone[leader])


def _described(cache: Cache) -> bytes:
    return (b"r" if cache.shared else b"w") + os.fsencode(cache.directory)


def _followed(make: Callable[[Path], Cache], chosen: bytes) -> Cache:
    cache = make(Path(os.fsdecode(chosen[1:])))
    cache.hold.follow(shared=chosen[:1] == b"r")
    return cache


def _choose(
    prepared: "_Prepare", first: Path, world: World, *, exchanging: bool, foreign: bool
) -> Cache:
    """Take the first directory that will do."""
    home, root, uid = first.parent, first.parents[1], os.getuid()
    reason = "it holds no cache of this dataset"
    if os.path.lexists(home):
        owner = home.lstat().st_uid
        if owner != uid or not os.access(home, os.W_OK | os.X_OK):
            reason = f"it belongs to user {owner}"
            if exchanging:
                reason += ", and only its owner may exchange rows in it, where it can be written"
            elif not os.access(home, os.R_OK | os.X_OK):
                reason += ", and nobody else may look into it"
            elif foreign and (why := distrust(root, home)):
                reason = why
                log.warning("[rank %d] %s: is not read: %s", world.rank, home, why)
            elif owner == uid or foreign:
                cache, reason = _read_only(prepared, first)
                if cache is not None:
                    return cache
            first = home.with_name(f"{home.name}-{uid}") / first.name
    if root.exists() and not os.access(root, os.W_OK | os.X_OK):
        raise CacheError(
            f"cache directory {root} is not writable for user {uid}, and what is there cannot "
            f"serve ({home.name}: {reason}); make it writable or give another directory "
            "(cache=..., TONARI_CACHE)"
        )
    return _writable(prepared, first, world)


def _writable(prepared: "_Prepare", first: Path, world: World) -> Cache:
    """Take the first that no other job has in a way that cannot be shared."""
    taken: CacheBusyError | None = None
    for directory in _candidates(first):
        try:
            cache = prepared(directory)
        except CacheStagingError:
            raise
        except CacheBusyError as busy:
            taken = taken or busy
            continue
        if taken is not None:
            log.warning("[rank %d] %s; this job uses %s", world.rank, taken, cache.directory)
        return cache
    raise AssertionError("candidates never end")


def _candidates(first: Path) -> Iterator[Path]:
    yield first
    for number in itertools.count(1):
        yield first.with_name(f"{first.name}.{number}")


def _read_only(prepared: "_Prepare", first: Path) -> tuple[Cache | None, str]:
    """Open what lies there, changing nothing; or say why not."""
    reason = "it holds no cache of this node"
    for directory in itertools.takewhile(Path.exists, _candidates(first)):
        try:
            return prepared(directory, read_only=True), ""
        except CacheStagingError:
            raise
        except CacheError as error:
            reason = str(error)
    return None, reason


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
