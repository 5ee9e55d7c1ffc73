"""A node's pool: rows by slot, scores beside them; staged, or put right after a kill."""

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.errors import CorruptRowError, SourceError
from dataio.base.progress import Progress
from dataio.base.sizes import format_bytes
from dataio.cache.cache import Cache
from dataio.cache.choice import open_cache, scores_directory
from dataio.cache.files.manifest import Entries, rehome
from dataio.cache.identity import Identity
from dataio.cache.quota import Budget, Need, plan_budget, too_small
from dataio.plan.history import ScoreColumn, score_dtype
from dataio.plan.layout import Layout
from dataio.plan.placement import Placement
from dataio.pool.pull import Pull
from dataio.pool.staging import Piece, Staging, plan_pieces
from dataio.pool.streaming import Half, SlotsOf, Streamed, Streaming, halve
from dataio.rows.fields import Field, declarations, row_schema
from dataio.rows.rows import Rows, RowSchema
from dataio.source.base import Source
from dataio.source.io.throttle import Throttle
from dataio.state.scores import no_scores, open_scores
from dataio.world import World

log = logging.getLogger(__name__)

LIMIT_NAME = "bandwidth"
"""State of the node's reading limit, in the cache's directory."""
LEAST_PART_BYTES = 1 << 20
"""Of a group of rows that is staged beside training, what one rank or reader takes at least."""
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
        columns: What scores remember of a row. If nothing, they are read-only, of rows never
            reported.
        foreign: Whether a whole cache of another user may be read, as when it was named.
        readers: Threads of this rank that read from the source while staging.
        bandwidth: Bytes/s that the node may read from the source while staging; 0: no limit.
        quota_bytes: What the files of this node's cache may take together; rows that do not fit
            are read from the source in every epoch, by `windows`. None: no limit.
        batch_size: Rows a batch of each rank: room for two is the least beside the rows that stay.

    Attributes:
        moves: Whether rows may be exchanged: with a quota, `ensure` and `agree_to_move` say so.
        streamed: What `windows` read.
        cache: The files.
        scores: scores[num_slots], shared by the node's ranks, and by no other job.
        keeps_scores: Whether they can be written.
        staging_s: Seconds that this rank spent reading from the source.
        pulled_rows: Rows that came to this rank from other nodes, outside of an exchange.
        pulled_bytes: Their bytes.
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
        columns: tuple[ScoreColumn, ...] = (),
        foreign: bool = False,
        readers: int = 2,
        bandwidth: float = 0.0,
        quota_bytes: int | None = None,
        batch_size: int = 1,
    ) -> None:
        self.source = source
        self.fields = fields
        self.world = world
        self.staging_s = 0.0
        self.pulled_rows = self.pulled_bytes = 0
        # Of messages; no channel is taken before one is needed.
        self._first_tag = -1
        self._progress = progress
        self._readers = readers
        self._bandwidth = bandwidth
        self._staging: Staging | None = None
        schema = row_schema(fields)
        # A relative pattern means another dataset in another working directory.
        place = source.name if "://" in source.name else str(Path(source.name).absolute())
        declared = declarations(fields)
        name = xxhash.xxh3_64_hexdigest(f"{place}|{schema}|{declared}|{purpose}".encode())[:12]
        directory = root / f"{_slug(source.name)}-{name}" / f"node{world.node}"
        # What is not just a pattern of shards says so: nobody can open it again by its name.
        kind = type(source).__name__
        origin = place if kind == "ShardedSource" else f"{kind}:{place}"
        self._exchanges = self.moves = num_leaving > 0
        self.keeps_scores = bool(columns)
        num_arrivals = 2 * num_leaving * world.local_size
        num_positions = num_slots + num_arrivals
        self.streamed = Streamed()
        self._halves: tuple[Half, Half] | None = None
        self._streaming: Streaming | None = None
        self._placement: Placement | None = None
        self._sample_ids: NDArray[np.int64] | None = None
        self._has_told = False
        self._budget: Budget | None = None
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
                _variable_bytes(source, schema),
                _shard_bytes(source, schema),
            )
            self._budget = _agreed_budget(quota_bytes, need, world)
            num_positions = min(num_positions, self._budget.positions)

        def cache_in(directory: Path) -> Cache:
            return Cache(
                directory,
                Identity(origin, source.fingerprint, schema, declared),
                num_slots=num_slots,
                num_positions=num_positions,
                local_rank=world.local_rank,
                local_size=world.local_size,
                budget=self._budget,
                num_arriving=num_leaving,
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
            dtype = score_dtype(columns)
            self.scores = no_scores(num_slots, dtype)
            if columns:
                with self.cache.named("make room for scores"):
                    place_of_scores = scores_directory(self.cache.directory)
                    self.scores = open_scores(place_of_scores, num_slots, dtype, world=world)
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
        commits, is stepped back; rows that another node holds come from there; only what no node
        holds is read from the source, each row once.

        Args:
            placement: The samples that the slots are to hold.
            groups: Ranges [start, stop) of slots, together all of them, in the order in which
                they are staged. Then it returns once the first is there, and threads go on with
                the rest: `await_rows` before use; `finish_staging`, which comes before the next
                commit, and `ensure` wait for all.
        """
        cache, world = self.cache, self.world
        assert groups is None or self._budget is None, "what does not fit comes in no group"
        self.finish_staging()
        self.close_windows()
        self.settle()
        self._placement, self._sample_ids = placement, None
        kept = self._kept(placement)
        entries = None if kept is None else kept()
        num_missing = cache.num_missing if entries is None else entries.count_missing()
        works = entries is not None or num_missing > 0 or len(cache.surplus) > 0
        lacks = num_missing > 0 and (entries is not None or not cache.room.is_filled)
        mine = np.array([works, lacks, not self.holds_nothing(), len(cache.surplus) > 0])
        found = world.allreduce(mine.astype(np.int64), op="max", doing="compare placements")
        if not found[0]:
            self._share()
            self._settle_quota()
            return
        pulls = world.num_nodes > 1 and bool(found[1] and found[2])
        if works:
            cache.begin_writing()
        self._rewrite(placement, entries, pulls=pulls)
        if pulls:
            self._pull(placement)
        if pulls or found[3]:
            self._let_go()
        self._fill(placement, groups)

    def _rewrite(self, placement: Placement, entries: Entries | None, *, pulls: bool) -> None:
        """Make these entries the manifest, if any are given. Collective.

        Where rows are to be pulled, those that belong to no slot any more are kept for it.
        """
        cache, world = self.cache, self.world
        surplus = None
        if entries is not None and pulls:
            surplus = self._surplus(placement.sample_ids())
        if world.local_rank == 0 and (entries is not None or cache.num_missing):
            (cache.directory / LIMIT_NAME).unlink(missing_ok=True)
        if world.local_rank == 0 and entries is not None:
            # Under a quota there is no room for more books: after a kill such rows are read anew.
            books = surplus if self._budget is None else None
            cache.rewrite(entries, epoch=placement.epoch, placement=placement.name, surplus=books)
        world.barrier(doing="settle the placement")
        if entries is not None:
            cache.load(num_slots=placement.num_slots, surplus=surplus)
        # Who opened it late would take rows that were staged since for rows that never missed.
        world.barrier(doing="open the settled cache")

    def _surplus(self, wanted: NDArray[np.int64]) -> Entries:
        """Find the rows that lie here and are not wanted here, each sample once."""
        held = self.cache.log.held()
        leaving = np.flatnonzero(~np.isin(held.sample_id[:], wanted))
        _, first = np.unique(held.sample_id[leaving], return_index=True)
        return held.take(leaving[np.sort(first)])

    def _pull(self, placement: Placement) -> None:
        """Take in the missing rows that other nodes hold. Collective."""
        if self._first_tag < 0:
            self._first_tag = self.world.open_channel()
        slots, ids = self._lacking(placement)
        pulled = Pull(
            self.world,
            self.cache,
            slots=slots,
            sample_ids=ids,
            num_samples=self.source.num_samples,
            first_tag=self._first_tag,
            shown=self._progress and self.world.rank == 0,
        ).run()
        self.pulled_rows += pulled.rows
        self.pulled_bytes += pulled.num_bytes

    def _let_go(self) -> None:
        """Commit what was pulled, and free what was only kept to be pulled. Collective."""
        if self.world.local_rank == 0:
            self.cache.fill_commit()
        self.world.barrier(doing="commit the rows that were pulled")
        self.cache.refresh()
        self.cache.log.forget_surplus()
        # Who looked late would take rows that were staged since for rows that never missed.
        self.world.barrier(doing="see the rows that were pulled")

    def _kept(self, placement: Placement) -> Callable[[], Entries] | None:
        """Find what the manifest must become; None if it is right, but for missing rows."""
        cache, budget = self.cache, self._budget
        if budget is not None and cache.num_missing and cache.room.beyond().any():
            # As after a run with smaller batches, which took smaller windows.
            return lambda: rehome(self._keepable(), placement.sample_ids())
        named = cache.placement == placement.name and len(cache.entries) == placement.num_slots
        # Rows that never leave lie in every epoch where they lay in the first.
        in_time = cache.epoch == placement.epoch or not self._exchanges
        if named and in_time:
            return None
        if named and cache.log.can_step_back and cache.epoch == placement.epoch + 1:
            return cache.log.before
        wanted = placement.sample_ids()
        if np.array_equal(cache.entries.sample_id[:], wanted):
            if in_time:
                cache.name_placement(placement.name)
                return None
            return lambda: cache.entries
        if cache.log.can_step_back and np.array_equal(cache.log.before().sample_id[:], wanted):
            return cache.log.before
        return lambda: rehome(self._keepable(), wanted)

    def _keepable(self) -> Entries:
        """The rows that may stay where they lie."""
        cache = self.cache
        if self._budget is None or (self.moves and not cache.num_missing):
            return cache.log.held()
        return cache.entries.take(~cache.room.beyond())

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
        if groups:
            # Even where the first was the last: other nodes may have more, and all settle at once.
            self.cache.adopt_staged()
            staging.go_on_alone()
        else:
            self._settle(staging)

    def _lacking(self, placement: Placement) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the slots whose rows are missing and may stay, and their samples."""
        cache = self.cache
        missing = np.empty(0, np.int64)
        if cache.num_missing and not cache.room.is_filled:
            missing = np.flatnonzero(~cache.entries.present)
        ids = placement.sample_ids()[missing] if len(missing) else missing
        if self._budget is not None:
            room = self._budget.resident_rows - (len(cache.entries) - cache.num_missing)
            # Whole shards, so that later as few as possible are read for what is missing.
            chosen = np.sort(np.argsort(ids, kind="stable")[: max(room, 0)])
            missing, ids = missing[chosen], ids[chosen]
        return missing, ids

    def _plan_staging(self, placement: Placement, groups: Sequence[tuple[int, int]]) -> Staging:
        cache, world = self.cache, self.world
        missing, ids = self._lacking(placement)
        positions = cache.log.space.set_aside(len(missing))
        starts = self.source.shard_starts
        pieces: list[Piece] = []
        row_bytes = cache.schema.fixed_bytes + _variable_bytes(self.source, cache.schema)
        least_rows = -(-LEAST_PART_BYTES // max(row_bytes, 1)) if len(groups) > 1 else 1
        for number, (start, stop) in enumerate(groups):
            rows = slice(*np.searchsorted(missing, [start, stop]).tolist())
            pieces += plan_pieces(
                Piece(number, missing[rows], ids[rows], positions[rows]),
                shard_starts=starts,
                local_rank=world.local_rank,
                local_size=world.local_size,
                num_readers=self._readers,
                least_rows=least_rows,
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
        if self._budget is not None:
            self._settle_overflow(staging)
        if self.world.local_rank == 0:
            self.cache.fill_commit()
            if self._budget is not None:
                self._forget_the_past()
        if self._budget is None or not self.cache.num_missing:
            self.cache.trim()
        self.world.barrier(doing="commit the staged rows")
        self.cache.refresh()
        self._share()
        self._settle_quota(staging)

    def _settle_overflow(self, staging: Staging) -> None:
        """Agree on the node whether all rows fit; if not, windows need their part. Collective."""
        cache, world = self.cache, self.world
        cannot_move = self._exchanges and not cache.room.may_have_room_to_move()
        ranks = world.topology.ranks_of_node[world.node]
        # An exchange needs room on every node; else rows come and go by the source.
        mine = np.array([staging.overflowed, cannot_move])
        over = world.allgather_array(mine.astype(np.int64), doing="compare rows with the quota")
        fits = not over[ranks, 0].any() and not over[:, 1].any()
        cache.settle_staged(all_fit=fits)
        world.barrier(doing="settle what fits")

    def _forget_the_past(self) -> None:
        """Leave no row to step back to where windows need its space."""
        cache = self.cache
        if cache.num_missing:
            if cache.log.can_step_back:
                cache.rewrite(cache.entries, epoch=cache.epoch, placement=cache.placement)
            cache.mark_filled()

    def _settle_quota(self, staging: Staging | None = None) -> None:
        """Agree whether rows can be exchanged, and make room for windows. Collective."""
        if self._budget is None:
            return
        cache, world = self.cache, self.world
        self.agree_to_move()
        self._halves = None
        if cache.num_missing and world.local_rank == 0:
            cache.hold.keep_alone()
            cache.reserve_windows()
        world.barrier(doing="make room for windows")
        if cache.num_missing:
            self._halves = halve(*cache.window_space())
        self._tell(staging)

    def _tell(self, staging: Staging | None) -> None:
        """Log on rank 0 what an epoch will read from the source. Collective."""
        cache, leads = self.cache, self.world.local_rank == 0
        present = len(cache.entries) - cache.num_missing
        row_bytes = cache.schema.fixed_bytes + cache.entries.extents_total_bytes / max(present, 1)
        rate = staging.num_bytes / max(self.staging_s, 1e-9) if staging is not None else 0.0
        missing = leads * cache.num_missing
        window_bytes = 0
        if self._halves is not None:
            half = self._halves[0]
            window_bytes = len(half.positions) * cache.schema.fixed_bytes + len(half.heap)
        mine = np.array([leads * present, missing, missing * row_bytes, rate, window_bytes])
        rows, missing, num_bytes, rate, window_bytes = self.world.allgather_array(
            mine.astype(np.float64), doing="say what does not fit"
        ).sum(axis=0)
        if self.world.rank or not missing or self._has_told:
            return
        self._has_told = True
        # A pass opens every shard that has a missing row: where rows are small it reads them whole.
        passes = max(-(-int(num_bytes) // max(int(window_bytes), 1)), 1)
        slowest = passes * num_bytes / rate if rate else 0.0
        cost = f", {num_bytes / rate:.1f} to {slowest:.1f} s at the rate of staging" if rate else ""
        log.warning(
            "[rank 0] quota: %d of %d rows (%.0f %%) stay in the caches; every epoch reads the "
            "other %d (about %s) from the source in about %d passes%s, beside training",
            rows, rows + missing, 100 * rows / (rows + missing), missing,
            format_bytes(int(num_bytes)), passes, cost,
        )  # fmt: skip

    def agree_to_move(self) -> bool:
        """Say whether every node has room for an exchange; once one has not, none has. Collective.

        Without a quota it is known.
        """
        if self._budget is not None and self.moves:
            cannot = np.array([not self.cache.room.has_room_to_move()])
            most = self.world.allreduce(
                cannot.astype(np.int64), op="max", doing="compare rooms for arrivals"
            )
            self.moves = not most[0]
        return self.moves

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """int64[num_slots]: The sample of every slot, also where its row is not here (yet)."""
        return self.ids_in(slice(None))

    def ids_in(self, slots: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """int64[len(slots)]: The samples of some slots, as `sample_ids` has them."""
        lacks_none = not self.is_staging and not self.cache.num_missing
        if lacks_none or self._placement is None:
            return self.cache.entries.sample_id[slots]
        if self._sample_ids is None:
            self._sample_ids = self._placement.sample_ids()
        return self._sample_ids[slots]

    @property
    def resident_fraction(self) -> float:
        """Rows that stay on this node, as a fraction of its pool."""
        return 1 - self.cache.num_missing / max(len(self.cache.entries), 1)

    def windows(self, slots_of: SlotsOf, steps: range) -> Generator[range, None, None]:
        """Yield runs of steps, each when all its rows lie in the cache. Blocks on the source.

        Where all rows stay that is one run. One caller at a time.

        Args:
            slots_of: ``(first_step, num_steps)`` -> their slots; called on another thread too.
            steps: The steps to train; of a run asked for later the rows are not there yet.

        Raises:
            StallError: If rows are not read within the world's time limit.
            DataioError: What the source raised.
        """
        if self._halves is None or not steps:
            yield from [steps] if steps else []
            return
        self.close_windows()
        streaming = self._streaming = Streaming(
            self.source,
            self.fields,
            self.cache,
            halves=self._halves,
            sample_ids=self.sample_ids,
            slots_of=slots_of,
            steps=steps,
            timeout_s=self.world.timeout_s,
            streamed=self.streamed,
        )
        try:
            yield from streaming.windows()
        finally:
            streaming.close()

    def close_windows(self) -> None:
        """Stop reading ahead, and forget the rows that do not stay; idempotent."""
        if self._streaming is not None:
            self._streaming.close()
            self._streaming = None

    def _share(self) -> None:
        """Let other jobs read the cache, if nothing will be written to it any more."""
        if not self._exchanges and not self.cache.num_missing:
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
            CorruptRowError: If the source has other bytes than the manifest's checksum tells, or
                no such sample.
        """
        ids, first = np.unique(self.cache.entries.sample_id[slots], return_index=True)
        slots, done = slots[first], 0
        for row in np.flatnonzero((ids < 0) | (ids >= self.source.num_samples))[:1].tolist():
            raise CorruptRowError(
                f"{self.cache.directory}: row {slots[row]} is said to be sample {ids[row]}, "
                f"expected one of the {self.source.num_samples} of {self.source.name}: whose rows "
                "lie where is no longer known; run `tonari cache verify`, which finds them again"
            )
        for rows in self.source.read(ids, self.fields):
            part = slots[done : done + len(rows)]
            done += len(rows)
            self._check_repair(part, rows)
            self.cache.rewrite_rows(part, rows)

    def fetch(self, sample_ids: NDArray[np.int64]) -> Iterator[Rows]:
        """Read samples from the source, to go in the place of rows that were damaged elsewhere.

        Args:
            sample_ids: int64[n], sorted, distinct; those that no sample has are left out.
        """
        known = (sample_ids >= 0) & (sample_ids < self.source.num_samples)
        return self.source.read(sample_ids[known], self.fields)

    def _check_repair(self, slots: NDArray[np.int64], rows: Rows) -> None:
        expected = self.cache.entries.checksum[slots]
        for row in np.flatnonzero(rows.checksum != expected)[:1].tolist():
            raise CorruptRowError(
                f"{self.cache.directory}: row {slots[row]} (sample {rows.sample_id[row]}) is "
                f"damaged; {self.source.name} now has checksum {rows.checksum[row]:#018x} for it, "
                f"the manifest says {expected[row]:#018x}; the source was changed or is damaged "
                f"too: restore it, or remove {self.cache.directory} to stage it again"
            )

    def settle(self) -> None:
        """Wait until this node's part of the last commit is durable. Blocks on the disk.

        Raises:
            CacheError: If it could not be written.
        """
        self.cache.settle()

    def close(self) -> None:
        """Release the cache; the files stay for the next job."""
        self.close_windows()
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


def _variable_bytes(source: Source, schema: RowSchema) -> int:
    """Guess the variable bytes of a row; 0: no idea."""
    mean = int(getattr(source, "total_bytes", 0)) // max(source.num_samples, 1)
    return max(mean - schema.fixed_bytes, 0) if schema.variable else 0


def _shard_bytes(source: Source, schema: RowSchema) -> int:
    """Guess the bytes of the largest shard; 0: no idea, or there are none."""
    starts = np.append(source.shard_starts, source.num_samples)
    most = int(np.diff(starts).max())
    if len(starts) < 3:
        return 0
    total = int(getattr(source, "total_bytes", 0))
    return most * schema.fixed_bytes if not total else total * most // source.num_samples


def _agreed_budget(quota_bytes: int, need: Need, world: World) -> Budget:
    """Divide the quota, or refuse it on all ranks alike. Collective.

    Raises:
        QuotaError: If it is too little on any node.
    """
    least = np.array([need.least_bytes()])
    most = int(world.allreduce(least, op="max", doing="compare quotas")[0])
    if quota_bytes < most:
        error = too_small(quota_bytes, most, need)
        error.all_ranks = True
        raise error
    return plan_budget(quota_bytes, need)


def _slug(name: str) -> str:
    base = name.rstrip("/").rsplit("/", 1)[-1]
    return "".join(letter if letter.isalnum() else "-" for letter in base)[:40].strip("-")
