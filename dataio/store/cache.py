"""A node's rows in files: written, committed epoch by epoch, recovered after any kill.

All local ranks map the same files. Each writes only positions and heap extents that no manifest in
use mentions; local rank 0, the *leader*, alone replaces `manifest.json`, which is the only truth.
See docs/cache_format.md.
"""

import logging
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import DamagedFileError
from dataio.base.filesystem import named, readable
from dataio.rows.rows import Rows
from dataio.store.background import Background
from dataio.store.commit_log import CommitLog
from dataio.store.files.fetch import Fetcher
from dataio.store.files.manifest import Entries
from dataio.store.files.reader import RowReader, exceeds_memory, locate
from dataio.store.files.row_files import RowFiles
from dataio.store.hold import Hold
from dataio.store.manifest_files import Identity
from dataio.store.quota import Budget
from dataio.store.room import DiskSpace, Room
from dataio.store.writer import Arrivals, RowWriter, StagedRows

log = logging.getLogger(__name__)


class Cache:
    """Rows of one node by slot; a `RowStore`.

    Args:
        directory: The node's own directory of this dataset.
        identity: What it must hold.
        num_slots: Rows of the node's pool.
        num_positions: Rows the fixed fields have room for once rows move: the pool and its
            arrivals.
        local_rank: This rank's number on the node; 0 leads.
        local_size: Ranks on the node.
        budget: What its files may take; None: what the disk has.
        num_arriving: Rows that come to this rank in an epoch, where it is known: with the last of
            them the epoch is sealed beside training. -1: it is not.

    Attributes:
        hold: Who may use the directory.
        log: Which rows lie where.
        files: Their bytes.
        room: What the budget leaves room for.
        disk: Space that is claimed before it is needed.
        background: What is brought to the disk beside training.
        writer: Writes rows into free space.
        staged: Rows that were missing and came from the source.
        arrivals: Rows of the next epoch.
    """

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        *,
        num_slots: int,
        num_positions: int,
        local_rank: int,
        local_size: int,
        budget: Budget | None = None,
        num_arriving: int = -1,
        num_tiles: int = 1,
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.schema = schema = identity.schema
        self.num_slots = num_slots
        self.local_rank, self.local_size = local_rank, local_size
        self._fetcher: Fetcher | None = None
        self.num_tiles = num_tiles
        # A staging thread writes and adopts while others read, write arrivals and adopt.
        self._guard = guard = threading.RLock()
        heap_bytes = budget.heap_bytes if budget is not None else None
        self.files = files = RowFiles(
            directory, schema, local_rank=local_rank, heap_bytes=heap_bytes
        )
        self.hold = Hold(directory, identity)
        self.log = CommitLog(
            directory, files, num_slots=num_slots, num_variable=len(schema.variable),
            local_rank=local_rank, local_size=local_size, guard=guard,
        )  # fmt: skip
        self.room = Room(
            budget, files, self.log, schema,
            num_positions=num_positions, local_size=local_size, guard=guard,
        )  # fmt: skip
        self.disk = DiskSpace(
            directory, files, self.log.space, self.room,
            num_positions=num_positions, local_rank=local_rank, guard=guard,
        )  # fmt: skip
        self.background = Background(files)
        self.writer = RowWriter(directory, files, self.log, local_rank=local_rank, guard=guard)
        self.staged = StagedRows(files, self.log, self.writer, self.room)
        self.arrivals = Arrivals(
            self.log, self.writer, self.background, local_rank=local_rank, local_size=local_size,
            num_arriving=num_arriving, guard=guard,
        )  # fmt: skip

    def load(
        self,
        *,
        writable: bool | None = None,
        num_slots: int | None = None,
        surplus: Entries | None = None,
    ) -> None:
        """Read the committed manifest and map the files. Nothing in it grows with the rows.

        Args:
            writable: Whether to map them to write; None: unless other jobs read them too.
            num_slots: Rows of the pool from now on; None: as before.
            surplus: Rows to be kept beside the pool, which the manifest may not name; None: those
                that it names.

        Raises:
            CacheError: If they are not what the cache wrote.
        """
        self.await_commit()
        self.arrivals.forget()
        self.staged.forget()
        self.log.space.forget()
        if num_slots is not None:
            self.num_slots = num_slots
        with self.named("open the cache"), readable(self.directory, "the manifest"):
            self.log.read()
            self.files.map(writable=not self.hold.shared if writable is None else writable)
            num_positions = self.files.num_positions
            if self.entries.position.max() >= num_positions:
                raise DamagedFileError(
                    f"{self.directory}: the fixed fields end at position {num_positions}, rows "
                    "were expected behind it; a file was cut"
                )
        if surplus is not None:
            self.log.surplus = surplus

    def refresh(self) -> None:
        """Read the base that replaced the one in use, if one did; arrivals of the epoch stay."""
        self.await_commit()
        with self.named("read the manifest"), readable(self.directory, "the manifest"):
            self.log.read_again()

    @property
    def entries(self) -> Entries:
        """The manifest."""
        return self.log.entries

    def share(self) -> None:
        """Let other jobs read it from now on. Every local rank, when nothing will be written."""
        if self.local_rank == 0:
            self.hold.share()
        else:
            self.hold.follow(shared=True)

    def begin_writing(self) -> None:
        """Hold it alone again. Every local rank.

        Raises:
            CacheBusyError: On the leader, if other jobs read it.
        """
        if self.local_rank == 0:
            self.hold.upgrade()
        else:
            self.hold.follow(shared=False)

    def lengths(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[len(slots), num_variable]: Bytes of the variable fields."""
        return self.entries.lengths[slots]

    def read_rows(self, slots: NDArray[np.int64]) -> Rows:
        """Copy rows out, in the order of ``slots``."""
        return self.files.read(self.entries, slots)

    def read_into(self, slots: NDArray[np.int64], into: Rows) -> None:
        """Copy rows, in the order of ``slots``, to where there is room for rows of their lengths.

        Any thread may call it while no epoch ends.
        """
        if self._fetcher is None:
            self.files.read_into(self.entries, slots, into)
            return
        into.sample_id[:] = self.entries.sample_id[slots]
        into.checksum[:] = self.entries.checksum[slots]
        reader, located = self._fetcher.fetch(locate(self.entries, slots)).result()
        reader.read_into(located, into)

    def find_fetcher(self) -> Fetcher | None:
        """Decide whether rows are fetched from here on, for batches and for other nodes.

        They are where memory cannot hold the pool. One thread, as an epoch or its exchange begins.
        """
        if self._fetcher is None:
            reader = RowReader(self.schema, self.files.fixed, self.directory)
            if exceeds_memory(reader, num_tiles=self.num_tiles):
                self._fetcher = Fetcher(reader)
                self.files.expect_no_neighbours()
        return self._fetcher

    def rewrite_rows(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write rows again where they lie; see `RowWriter.repair`."""
        self.writer.repair(slots, rows, arrived=self.arrivals.written)

    def seal_staged(self) -> None:
        """Make the staged rows durable, and known to whoever opens the cache after a kill.

        Blocks on the disk. The manifest in force stays; `adopt_staged` and `load` add these rows.
        """
        with self.named("make staged rows durable"):
            self.staged.seal()

    def flush_staged(self, *, all_fit: bool) -> None:
        """Seal the rows that were held back, or drop them. Every local rank, before the commit."""
        with self.named("make staged rows durable"):
            self.staged.flush(all_fit=all_fit)

    def give(self, sample_ids: NDArray[np.int64]) -> None:
        """Write down that surplus rows are durable elsewhere, or wanted nowhere."""
        with self.named("free rows that were pulled"):
            self.log.give(sample_ids)

    def free_room(self) -> NDArray[np.int64]:
        """int64[n]: Positions for more rows beside those held, the same on all local ranks."""
        self.log.space.forget_positions()
        return self.log.space.positions

    def write_arrivals(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write rows that live in ``slots`` from the next epoch on; live rows stay as they are."""
        if len(slots):
            self.disk.claim_arrivals()
            self.arrivals.write(slots, rows)

    def keep_rows(self, slots: NDArray[np.int64], *, held_in: NDArray[np.int64]) -> None:
        """Let the rows of ``held_in`` live in ``slots`` from the next epoch on; no byte moves."""
        self.arrivals.keep(slots, held_in=held_in)

    def forget_arrivals(self) -> None:
        """Drop what arrived since the last commit: the epoch is not going to take effect."""
        self.await_commit()
        with self.named("forget arrivals"):
            self.arrivals.drop()

    def seal(self, epoch: int) -> None:
        """Make this rank's arrivals durable, and the delta that names them.

        Blocks on the disk, unless all of ``num_arriving`` came a while ago. Nothing is committed:
        the next `commit` of the leader counts only after every rank of every node has sealed. It is
        called when the commit before is durable, which lets rows of the epoch before that be
        written over.
        """
        assert not self.background.is_committing, "the commit before must be durable first"
        with self.named("make arrivals durable"):
            self.arrivals.seal(epoch)

    def adopt_sealed(self, epoch: int) -> NDArray[np.int64]:
        """See the sealed rows from now on. Every rank, when all ranks have sealed.

        Returns:
            int64[n]: Slots that hold other rows than before.
        """
        changed = self.log.adopt_sealed(epoch)
        self.arrivals.forget()
        self.disk.map_growth()
        return changed

    def commit(self) -> None:
        """Make the epoch that `adopt_sealed` began the truth, beside training.

        `await_commit` waits for it. Leader only, when all ranks have sealed. Until it is durable a
        kill leaves this node one epoch behind.
        """
        self.background.commit(self.log.commit)

    def await_commit(self) -> None:
        """Wait until what was last committed is durable: at once, but for the leader.

        Raises:
            CacheError: If it could not be written; once.
        """
        with self.named("commit"):
            self.background.await_commit()

    def fill_commit(self) -> None:
        """Make sealed rows part of the base, and let go of the surplus.

        After staging or a pull. Leader only, when all have sealed.
        """
        self.await_commit()
        self.log.fill(quota_bytes=self.room.quota_bytes)

    def rewrite(
        self, entries: Entries, *, epoch: int, placement: str, surplus: Entries | None = None
    ) -> None:
        """Replace the manifest by a new base; see `CommitLog.rewrite`. Leader only."""
        self.await_commit()
        self.log.rewrite(
            entries, epoch=epoch, placement=placement, surplus=surplus,
            quota_bytes=self.room.quota_bytes,
        )  # fmt: skip

    def mark_filled(self) -> None:
        """Remember that no more rows are to be staged under this quota. Leader only."""
        with self.named("write the manifest"):
            self.log.mark_filled(quota_bytes=self.room.quota_bytes)

    def close(self) -> None:
        """Release the lock and the mappings, when the last commit is durable; idempotent."""
        try:
            self.await_commit()
        finally:
            self.background.close()
            if self._fetcher is not None:
                self._fetcher.close()
                self._fetcher = None
            self.files.close()
            self.hold.release()

    def named(self, doing: str) -> AbstractContextManager[None]:
        """Turn an error of the disk within into a `CacheError` with directory and cure."""
        return named(self.directory, doing)
