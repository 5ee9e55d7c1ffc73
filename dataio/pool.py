"""A node's pool: rows by slot, scores beside them; staged, or put right after a kill."""

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.cache import Cache, Identity
from dataio.cache_choice import open_cache, scores_directory
from dataio.errors import SourceError
from dataio.fields import Field, row_schema
from dataio.layout import Layout
from dataio.manifest import Entries, rehome
from dataio.progress import Progress
from dataio.rows import RowSchema
from dataio.scores import no_scores, open_scores
from dataio.source.base import Source
from dataio.world import World

log = logging.getLogger(__name__)


class Pool:
    """The rows that this rank's node owns. Construction is collective.

    Args:
        source: Where the rows come from.
        fields: What is kept of a sample.
        world: All ranks.
        root: Cache directory of this node; the pool makes its own below it.
        num_slots: Rows of this node's pool.
        num_leaving: Rows that each local rank gives and takes an epoch.
        purpose: Pools of one dataset that are open at once must differ in it; each has its cache.
        progress: Whether rank 0 shows progress on a terminal.
        wanted: int64[num_slots]: What a pool whose rows never leave is to hold: a cache that holds
            it already is shared with other jobs. None: not known yet.
        uses_scores: Whether scores are kept. Without, they are read-only, of rows never reported.
        foreign: Whether a whole cache of another user may be read, as when it was named.

    Attributes:
        cache: The files.
        scores: SCORE_DTYPE[num_slots], shared by the node's ranks, and by no other job.
        keeps_scores: Whether they can be written.
        staging_s: Seconds that this rank spent reading from the source.
    """

    def __init__(
        self,
        source: Source,
        fields: Mapping[str, Field],
        *,
        world: World,
        root: Path,
        num_slots: int,
        num_leaving: int,
        purpose: str = "training",
        progress: bool = True,
        wanted: NDArray[np.int64] | None = None,
        uses_scores: bool = True,
        foreign: bool = False,
    ) -> None:
        self.source = source
        self.fields = fields
        self.world = world
        self.staging_s = 0.0
        self._progress = progress
        schema = row_schema(fields)
        # A relative pattern means another dataset in another working directory.
        place = source.name if "://" in source.name else str(Path(source.name).absolute())
        name = xxhash.xxh3_64_hexdigest(f"{place}|{schema}|{purpose}".encode())[:12]
        directory = root / f"{_slug(source.name)}-{name}" / f"node{world.node}"
        # What is not just a pattern of shards says so: nobody can open it again by its name.
        kind = type(source).__name__
        origin = place if kind == "ShardedSource" else f"{kind}:{place}"
        self._exchanges = num_leaving > 0
        self.keeps_scores = uses_scores

        def cache_in(directory: Path) -> Cache:
            return Cache(
                directory,
                Identity(origin, source.fingerprint, schema),
                num_slots=num_slots,
                num_positions=num_slots + 2 * num_leaving * world.local_size,
                local_rank=world.local_rank,
                local_size=world.local_size,
            )

        # Whoever catches an error may try again in this process: nothing may stay locked.
        with contextlib.ExitStack() as undo:
            self.cache = open_cache(
                cache_in,
                directory,
                world=world,
                exchanging=self._exchanges,
                wanted=wanted,
                foreign=foreign,
                expected_bytes=_expected_bytes(source, schema, num_slots),
            )
            undo.callback(self.close)
            self.cache.load()
            self.scores = no_scores(num_slots)
            if uses_scores:
                with self.cache.named("make room for scores"):
                    place_of_scores = scores_directory(self.cache.directory)
                    self.scores = open_scores(place_of_scores, num_slots, world=world)
            undo.pop_all()

    def holds_nothing(self) -> bool:
        """Whether this node's cache is new (or was never staged whole)."""
        return not self.cache.entries.present.any()

    def ensure(self, wanted: NDArray[np.int64], *, epoch: int) -> None:
        """Bring the pool to hold these samples: what lies here, and the rest from the source.

        Collective. Rows are kept wherever they lie; one epoch too far, as after a kill between two
        nodes' commits, is stepped back; only what no slot holds is read from the source, each row
        once.

        Args:
            wanted: int64[num_slots]: The sample that each slot is to hold.
            epoch: The epoch whose placement that is.
        """
        cache = self.cache
        # Rows that never leave lie in every epoch where they lay in the first.
        right = _holds(cache.entries, wanted) and (cache.epoch == epoch or not self._exchanges)
        if self.world.allgather_array(np.array([right]), doing="compare placements").all():
            self._share()
            return
        if not right:
            cache.begin_writing()
        if self.world.local_rank == 0 and not right:
            back = cache.previous
            stepped_back = back is not None and _holds(back, wanted)
            kept = back if back is not None and stepped_back else rehome(cache.entries, wanted)
            cache.rewrite(kept, epoch=epoch)
        self.world.barrier(doing="settle the placement")
        if not right:
            cache.num_slots = len(wanted)
            cache.load()
        self._fill(wanted, epoch=epoch)
        self._share()

    def _share(self) -> None:
        if not self._exchanges:
            self.cache.share()

    def _fill(self, wanted: NDArray[np.int64], *, epoch: int) -> None:
        """Read the missing rows, an even part on each local rank. Collective."""
        cache, world = self.cache, self.world
        missing = np.flatnonzero(~cache.entries.present)
        if world.allreduce(np.array([len(missing)]), op="max", doing="count missing rows")[0] == 0:
            return
        free = cache.free_positions[: len(missing)] if cache.fixed else np.full(len(missing), -1)
        cut = len(missing) * np.array([world.local_rank, world.local_rank + 1]) // world.local_size
        part = slice(int(cut[0]), int(cut[1]))
        self._read(wanted, missing[part], free[part])
        if len(missing):
            cache.seal(epoch)
        world.barrier(doing="finish staging")
        if len(missing):
            if world.local_rank == 0:
                cache.fill_commit(epoch)
            cache.trim()
        world.barrier(doing="commit the staged rows")
        cache.load()

    def _read(
        self, wanted: NDArray[np.int64], slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> None:
        started = time.perf_counter()
        order = np.argsort(wanted[slots], kind="stable")
        slots, positions = slots[order], positions[order]
        bar = Progress("staging", len(slots), shown=self._progress and self.world.rank == 0)
        done = 0
        for rows in self.source.read(wanted[slots], self.fields):
            part = slice(done, done + len(rows))
            self.cache.write_rows(slots[part], positions[part], rows)
            done += len(rows)
            bar.add(len(rows))
        bar.close()
        if done != len(slots):
            raise SourceError(
                f"{self.source.name}: {done} of {len(slots)} rows could be read; the source is "
                f"not what its index says: remove the index or write it again"
            )
        self.staging_s += time.perf_counter() - started

    def commit(self, epoch: int) -> None:
        """Make the arrivals written since the last commit this pool's rows, from ``epoch`` on.

        Collective, in two phases: when every rank's arrivals are durable each node replaces its
        manifest. A kill before, between or after leaves nodes at most one epoch apart, and `ensure`
        steps back one.
        """
        self.cache.seal(epoch)
        self.world.barrier(doing="make arrivals durable")
        if self.world.local_rank == 0:
            self.cache.commit(epoch)
        self.cache.turn(epoch)

    def close(self) -> None:
        """Release the cache; the files stay for the next job."""
        self.cache.close()


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


def _expected_bytes(source: Source, schema: RowSchema, num_slots: int) -> int:
    """Guess the bytes of the variable fields: the pool's part of the source, where it is known."""
    if not schema.variable:
        return 0
    return int(getattr(source, "total_bytes", 0)) * num_slots // max(source.num_samples, 1)


def _holds(entries: Entries, wanted: NDArray[np.int64]) -> bool:
    return np.array_equal(entries.sample_id, wanted)


def _slug(name: str) -> str:
    base = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(letter if letter.isalnum() else "-" for letter in base)[:40].strip("-")
