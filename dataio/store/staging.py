"""Read the missing rows of a node from the source, each rank its part, and go on after a kill.

Reader threads take pieces, a shard or less, and hand over blocks; one thread, the *writer*, puts
them into the cache and seals them from time to time: what is sealed is not read again. Only the
writer's thread changes the counts; they may be read from any. Nothing here sends to other ranks.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import SourceError, StallError
from dataio.plan.layout import cut_at_shards, divide_along_shards
from dataio.rows.fields import Field
from dataio.rows.rows import Rows
from dataio.source.base import Source
from dataio.source.storage.throttle import Throttle
from dataio.store.cache import Cache

SEAL_BYTES = 512 << 20
SEAL_S = 20.0
BLOCKS_PER_READER = 2
LOOK_S = 0.05
"""Between two looks for rows that another rank stages."""
"""Blocks read ahead of the writer: bounds memory at about 8 MiB each."""


@dataclass(frozen=True)
class StagingPiece:
    """Rows that one reader reads in one go.

    Attributes:
        group: Number of the group it belongs to.
        slots: int64[n]: Where they belong.
        sample_ids: int64[n]: Sorted.
        positions: int64[n]: Where their fixed fields are to lie.
    """

    group: int
    slots: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    positions: NDArray[np.int64]

    def part(self, start: int, stop: int) -> "StagingPiece":
        """Take rows [start, stop) of it."""
        rows = slice(start, stop)
        return StagingPiece(
            self.group, self.slots[rows], self.sample_ids[rows], self.positions[rows]
        )


def plan_pieces(
    missing: StagingPiece,
    *,
    shard_starts: NDArray[np.int64],
    local_rank: int,
    local_size: int,
    num_readers: int,
    least_rows: int = 1,
) -> list[StagingPiece]:
    """Choose what one rank reads of the rows that its node misses, piece by piece.

    Args:
        missing: The node's rows, by slot.
        shard_starts: int64[num_shards]: First sample of each shard.
        local_rank: This rank.
        local_size: Ranks on the node: together they read every row once.
        num_readers: Threads of each.
        least_rows: Fewer are not divided: then each rank takes whole groups, as a part of few rows
            costs little less to read than all of them.
    """
    num_parts = max(min(local_size, len(missing.slots) // least_rows), 1)
    part = (local_rank - missing.group) % local_size if num_parts < local_size else local_rank
    if part >= num_parts:
        return []
    order = np.argsort(missing.sample_ids, kind="stable")
    ids = missing.sample_ids[order]
    shares = divide_along_shards(ids, shard_starts=shard_starts, num_parts=num_parts).tolist()
    mine = order[shares[part] : shares[part + 1]]
    share = StagingPiece(
        missing.group, missing.slots[mine], missing.sample_ids[mine], missing.positions[mine]
    )
    num_readers = max(min(num_readers, len(mine) // least_rows), 1)
    bounds = cut_at_shards(share.sample_ids, shard_starts=shard_starts, num_readers=num_readers)
    return [share.part(start, stop) for start, stop in itertools.pairwise(bounds.tolist())]


class StagingRun:
    """One rank's part of the missing rows, on its way from the source into the cache.

    Args:
        source: Where rows come from; any thread may read it.
        fields: What is kept of a sample.
        cache: Where they go.
        pieces: What to read, group after group.
        num_groups: Groups there are.
        num_readers: Threads that read; >= 1.
        limit: Slows down and counts what all ranks of the node read together.
        stagers: Finds the ranks that read the rows of some slots.

    Attributes:
        num_rows: Rows written so far.
        num_bytes: Their bytes.
        groups_done: Groups, from the first, of which every row is sealed.
        overflowed: Whether the cache's budget had no room for the last rows.
    """

    def __init__(
        self,
        source: Source,
        fields: Mapping[str, Field],
        cache: Cache,
        pieces: Sequence[StagingPiece],
        *,
        num_groups: int = 1,
        num_readers: int = 2,
        limit: Throttle | None = None,
        stagers: Callable[[NDArray[np.int64]], list[int]] = lambda slots: [],
    ) -> None:
        self._source, self._stagers = source, stagers
        self._fields = fields
        self._cache = cache
        self._left = [0] * num_groups
        for piece in pieces:
            self._left[piece.group] += len(piece.slots)
        self.total_rows = sum(self._left)
        self.num_rows = self.num_bytes = self.groups_done = 0
        self.overflowed = False
        self._pieces = iter(pieces)
        self._num_readers = min(num_readers, len(pieces))
        self._limit = limit
        self._limited = 0
        self._taking = threading.Lock()
        self._blocks: queue.Queue[tuple[StagingPiece, Rows] | BaseException] = queue.Queue(
            max(BLOCKS_PER_READER * num_readers, 1)
        )
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._unsealed_bytes = 0
        self._sealed_at = time.monotonic()
        self._error: BaseException | None = None
        self._progressed = threading.Condition()
        self._count_groups()

    @property
    def num_groups(self) -> int:
        """Groups there are."""
        return len(self._left)

    @property
    def done(self) -> bool:
        """Whether every row of this rank's part is sealed."""
        return self.groups_done == len(self._left)

    def start(self) -> None:
        """Begin to read."""
        self._limited = self._source.bytes_read
        for number in range(self._num_readers):
            self._begin(self._read, f"tonari-read-{number}")

    def _begin(self, work: Callable[[], None], name: str) -> None:
        # Daemons: a source that hangs must not keep the process from ending.
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _read(self) -> None:
        try:
            while not self._stopped.is_set():
                with self._taking:
                    piece = next(self._pieces, None)
                if piece is None:
                    return
                self._read_piece(piece)
        except BaseException as error:
            self._hand_over(error)

    def _read_piece(self, piece: StagingPiece) -> None:
        done = 0
        for rows in self._source.read(piece.sample_ids, self._fields):
            if self._limit is not None:
                self._slow_down(self._limit)
            if not self._hand_over((piece.part(done, done + len(rows)), rows)):
                return
            done += len(rows)
        if done != len(piece.slots):
            raise SourceError(
                f"{self._source.name}: {done} of {len(piece.slots)} rows could be read; the source "
                f"is not what its index says: remove the index or write it again"
            )

    def _slow_down(self, limit: Throttle) -> None:
        with self._taking:
            now = self._source.bytes_read
            taken, self._limited = now - self._limited, now
        limit.take(taken)

    def _hand_over(self, block: tuple[StagingPiece, Rows] | BaseException) -> bool:
        while not self._stopped.is_set():
            try:
                self._blocks.put(block, timeout=0.2)
                return True
            except queue.Full:
                continue  # the writer is busy: ask again whether it is still wanted
        return False

    def write(self, *, num_groups: int, limit_s: float) -> None:
        """Write what the readers bring, until so many groups are sealed. Blocks for ``limit_s``.

        Raises:
            DataioError: What a reader met.
        """
        deadline = time.monotonic() + limit_s
        while self.groups_done < num_groups:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            try:
                block = self._blocks.get(timeout=left_s)
            except queue.Empty:
                return
            if isinstance(block, BaseException):
                raise block
            self._write(*block)

    def _write(self, piece: StagingPiece, rows: Rows) -> None:
        fitting = self._cache.staged.write(piece.slots, piece.positions, rows)
        if fitting < len(rows):
            self._end_early()
            return
        num_bytes = sum(column.nbytes for column in (*rows.fixed, *rows.variable))
        self._left[piece.group] -= len(rows)
        self.num_rows += len(rows)
        self.num_bytes += num_bytes
        self._unsealed_bytes += num_bytes
        due = self._unsealed_bytes > SEAL_BYTES or time.monotonic() - self._sealed_at > SEAL_S
        if not self._left[piece.group] or (due and self._cache.room.may_seal):
            self._cache.seal_staged()
            self._unsealed_bytes, self._sealed_at = 0, time.monotonic()
            self._count_groups()

    def _end_early(self) -> None:
        self.overflowed = True
        self._stopped.set()
        self._cache.seal_staged()
        self._left = [0] * len(self._left)
        self._count_groups()

    def _count_groups(self) -> None:
        while self.groups_done < len(self._left) and not self._left[self.groups_done]:
            self.groups_done += 1
        with self._progressed:
            self._progressed.notify_all()

    def go_on_alone(self) -> None:
        """Write the rest in a thread of its own."""
        self._begin(self._write_all, "tonari-stage")

    def _write_all(self) -> None:
        try:
            while not self.done and not self._stopped.is_set():
                self.write(num_groups=len(self._left), limit_s=0.2)
        except BaseException as error:
            self._error = error
            with self._progressed:
                self._progressed.notify_all()

    def wait(self, limit_s: float) -> None:
        """Wait for the thread to seal more, this long at most.

        Raises:
            DataioError: What it met.
        """
        with self._progressed:
            if not self.done and self._error is None:
                self._progressed.wait(limit_s)
        if self._error is not None:
            raise self._error

    def await_rows(self, slots: NDArray[np.int64], *, timeout_s: float) -> None:
        """Wait until rows lie in the cache, whichever rank of the node stages them. Blocks.

        Raises:
            StallError: If they are not there after ``timeout_s``.
            DataioError: What this rank's staging met.
        """
        cache, waited_s = self._cache, 0.0
        while cache.log.num_missing and (cache.entries.sample_id[slots] < 0).any():
            if cache.log.adopt_staged():
                continue
            if waited_s >= timeout_s:
                lacking = slots[cache.entries.sample_id[slots] < 0]
                names = " and ".join(f"rank {rank}" for rank in self._stagers(lacking))
                raise StallError(
                    f"{cache.directory}: {len(lacking)} of {len(slots)} rows of a batch were not "
                    f"staged within {timeout_s:.0f} s, waited for {names}, which stages them: it "
                    "has ended, or look at its log for a slow or broken source, or stage before "
                    "training"
                )
            # Looks are counted, not seconds: a process that was stopped takes nobody for slow.
            with self._progressed:
                if self._error is None and not self._progressed.wait(LOOK_S):
                    waited_s += LOOK_S
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Stop all threads; what is sealed stays."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._threads = []
