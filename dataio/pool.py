"""A node's pool: rows by slot, scores beside them; staged, or put right after a kill."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.cache import Cache, Identity
from dataio.cache_choice import open_cache, scores_directory
from dataio.errors import CorruptRowError, SourceError
from dataio.fields import Field, row_schema
from dataio.layout import Layout
from dataio.manifest import Entries, rehome
from dataio.placement import Placement
from dataio.progress import Progress
from dataio.rows import Rows, RowSchema
from dataio.scores import no_scores, open_scores
from dataio.source.base import Source
from dataio.source.throttle import Throttle
from dataio.staging import Piece, Staging, plan_pieces
from dataio.world import World

log = logging.getLogger(__name__)

LIMIT_NAME = "bandwidth"
"""State of the node's reading limit, in the cache's directory."""
TICK_S = 1.0
"""How often ranks that stage tell one another how far they are."""


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
        wanted: What a pool whose rows never leave is to hold: a cache that holds it already is
            shared with other jobs. None: not known yet.
        uses_scores: Whether scores are kept. Without, they are read-only, of rows never reported.
        foreign: Whether a whole cache of another user may be read, as when it was named.
        readers: Threads of this rank that read from the source while staging.
        bandwidth: Bytes/s that the node may read from the source while staging; 0: no limit.

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
        wanted: Placement | None = None,
        uses_scores: bool = True,
        foreign: bool = False,
        readers: int = 2,
        bandwidth: float = 0.0,
    ) -> None:
        self.source = source
        self.fields = fields
        self.world = world
        self.staging_s = 0.0
        self._progress = progress
        self._readers = readers
        self._bandwidth = bandwidth
        self._staging: Staging | None = None
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
        """Whether this node's cache is new (or was never staged at all)."""
        return self.cache.num_missing == len(self.cache.entries)

    @property
    def is_staging(self) -> bool:
        """Whether rows are still coming in beside training."""
        return self._staging is not None

    def held(self) -> Placement:
        """Say what the pool holds now."""
        cache = self.cache
        return Placement(
            cache.placement, cache.epoch, len(cache.entries), lambda: cache.entries.sample_id[:]
        )

    def ensure(
        self, placement: Placement, *, groups: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Bring the pool to hold these samples: what lies here, and the rest from the source.

        Collective. A cache that says it holds this placement, whole, is taken at its word. Else
        rows are kept wherever they lie; one epoch too far, as after a kill between two nodes'
        commits, is stepped back; only what no slot holds is read from the source, each row once.

        Args:
            placement: The samples that the slots are to hold.
            groups: Ranges [start, stop) of slots, together all of them, in the order in which
                they are staged. Then it returns once the first is there, and threads go on with
                the rest: `await_rows` before use; the next `commit` or `ensure` waits for all.
        """
        cache, world = self.cache, self.world
        self.finish_staging()
        kept = self._kept(placement)
        work = np.array([kept is not None, cache.num_missing > 0])
        if not world.allreduce(work.astype(np.int64), op="max", doing="compare placements").any():
            self._share()
            return
        if work.any():
            cache.begin_writing()
        if world.local_rank == 0 and work.any():
            (cache.directory / LIMIT_NAME).unlink(missing_ok=True)
            if kept is not None:
                cache.rewrite(kept(), epoch=placement.epoch, placement=placement.name)
        world.barrier(doing="settle the placement")
        if kept is not None:
            cache.num_slots = placement.num_slots
            cache.load()
        # Who opened it late would take rows that were staged since for rows that never missed.
        world.barrier(doing="open the settled cache")
        self._fill(placement, groups)

    def _kept(self, placement: Placement) -> Callable[[], Entries] | None:
        """Find what the manifest must become; None if it is right, but for missing rows."""
        cache = self.cache
        named = cache.placement == placement.name and len(cache.entries) == placement.num_slots
        # Rows that never leave lie in every epoch where they lay in the first.
        in_time = cache.epoch == placement.epoch or not self._exchanges
        if named and in_time:
            return None
        if named and cache.can_step_back and cache.epoch == placement.epoch + 1:
            return cache.before
        wanted = placement.sample_ids()
        if np.array_equal(cache.entries.sample_id[:], wanted):
            if in_time:
                cache.placement = placement.name
                return None
            return lambda: cache.entries
        if cache.can_step_back and np.array_equal(cache.before().sample_id[:], wanted):
            return cache.before
        return lambda: rehome(cache.entries, wanted)

    def _fill(self, placement: Placement, groups: Sequence[tuple[int, int]] | None) -> None:
        """Read the missing rows, a part on each local rank. Collective."""
        staging = self._plan_staging(placement, groups or [(0, placement.num_slots)])
        self._staging = staging
        started = time.perf_counter()
        staging.start()
        last = len(groups) if groups else 1
        ready = min(1, last) if groups else last
        self._drive(staging, num_groups=ready)
        self.staging_s += time.perf_counter() - started
        if groups and len(groups) > 1:
            self.cache.adopt_staged()
            staging.go_on_alone()
        else:
            self._settle(staging)

    def _plan_staging(self, placement: Placement, groups: Sequence[tuple[int, int]]) -> Staging:
        cache, world = self.cache, self.world
        missing = np.empty(0, np.int64)
        if cache.num_missing:
            missing = np.flatnonzero(~cache.entries.present)
        positions = cache.set_aside(len(missing))
        ids = placement.sample_ids()[missing] if len(missing) else missing
        starts = self.source.shard_starts
        pieces: list[Piece] = []
        for number, (start, stop) in enumerate(groups):
            rows = slice(*np.searchsorted(missing, [start, stop]).tolist())
            pieces += plan_pieces(
                Piece(number, missing[rows], ids[rows], positions[rows]),
                shard_starts=starts,
                local_rank=world.local_rank,
                local_size=world.local_size,
                num_readers=self._readers,
            )
        limit = (
            Throttle(str(cache.directory / LIMIT_NAME), bytes_per_s=self._bandwidth)
            if self._bandwidth
            else None
        )
        return Staging(
            self.source,
            self.fields,
            cache,
            pieces,
            num_groups=len(groups),
            num_readers=self._readers,
            limit=limit,
        )

    def _drive(self, staging: Staging, *, num_groups: int, alone: bool = False) -> None:
        """Stage until every rank has its groups, in step: no rank waits long for a slow one."""
        bar: Progress | None = None
        shown = self._progress and self.world.rank == 0
        before = np.zeros(3, np.int64)
        while True:
            if alone:
                staging.wait(TICK_S)
            else:
                staging.write(num_groups=num_groups, limit_s=TICK_S)
            waits = staging.groups_done < num_groups
            mine = np.array([staging.num_rows, staging.num_bytes, staging.total_rows, waits])
            sums = self.world.allreduce(mine, op="sum", doing="stage rows")
            bar = bar or Progress("staging", int(sums[2]), shown=shown)
            bar.add(int(sums[0] - before[0]), num_bytes=int(sums[1] - before[1]))
            before = sums[:3]
            if not sums[3]:
                bar.close()
                return

    def _settle(self, staging: Staging) -> None:
        """Commit what all ranks have staged. Collective."""
        staging.close()
        self._staging = None
        if self.world.local_rank == 0:
            self.cache.fill_commit()
        self.cache.trim()
        self.world.barrier(doing="commit the staged rows")
        self.cache.refresh()
        self._share()

    def _share(self) -> None:
        """Let other jobs read the cache, if nothing will be written to it any more."""
        if not self._exchanges:
            self.cache.share()

    def await_rows(self, slots: NDArray[np.int64]) -> None:
        """Wait until these rows are staged on this node. Blocks; any thread may call it.

        Raises:
            StallError: If they are not within the world's time limit.
            DataioError: What stopped this rank's staging.
        """
        if self._staging is not None:
            self._staging.await_rows(slots, timeout_s=self.world.timeout_s)

    def finish_staging(self) -> None:
        """Wait for what is still being staged, and commit it. Collective; at once if nothing is.

        Arrivals of the running epoch stay.
        """
        staging = self._staging
        if staging is not None:
            self._drive(staging, num_groups=staging.num_groups, alone=True)
            self._settle(staging)

    def make_room(self) -> None:
        """Claim the disk space that arrivals need, before the first exchange begins.

        Raises:
            CacheError: If the disk is full.
        """
        self.cache.make_room()

    def repair(self, slots: NDArray[np.int64]) -> None:
        """Read rows from the source again and write them anew where they lie.

        Raises:
            CorruptRowError: If the source has other bytes than the manifest's checksum tells.
        """
        ids, first = np.unique(self.cache.entries.sample_id[slots], return_index=True)
        slots, done = slots[first], 0
        for rows in self.source.read(ids, self.fields):
            part = slots[done : done + len(rows)]
            done += len(rows)
            self._check_repair(part, rows)
            self.cache.rewrite_rows(part, rows)

    def _check_repair(self, slots: NDArray[np.int64], rows: Rows) -> None:
        expected = self.cache.entries.checksum[slots]
        for row in np.flatnonzero(rows.checksum != expected)[:1].tolist():
            raise CorruptRowError(
                f"{self.cache.directory}: row {slots[row]} (sample {rows.sample_id[row]}) is "
                f"damaged; {self.source.name} now has checksum {rows.checksum[row]:#018x} for it, "
                f"the manifest says {expected[row]:#018x}; the source was changed or is damaged "
                f"too: restore it, or remove {self.cache.directory} to stage it again"
            )

    def commit(self, epoch: int) -> NDArray[np.int64]:
        """Make the arrivals written since the last commit this pool's rows, from ``epoch`` on.

        Collective, in two phases: when every rank's arrivals are durable each node replaces its
        manifest. A kill before, between or after leaves nodes at most one epoch apart, and `ensure`
        steps back one.

        Returns:
            int64[n]: Slots that hold other rows than before.
        """
        self.finish_staging()
        self.cache.seal(epoch)
        self.world.barrier(doing="make arrivals durable")
        if self.world.local_rank == 0:
            self.cache.commit(epoch)
        return self.cache.turn(epoch)

    def close(self) -> None:
        """Release the cache; the files stay for the next job."""
        if self._staging is not None:
            self._staging.close()
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


def _slug(name: str) -> str:
    base = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(letter if letter.isalnum() else "-" for letter in base)[:40].strip("-")
