"""Carry out what `reconcile` decided: write the manifest, pull rows, read the rest, commit."""

import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.base.progress import ProgressBar
from dataio.options import Staging
from dataio.plan.placement import Placement
from dataio.rows.fields import Field
from dataio.source.base import Source
from dataio.source.storage.throttle import Throttle
from dataio.store.cache import Cache
from dataio.store.pull import Pull
from dataio.store.quota_agreement import QuotaAgreement
from dataio.store.reconcile import FillingPlan, MissingRows, find_missing, find_surplus
from dataio.store.share import guess_variable_bytes
from dataio.store.staging import StagingPiece, StagingRun, plan_pieces
from dataio.world import World

LIMIT_NAME = "bandwidth"
"""The file of the cache's directory that keeps the state of the node's reading limit."""
LEAST_PART_BYTES = 1 << 20
"""What one rank or reader takes at least of a group of rows that is staged beside training."""
TICK_S = 1.0
"""How often the ranks that stage report to one another how many rows they have."""


class Filling:
    """Brings missing rows into a node's cache: from other nodes, and the rest from the source.

    Args:
        source: Where the rows come from.
        fields: What is kept of a sample.
        cache: The node's files.
        world: All ranks.
        quota: What the nodes agree on under a quota; None without one.
        shares: Whether other jobs may read the cache once it is whole.
        shows_progress: Whether this rank says on standard error how far it is.
        staging: How rows come from the source.
        num_owned: Slots before those of copies, which come from other nodes once these have their
            rows; None: there are no copies.
        earlier: One of a pool of fewer samples, whose figures and messages' tags go on.

    Attributes:
        staging_s: Seconds that this rank spent reading from the source.
        staging_bytes: That it read from there in that time, and ``staged_rows`` the rows.
        pulled_rows: Rows that came to this rank from other nodes.
        pulled_bytes: Their bytes.
    """

    def __init__(
        self,
        source: Source,
        fields: Mapping[str, Field],
        cache: Cache,
        *,
        world: World,
        quota: QuotaAgreement | None,
        shares: bool,
        shows_progress: bool,
        staging: Staging,
        num_owned: int | None = None,
        earlier: "Filling | None" = None,
    ) -> None:
        self._source = source
        self._fields = fields
        self._cache = cache
        self._world = world
        self._quota = quota
        self._shares = shares
        self._shows_progress = shows_progress
        self._readers = staging.readers
        self._bandwidth = staging.bytes_per_s
        self._num_owned = num_owned
        self._wanted: Placement | None = None
        self.staging_s, self.staging_bytes, self.staged_rows = 0.0, 0, 0
        self.pulled_rows = self.pulled_bytes = 0
        # Of messages; no channel is taken before one is needed.
        self._first_tag = -1
        if earlier is not None:
            self._first_tag, self.staging_s = earlier._first_tag, earlier.staging_s
            self.staging_bytes, self.staged_rows = earlier.staging_bytes, earlier.staged_rows
            self.pulled_rows, self.pulled_bytes = earlier.pulled_rows, earlier.pulled_bytes
        self._staging: StagingRun | None = None

    @property
    def is_staging(self) -> bool:
        """Whether rows still come in beside training."""
        return self._staging is not None

    def carry_out(self, plan: FillingPlan, *, groups: Sequence[tuple[int, int]] | None) -> None:
        """Bring the node to hold what its plan wants. Collective.

        Args:
            plan: What this node does.
            groups: Ranges [start, stop) of slots, together all of them, in the order in which they
                are staged. Then only the first is awaited. None: all rows are awaited.
        """
        cache, world, self._wanted = self._cache, self._world, plan.wanted
        if plan.change == "name":
            cache.log.placement = plan.wanted.name
        holds_rows = cache.log.num_missing < len(cache.entries)
        mine = [plan.has_work, len(plan.missing.slots) > 0, holds_rows, len(cache.log.surplus) > 0]
        has_work, lacks_rows, any_rows, has_surplus = world.allreduce(
            np.array(mine, np.int64), op="max", doing="compare placements"
        ).tolist()
        if not has_work:
            self._share()
            if self._quota is not None:
                self._quota.make_windows()
            return
        pulls = world.num_nodes > 1 and bool(lacks_rows and any_rows)
        if plan.has_work:
            cache.begin_writing()
        self._write_manifest(plan, pulls=pulls)
        missing = plan.missing
        if pulls:
            self._pull(missing)
        if pulls or has_surplus:
            self._commit_pulled()
            missing = self._missing(plan.wanted)
        if self._num_owned is not None:
            num_owned = int(np.searchsorted(missing.slots, self._num_owned))
            missing = MissingRows(missing.slots[:num_owned], missing.sample_ids[:num_owned])
        self._stage(missing, groups or [(0, plan.wanted.num_slots)], in_groups=bool(groups))
        if self._num_owned is not None and not groups:
            self._take_copies()

    def _missing(self, wanted: Placement) -> MissingRows:
        cache = self._cache
        return find_missing(
            cache.entries,
            wanted,
            num_missing=cache.log.num_missing,
            is_filled=cache.room.is_filled,
            budget=self._quota.budget if self._quota is not None else None,
        )

    def _take_copies(self) -> None:
        """Pull the copies that are missing, now that their owners have the rows. Collective.

        What an owner cannot give, as it is damaged there, comes from the source.
        """
        lacks = np.array([self._cache.log.num_missing])
        if self._world.allreduce(lacks, op="max", doing="count missing copies")[0]:
            assert self._wanted is not None
            self._pull(self._missing(self._wanted))
            self._commit_pulled()
            every = [(0, self._wanted.num_slots)]
            self._stage(self._missing(self._wanted), every, in_groups=False)

    def _write_manifest(self, plan: FillingPlan, *, pulls: bool) -> None:
        """Make the plan's entries the manifest, if it has any. Collective.

        If rows are to be pulled, those that belong to no slot any more are kept until then.
        """
        cache, world, entries = self._cache, self._world, plan.entries
        surplus = None
        if entries is not None and pulls:
            surplus = find_surplus(cache.log.held(), plan.wanted.sample_ids())
        if world.local_rank == 0 and (entries is not None or cache.log.num_missing):
            (cache.directory / LIMIT_NAME).unlink(missing_ok=True)
        if world.local_rank == 0 and entries is not None:
            # A quota has no room for one more file: after a kill such rows are read again.
            kept = surplus if self._quota is None else None
            cache.rewrite(
                entries, epoch=plan.wanted.epoch, placement=plan.wanted.name, surplus=kept
            )
        world.barrier(doing="write the placement")
        if entries is not None:
            cache.load(num_slots=plan.wanted.num_slots, surplus=surplus)
        # A rank that opened it late would take rows that were staged since for rows that never
        # were missing.
        world.barrier(doing="open the cache with its new placement")

    def _pull(self, missing: MissingRows) -> None:
        """Take in the missing rows that other nodes hold. Collective."""
        if self._first_tag < 0:
            self._first_tag = self._world.open_channel()
        pulled = Pull(
            self._world,
            self._cache,
            slots=missing.slots,
            sample_ids=missing.sample_ids,
            num_samples=self._source.num_samples,
            first_tag=self._first_tag,
            shown=self._shows_progress,
        ).run()
        self.pulled_rows += pulled.rows
        self.pulled_bytes += pulled.num_bytes

    def _commit_pulled(self) -> None:
        """Commit what was pulled, and free what was only kept to be pulled. Collective."""
        if self._world.local_rank == 0:
            self._cache.fill_commit()
        self._world.barrier(doing="commit the rows that were pulled")
        self._cache.refresh()
        self._cache.log.forget_surplus()
        # A rank that looked late would take rows that were staged since for rows that never were
        # missing.
        self._world.barrier(doing="see the rows that were pulled")

    def _stage(
        self, missing: MissingRows, groups: Sequence[tuple[int, int]], *, in_groups: bool
    ) -> None:
        """Read the missing rows, a part on each local rank. Collective."""
        self._staging = staging = self._plan_staging(missing, groups)
        started, read_before = time.perf_counter(), self._source.bytes_read
        staging.start()
        self._drive(staging, num_groups=min(1, len(groups)) if in_groups else len(groups))
        self.staging_s += time.perf_counter() - started
        self.staging_bytes += self._source.bytes_read - read_before
        self.staged_rows += staging.num_rows
        if in_groups:
            # Even if the first group was the last: other nodes may have more, and all commit at
            # once.
            self._cache.log.adopt_staged()
            staging.go_on_alone()
        else:
            self._commit(staging)

    def _plan_staging(self, missing: MissingRows, groups: Sequence[tuple[int, int]]) -> StagingRun:
        cache, world = self._cache, self._world
        slots, ids = missing.slots, missing.sample_ids
        positions = cache.log.space.set_aside(len(slots))
        row_bytes = cache.schema.fixed_bytes + guess_variable_bytes(self._source, cache.schema)
        least_rows = -(-LEAST_PART_BYTES // max(row_bytes, 1)) if len(groups) > 1 else 1

        def pieces_of(local_rank: int) -> list[StagingPiece]:
            pieces: list[StagingPiece] = []
            for number, (start, stop) in enumerate(groups):
                rows = slice(*np.searchsorted(slots, [start, stop]).tolist())
                pieces += plan_pieces(
                    StagingPiece(number, slots[rows], ids[rows], positions[rows]),
                    shard_starts=self._source.shard_starts,
                    local_rank=local_rank,
                    local_size=world.local_size,
                    num_readers=self._readers,
                    least_rows=least_rows,
                )
            return pieces

        def stagers(lacking: NDArray[np.int64]) -> list[int]:
            return [
                rank for local, rank in enumerate(world.topology.ranks_of_node[world.node])
                if any(np.isin(lacking, piece.slots).any() for piece in pieces_of(local))
            ]  # fmt: skip

        limit = (
            Throttle(str(cache.directory / LIMIT_NAME), bytes_per_s=self._bandwidth)
            if self._bandwidth
            else None
        )
        return StagingRun(
            self._source,
            self._fields,
            cache,
            pieces_of(world.local_rank),
            num_groups=len(groups),
            num_readers=self._readers,
            limit=limit,
            stagers=stagers,
        )

    def _drive(self, staging: StagingRun, *, num_groups: int, alone: bool = False) -> None:
        """Stage until every rank has its groups, in step: no rank waits long for a slow one."""
        bar: ProgressBar | None = None
        before = np.zeros(3, np.int64)
        while True:
            if alone:
                staging.wait(TICK_S)
            else:
                staging.write(num_groups=num_groups, limit_s=TICK_S)
            waits = staging.groups_done < num_groups
            mine = np.array([staging.num_rows, staging.num_bytes, staging.total_rows, waits])
            sums = self._world.allreduce(mine, op="sum", doing="stage rows")
            if self._shows_progress and (bar or sums[3]):
                bar = bar or ProgressBar("staging", int(sums[2]), shown=True)
                bar.add(int(sums[0] - before[0]), num_bytes=int(sums[1] - before[1]))
            before = sums[:3]
            if not sums[3]:
                if bar is not None:
                    bar.close()
                return

    def _commit(self, staging: StagingRun) -> None:
        """Commit what all ranks have staged. Collective."""
        cache = self._cache
        staging.close()
        self._staging = None
        quota = self._quota
        if quota is not None:
            quota.agree_on_staged(overflowed=staging.overflowed)
        if self._world.local_rank == 0:
            cache.fill_commit()
            if quota is not None:
                quota.mark_filled()
        if cache.files.has_heap and (quota is None or not cache.log.num_missing):
            cache.disk.trim()
        self._world.barrier(doing="commit the staged rows")
        cache.refresh()
        self._share()
        if quota is not None:
            rate = staging.num_bytes / max(self.staging_s, 1e-9)
            quota.make_windows(staged_bytes_per_s=rate)

    def _share(self) -> None:
        """Let other jobs read the cache, if nothing will be written to it any more."""
        if self._shares and not self._cache.log.num_missing:
            self._cache.share()

    def await_rows(self, slots: NDArray[np.int64]) -> None:
        """Wait until these rows are staged on this node; see `Pool.await_rows`."""
        if self._staging is not None:
            self._staging.await_rows(slots, timeout_s=self._world.timeout_s)

    def finish(self) -> None:
        """Wait for what is still being staged, and commit it; see `Pool.finish_staging`."""
        staging = self._staging
        if staging is not None:
            self._drive(staging, num_groups=staging.num_groups, alone=True)
            self._commit(staging)
            if self._num_owned is not None:
                self._take_copies()

    def close(self) -> None:
        """Stop the threads that stage."""
        if self._staging is not None:
            self._staging.close()
