"""A node's pool: rows by slot, and their scores; the parts of it put together."""

import contextlib
from collections.abc import Generator, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dataio.plan.history import Scores, needs_outcome, score_dtype
from dataio.plan.placement import Placement
from dataio.rows.rows import Rows
from dataio.state.scores import no_scores, open_scores
from dataio.store.checked_source import AreExcluded, CheckedSource, no_rows
from dataio.store.filling import Filling
from dataio.store.open import NodeRows, open_cache, scores_directory
from dataio.store.quota_agreement import QuotaAgreement
from dataio.store.reconcile import HeldRows, reconcile
from dataio.store.repair import repair_rows
from dataio.store.streaming import SlotsOf, Streamed, Streaming

MOST_BYTES = 2**32 - 1
"""More than a row has: what the scores' column holds."""


class Pool:
    """The rows that this rank's node owns. Construction is collective.

    Args:
        rows: Which.
        are_excluded: See `Session`.
        earlier: A pool of fewer samples, closed before, whose figures and messages' tags go on.

    Attributes:
        streamed: Counts what `windows` read.
        checked_source: Reads the source as staging does, and raises what it refused.
        cache: The files.
        num_slots: Rows that the node owns; copies of another node's have the slots behind them.
        scores: scores[num_slots], shared by the node's ranks, and by no other job; read-only, as of
            rows never reported, where the policy keeps none.
        keeps_scores: Whether they can be written.
        needs_outcome: Whether some of them follow from what a report says beside the loss.
    """

    def __init__(
        self, rows: NodeRows, are_excluded: AreExcluded = no_rows, *, earlier: "Pool | None" = None
    ) -> None:
        source, fields, share, world = rows.source, rows.fields, rows.share, rows.world
        arguments, columns = rows.arguments, rows.arguments.columns
        self.source = source
        self.checked_source = CheckedSource(
            source, check=arguments.staging.check, skips=arguments.on_error == "skip",
            are_excluded=are_excluded, verifies=arguments.cache.verify != "never",
        )  # fmt: skip
        self.fields = fields
        self.world = world
        self.num_slots = share.num_slots
        self.keeps_scores = bool(columns)
        self.needs_outcome = needs_outcome(columns)
        self.streamed = Streamed(keeps_sizes="bytes" in columns)
        if earlier is not None:
            self.streamed = earlier.streamed
        self._exchanges = share.num_leaving > 0
        self._streaming: Streaming | None = None
        self._placement: Placement | None = None
        self._sample_ids: NDArray[np.int64] | None = None
        # Whoever catches an error may try again in this process: nothing may stay locked.
        with contextlib.ExitStack() as undo:
            self.cache, budget = open_cache(rows)
            undo.callback(self.cache.close)
            self.cache.load()
            dtype = score_dtype(columns)
            if not columns:
                self.scores = no_scores(share.num_slots, dtype)
            else:
                with self.cache.named("make room for scores"):
                    place_of_scores = scores_directory(self.cache.directory)
                    self.scores = open_scores(place_of_scores, share.num_slots, dtype, world=world)
            undo.pop_all()
        self._quota: QuotaAgreement | None = None
        if budget is not None:
            self._quota = QuotaAgreement(
                budget, self.cache, world, num_leaving=share.num_leaving, fields=fields,
                source=self.checked_source, batch_size=arguments.batch_size,
                sample_ids=lambda: self.sample_ids,
            )  # fmt: skip
        self._filling: Filling = Filling(
            self.checked_source,
            fields,
            self.cache,
            world=world,
            quota=self._quota,
            shares=not self._exchanges,
            shows_progress=arguments.reports.progress and world.rank == 0,
            staging=arguments.staging,
            num_owned=share.num_slots if share.num_copied else None,
            earlier=earlier._filling if earlier is not None else None,
        )

    @property
    def moves(self) -> bool:
        """Whether rows may be exchanged: with a quota, `ensure` and `agree_to_move` decide."""
        return self._exchanges if self._quota is None else self._quota.rows_move

    @property
    def staging_s(self) -> float:
        """Seconds that this rank spent reading from the source while staging."""
        return self._filling.staging_s

    @property
    def staging_bytes(self) -> int:
        """Bytes that this rank read from the source in that time."""
        return self._filling.staging_bytes

    @property
    def staged_rows(self) -> int:
        """Rows that this rank read from the source in that time."""
        return self._filling.staged_rows

    @property
    def pulled_rows(self) -> int:
        """Rows that came to this rank from other nodes, outside of an exchange."""
        return self._filling.pulled_rows

    @property
    def pulled_bytes(self) -> int:
        """Bytes of the rows that came from other nodes, outside of an exchange."""
        return self._filling.pulled_bytes

    def holds_nothing(self) -> bool:
        """Whether this node's cache is new (or was never staged at all)."""
        return self.cache.log.num_missing == len(self.cache.entries)

    @property
    def is_staging(self) -> bool:
        """Whether rows still come in beside training."""
        return self._filling.is_staging

    def held(self) -> Placement:
        """Name the placement that the pool holds now."""
        log = self.cache.log
        return Placement(
            log.placement, log.epoch, len(log.entries), lambda: log.entries.sample_id[:]
        )

    def ensure(
        self, placement: Placement, *, groups: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Bring the pool to hold these samples: what lies here, and the rest from the source.

        Collective. Where the manifest names this placement, and no row is missing, nothing is
        done. Else rows stay wherever they lie; one epoch too far, as after a kill between two
        nodes' commits, is stepped back; rows that another node holds come from there; only what no
        node holds is read from the source, each row once.

        Args:
            placement: The samples that the slots are to hold.
            groups: Ranges [start, stop) of slots, together all of them, in the order in which they
                are staged. If they are given, `ensure` returns once the first is there, and threads
                go on with the others: call `await_rows` before use. `finish_staging`, which comes
                before the next commit, and `ensure` wait for all.
        """
        assert groups is None or self._quota is None, "what does not fit comes in no group"
        self.finish_staging()
        self.close_windows()
        self.cache.await_commit()
        self._placement, self._sample_ids = placement, None
        cache, commits = self.cache, self.cache.log
        held = HeldRows(
            cache.entries,
            cache.log.epoch,
            cache.log.placement,
            cache.log.num_missing,
            before=commits.before if commits.can_step_back else None,
            rows=commits.held,
            has_surplus=len(cache.log.surplus) > 0,
            is_filled=cache.room.is_filled,
        )
        plan = reconcile(
            held,
            placement,
            budget=self._quota.budget if self._quota is not None else None,
            rows_move=self._exchanges,
            may_exchange=self.moves,
        )
        self._filling.carry_out(plan, groups=groups)

    def agree_to_move(self) -> bool:
        """Decide whether every node has room for an exchange; once one has not, none exchanges.

        Collective with a quota; without one the answer is known.
        """
        return self._exchanges if self._quota is None else self._quota.agree_to_move()

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """int64[num_slots]: The sample of every slot, also where its row is not here (yet)."""
        return self.ids_in(slice(self.num_slots))

    def ids_in(self, slots: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """int64[len(slots)]: The samples of some slots, as `sample_ids` has them."""
        lacks_none = not self.is_staging and not self.cache.log.num_missing
        if lacks_none or self._placement is None:
            return self.cache.entries.sample_id[slots]
        if self._sample_ids is None:
            self._sample_ids = self._placement.sample_ids()
        return self._sample_ids[slots]

    @property
    def resident_fraction(self) -> float:
        """Rows that stay on this node, as a fraction of its pool."""
        return 1 - self.cache.log.num_missing / max(len(self.cache.entries), 1)

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
        halves = self._quota.halves if self._quota is not None else None
        if halves is None or not steps:
            yield from [steps] if steps else []
            return
        self.close_windows()
        streaming = self._streaming = Streaming(
            self.checked_source,
            self.fields,
            self.cache,
            halves=halves,
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
        self.note_sizes()

    def note_sizes(self) -> None:
        """Remember what the rows take that were read ahead so far, beside their scores."""
        sizes = self.streamed.sizes
        while sizes:
            slots, num_bytes = sizes.pop()
            self.scores["bytes"][slots] = np.minimum(num_bytes, MOST_BYTES)

    def row_bytes(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Find what each row takes as it is stored, and whether it is not in the cache.

        Only of a pool whose scores have the column ``bytes``.

        Returns:
            int64[num_slots]: Bytes; 0 of a row that was never here.
            bool[num_slots]: Whether the row does not stay, so that its epoch reads the source.
        """
        entries = self.cache.entries
        is_missing = ~entries.present[: self.num_slots]
        here = entries.extent_bytes[: self.num_slots] + self.cache.schema.fixed_bytes
        return np.where(is_missing, self.scores["bytes"].astype(np.int64), here), is_missing

    def await_rows(self, slots: NDArray[np.int64]) -> None:
        """Wait until these rows are staged on this node. Blocks; any thread may call it.

        Raises:
            StallError: If they are not within the world's time limit.
            DataioError: What stopped this rank's staging.
        """
        self._filling.await_rows(slots)

    def finish_staging(self) -> None:
        """Wait for what is still being staged, and commit it. Collective; at once if nothing is.

        Arrivals of the running epoch stay.
        """
        self._filling.finish()

    def take_scores(self, earlier: Scores) -> None:
        """Take over the scores of rows that lie in the same slots as before. Leader only."""
        self.scores[: len(earlier)] = earlier

    def make_room(self) -> None:
        """Claim the disk space that arrivals need, as an exchange begins.

        Raises:
            CacheError: If the disk is full.
        """
        self.cache.disk.claim_arrivals()
        self.cache.find_fetcher()

    def repair(self, slots: NDArray[np.int64]) -> None:
        """Read rows from the source again and write them anew where they lie.

        Raises:
            CorruptRowError: If the source has no such sample, or other bytes of it than the
                manifest's checksum says.
        """
        repair_rows(self.cache, slots, source=self.checked_source, fields=self.fields)

    def fetch(self, sample_ids: NDArray[np.int64]) -> Iterator[Rows]:
        """Read samples from the source, to go in the place of rows that were damaged elsewhere.

        Args:
            sample_ids: int64[n], sorted, distinct; ids that no sample has are ignored.
        """
        known = (sample_ids >= 0) & (sample_ids < self.source.num_samples)
        return self.checked_source.read(sample_ids[known], self.fields)

    def close(self) -> None:
        """Release the cache; the files stay for the next job."""
        self.close_windows()
        self._filling.close()
        self.cache.close()
