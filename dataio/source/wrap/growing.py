"""Shards to which others are appended while a run goes on."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import xxhash

from dataio.base.errors import SourceError
from dataio.source.base import ShardedSource, ShardFormat
from dataio.source.counts import ShardInfo, number_samples
from dataio.source.storage.files import Storage
from dataio.world import World
from dataio.world.agree import agree

log = logging.getLogger(__name__)


class CountedShard(NamedTuple):
    """A shard, and what was found in it."""

    path: str
    found: ShardInfo


class GrowingSource(ShardedSource):
    """The first shards of a source to which others are appended.

    Sample ids never change: new shards stand behind those that are known.

    Args:
        name: The pattern as it was given.
        shard_format: How to read the shards.
        counted: All shards that are known, in their order.
        num_shards: As many of them are this source.
        own: Numbers of the shards that this process counted: it sees that they do not change.
        storage: Reads and counts.
        list_paths: Lists the shards that are there now.
        count: Counts the samples of one.
        keep: Keeps on the node what was counted.

    Attributes:
        counted: All shards that are known.
        prefixes: Digests of the first shards, for every number of them, the fewest first.
    """

    made_as = "Growing"

    def __init__(
        self,
        name: str,
        shard_format: ShardFormat,
        counted: Sequence[CountedShard],
        *,
        num_shards: int,
        own: Sequence[int],
        storage: Storage,
        list_paths: Callable[[], list[str]],
        count: Callable[[str], ShardInfo],
        keep: Callable[[Sequence[CountedShard]], None],
    ) -> None:
        self.counted = tuple(counted)
        self.prefixes = chained_digests(counted)
        self._num_shards, self._own = num_shards, tuple(own)
        self._list_paths, self._count, self._keep = list_paths, count, keep
        mine = self.counted[:num_shards]
        found = [shard.found for shard in mine]
        shards, piece_starts = number_samples([shard.path for shard in mine], found)
        super().__init__(
            name, shard_format, shards, fingerprint=self.prefixes[-1], storage=storage,
            piece_starts=piece_starts, total_bytes=sum(shard.num_bytes for shard in found),
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """Digest of this source's shards: of those that are known, the first."""
        return self.prefixes[self._num_shards - 1]

    def cut(self, num_samples: int) -> "GrowingSource":
        """Take the first shards, as many as hold these samples.

        Raises:
            SourceError: If no whole number of shards does.
        """
        totals = [sum(shard.found.counts) for shard in self.counted]
        ends = np.cumsum(totals)
        num_shards = int(np.searchsorted(ends, num_samples)) + 1
        if num_shards > len(ends) or ends[num_shards - 1] != num_samples:
            raise SourceError(
                f"{self.name}: its first shards hold {', '.join(map(str, ends[-4:]))} samples by "
                f"now, expected some that hold {num_samples} together, as when the epoch began; "
                "shards may only be appended: put back those that were there"
            )
        return self._with(self.counted, num_shards, self._own)

    def look(self, world: World) -> "GrowingSource":
        """Find the shards that were appended. Collective: rank 0 lists and counts for all.

        Shards that cannot be read to their end, as while they are written, are left for later, and
        so are those behind them.

        Returns:
            All shards that are known by now.

        Raises:
            SourceError: On all ranks, if a shard changed or vanished, or a new one sorts before
                one that is known. It names the shard.
        """

        def find() -> bytes:
            new = self._find_new() if world.rank == 0 else []
            for number in self._own:
                self._check_unchanged(self.counted[number])
            return json.dumps(new).encode()

        parts = agree(world, find, doing="look for new shards")
        new = [CountedShard(path, ShardInfo(*found)) for path, found in json.loads(parts[0])]
        known = (*self.counted, *new)
        own = (*self._own, *range(len(self.counted), len(known))) if world.rank == 0 else self._own
        for path, found in new:
            # Another node's copy may have another time.
            mtime_ns = found.mtime_ns if world.rank == 0 else None
            self.storage.expect(path, found.num_bytes, mtime_ns)
        if new and world.local_rank == 0:
            self._keep(known)
        return self._with(known, len(known), own)

    def describe_growth(self, earlier: "GrowingSource") -> str:
        """Say in a few words what came since this source was shorter."""
        num_shards = len(self.shards) - len(earlier.shards)
        num_samples = self.num_samples - earlier.num_samples
        return (
            f"{self.name}: grew by {num_shards} shard{'s' * (num_shards != 1)} with {num_samples} "
            f"samples to {self.num_samples} samples"
        )

    def _with(
        self, counted: Sequence[CountedShard], num_shards: int, own: Sequence[int]
    ) -> "GrowingSource":
        return GrowingSource(
            self.name, self._format, counted, num_shards=num_shards, own=own, storage=self.storage,
            list_paths=self._list_paths, count=self._count, keep=self._keep,
        )  # fmt: skip

    def _find_new(self) -> list[CountedShard]:
        paths, known = self._list_paths(), [shard.path for shard in self.counted]
        there = set(paths)
        for path in known:
            if path not in there:
                raise SourceError(
                    f"{path}: is no longer there, expected all {len(known)} shards of {self.name} "
                    "that the run began with; shards may only be appended: put it back"
                )
        for before, path in zip(known, paths, strict=False):
            if before != path:
                raise SourceError(
                    f"{path}: a new shard that comes before {before}, expected new shards behind "
                    f"the last one, {known[-1]}, as the samples keep their numbers; give it a name "
                    "that sorts behind"
                )
        new: list[CountedShard] = []
        for path in paths[len(known) :]:
            try:
                new.append(CountedShard(path, self._count(path)))
            except SourceError as error:
                log.warning(
                    "[rank 0] %s: is not taken into the next epoch, nor the shards behind it: it "
                    "is not whole yet, or damaged (%s); write shards under another name and rename "
                    "them when they are whole",
                    path,
                    error,
                )
                break
        return new

    def _check_unchanged(self, shard: CountedShard) -> None:
        size, mtime_ns = self.storage.stat(shard.path)
        if (size, mtime_ns) != (shard.found.num_bytes, shard.found.mtime_ns):
            raise SourceError(
                f"{shard.path}: changed since it was counted: {size} bytes, expected "
                f"{shard.found.num_bytes} bytes and the same time of change; shards may only be "
                "appended: put the old one back, or begin anew with other caches"
            )


def chained_digests(counted: Sequence[CountedShard]) -> list[str]:
    """Digest the first shards, for every number of them: 16 hex digits each."""
    digests = [""]
    for path, shard in counted:
        name, num_rows = PurePosixPath(path).name, sum(shard.counts)
        own = [digests[-1], name, num_rows, shard.num_bytes, shard.mtime_ns]
        digests.append(xxhash.xxh3_64_hexdigest(json.dumps(own).encode()))
    return digests[1:]
