"""What each shard holds: counted by the ranks together, kept on the node for the next start."""

import json
import logging
import os
import tempfile
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.errors import CacheError, SourceError
from dataio.base.own import check_own_file, own_subdirectory
from dataio.source.base import SampleCounts, Shard, ShardFormat
from dataio.source.storage.files import Storage
from dataio.world import World
from dataio.world.agree import agree

log = logging.getLogger(__name__)

RULES = "2"
"""Changes with what is a sample: what was counted by others counts for nothing."""
LISTED = (0, 0)
"""In place of a hint: an index of all shards says how many samples each holds."""
MAX_SEEK_POINTS = 1 << 16
"""Of all shards: every rank receives all. Where shards are many, few ranks read parts of them."""
COUNT_THREADS = 4
"""Shards that a rank counts at once: most of the time goes into waiting for the filesystem."""


class ShardInfo(NamedTuple):
    """A shard: the samples of its pieces, its bytes and time of change; its seek points, flat.

    ``beside`` are bytes and time of change of the file that lies beside it, if it has one;
    ``costs`` a byte for each sample, where they cost differently, in base 64; ``hint`` are bytes
    and time of change of what the counts were taken from, if that was not the shard.
    """

    counts: list[int]
    num_bytes: int
    mtime_ns: int
    seek_points: list[int]
    beside: Sequence[int] = ()
    costs: str = ""
    hint: Sequence[int] = ()


def own_directory(root: Path) -> Path | None:
    """Choose where this user keeps counts in a cache root that several users may share.

    Returns:
        A directory that is this user's alone, made where it was not there; None where others have
        put theirs in its place, whose counts nobody believes.
    """
    names = ("indexes", f"indexes-{os.getuid()}")
    found = own_subdirectory(root, names)
    if found is None:
        log.warning(
            "%s: is not this user's own, or others may write there: counts of shards are not read "
            "from it, nor kept; remove it, or give another cache directory (cache=..., "
            "TONARI_CACHE)",
            root / names[-1],
        )
    return found


def read_counts(directory: Path, paths: Sequence[str]) -> list[ShardInfo] | None:
    """Read what an earlier start found in these shards; None if there is nothing, or it is damaged.

    Whoever uses an entry compares bytes and time with the shard's.
    """
    file = _file(directory, paths)
    try:
        check_own_file(file)
        digest, _, text = file.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except (CacheError, OSError) as error:
        log.warning(
            "%s: the counts of %d shards cannot be read (%s); they are counted again: make the "
            "directory readable, or remove it",
            file,
            len(paths),
            error,
        )
        return None
    if digest.decode(errors="replace") != xxhash.xxh3_64_hexdigest(text):
        log.warning(
            "%s: damaged, expected the counts of %d shards; they are counted again",
            file,
            len(paths),
        )
        return None
    return [ShardInfo(*entry) for entry in json.loads(text)]


def write_counts(directory: Path, paths: Sequence[str], found: Sequence[ShardInfo]) -> None:
    """Keep what was found, atomically. A disk that takes no more only costs the next start."""
    text = json.dumps(found).encode()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Several jobs of a node may write it at once: no name is shared.
        descriptor, partial = tempfile.mkstemp(prefix=".partial-", dir=directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(f"{xxhash.xxh3_64_hexdigest(text)}\n".encode() + text)
            os.replace(partial, _file(directory, paths))
        except OSError:
            Path(partial).unlink()
            raise
    except OSError as error:
        log.warning(
            "%s: the counts of %d shards could not be kept (%s); the next start counts them again: "
            "make the directory writable and free some space",
            directory,
            len(paths),
            error,
        )


def _file(directory: Path, paths: Sequence[str]) -> Path:
    # A relative path means another shard in another working directory.
    names = [RULES, *(path if "://" in path else str(Path(path).absolute()) for path in paths)]
    return directory / f"{xxhash.xxh3_64_hexdigest(json.dumps(names).encode())}.survey"


@dataclass(frozen=True)
class ShardCounter:
    """Counts the samples of shards.

    Attributes:
        storage: Reads.
        shard_format: Of the shards.
        num_shards: How many share the seek points that there may be.
        grows: Whether others are appended: a shard is refused that its writer may go on with.
        may_be_empty: Whether a shard may hold no sample.
    """

    storage: Storage
    shard_format: ShardFormat
    num_shards: int
    grows: bool = False
    may_be_empty: bool = False

    def count(
        self, path: str, *, listed: int | None = None, earlier: ShardInfo | None = None
    ) -> ShardInfo:
        """Count the samples of a shard.

        Args:
            path: The shard.
            listed: Its samples, where an index of all shards says so.
            earlier: What an earlier start found, which is taken where the shard is as it was.

        Raises:
            SourceError: If it is empty or damaged, or not whole yet.
        """
        if path in self.storage.may_lack and listed and not self.storage.exists(path):
            return ShardInfo([listed], 0, 0, [])
        found = self._found(path, listed, earlier)
        if not self.may_be_empty and (found.num_bytes == 0 or sum(found.counts) < 1):
            raise SourceError(
                f"{path}: holds no samples ({found.num_bytes} bytes), expected at least one; "
                "remove the shard or write it again"
            )
        if self.grows and found != earlier:
            self.shard_format.check_ended(self.storage, path)
        # Each keeps its part of all seek points that there may be.
        points = np.array(found.seek_points, np.int64).reshape(-1, 2)
        step = 1 + len(points) * self.num_shards // MAX_SEEK_POINTS
        return found._replace(seek_points=points[::step].ravel().tolist())

    def _found(self, path: str, listed: int | None, earlier: ShardInfo | None) -> ShardInfo:
        now = self.storage.stat(path)
        beside = self._stat(self.shard_format.index_of(path))
        hinted = self.shard_format.hint_of(path) if listed is None else ""
        if earlier is not None and (
            (earlier.num_bytes, earlier.mtime_ns, *earlier.beside) == (*now, *beside)
        ):
            # What was taken from elsewhere is as good as that still is.
            hint = () if not earlier.hint else self._hint(listed, hinted)
            if (*earlier.hint,) == (*hint,) and listed in (None, *earlier.counts):
                return earlier
        hint = self._hint(listed, hinted)
        counts, points, costs = (
            SampleCounts([listed])
            if listed is not None
            else self.shard_format.count(self.storage, path)
        )
        costs_text = b64encode(costs).decode()
        return ShardInfo(counts, *now, points.ravel().tolist(), beside, costs_text, hint)

    def _hint(self, listed: int | None, hinted: str) -> tuple[int, ...]:
        return LISTED if listed is not None else self._stat(hinted)

    def _stat(self, path: str) -> tuple[int, ...]:
        """Bytes and time of change of a file, if it is there."""
        is_there = path and self.storage.exists(path, is_optional=True)
        return self.storage.stat(path) if is_there else ()


def own_part(num_shards: int, world: World) -> range:
    """Choose which shards a rank counts.

    In the order that nodes stage them: this one's page cache may still hold what it counted.
    """
    cuts = [num_shards * rank // world.world_size for rank in (world.rank, world.rank + 1)]
    return range(*cuts)


def count_shards(
    counter: ShardCounter,
    paths: Sequence[str],
    *,
    listed: Sequence[int] | None,
    known_by: Sequence[str],
    world: World,
    index_cache: Path | None,
) -> list[ShardInfo]:
    """Count the samples of all shards, each rank its part. Collective.

    A shard that changes from now on is refused when it is opened.

    Args:
        counter: Counts one.
        paths: The shards.
        listed: Samples of each, where an index of all says so.
        known_by: By which names what was found is kept.
        world: The ranks.
        index_cache: Where on this node; None: nowhere.

    Raises:
        SourceError: On every rank, if any finds a broken shard.
    """
    earlier = read_counts(index_cache, known_by) if index_cache is not None else None
    before: Sequence[ShardInfo | None] = [*(earlier or ()), *([None] * len(paths))]
    own = own_part(len(paths), world)

    def count() -> bytes:
        def one(i: int) -> ShardInfo:
            known = listed[i] if listed is not None else None
            return counter.count(paths[i], listed=known, earlier=before[i])

        with ThreadPoolExecutor(COUNT_THREADS, thread_name_prefix="tonari-count") as threads:
            return json.dumps(list(threads.map(one, own))).encode()

    parts = agree(world, count, doing="count the samples of the shards")
    found = [ShardInfo(*entry) for part in parts for entry in json.loads(part)]
    if index_cache is not None and found != earlier and world.local_rank == 0:
        write_counts(index_cache, known_by, found)
    for i, (path, shard) in enumerate(zip(paths, found, strict=True)):
        # Another node's copy may have another time.
        counter.storage.expect(path, shard.num_bytes, shard.mtime_ns if i in own else None)
        if shard.beside:
            num_bytes, mtime_ns = shard.beside
            index = counter.shard_format.index_of(path)
            counter.storage.expect(index, num_bytes, mtime_ns if i in own else None)
    return found


def number_samples(
    paths: Sequence[str], found: Sequence[ShardInfo]
) -> tuple[list[Shard], NDArray[np.int64]]:
    """Number the samples through all shards.

    Returns:
        The shards; and int64[num_pieces]: the first sample of each piece of all of them.
    """
    totals = [sum(shard.counts) for shard in found]
    firsts = accumulate(totals, initial=0)
    shards = [
        Shard(path, count, first, np.array(shard.seek_points, np.int64).reshape(-1, 2))
        for path, shard, count, first in zip(paths, found, totals, firsts, strict=False)
    ]
    pieces = np.concatenate([shard.counts for shard in found]).astype(np.int64)
    return shards, np.cumsum(pieces) - pieces
