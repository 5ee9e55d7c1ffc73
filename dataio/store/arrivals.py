"""Rows of the next epoch: written beside training, then made durable and named by a delta."""

import threading
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataio.rows.rows import Rows
from dataio.store.background import Background
from dataio.store.commit_log import CommitLog
from dataio.store.files.manifest import Entries
from dataio.store.writer import RowWriter


class Arrivals:
    """What this local rank's part of the pool will hold from the next epoch on.

    Args:
        log: The entries in force.
        writer: Writes the rows.
        background: Flushes and seals them.
        local_rank: This rank's number on the node.
        local_size: Ranks on the node.
        num_arriving: Rows that come to this rank in an epoch, where it is known: with the last of
            them the epoch is sealed beside training. -1: it is not.
        guard: Held while positions are chosen.
    """

    def __init__(
        self,
        log: CommitLog,
        writer: RowWriter,
        background: Background,
        *,
        local_rank: int,
        local_size: int,
        num_arriving: int,
        guard: threading.RLock,
    ) -> None:
        self._log = log
        self._writer = writer
        self._background = background
        self._local_rank = local_rank
        self._local_size = local_size
        self._num_arriving = num_arriving
        self._guard = guard
        self.written: list[Entries] = []
        # Rows that only change slot.
        self.kept: list[Entries] = []
        # Epoch and rows of the delta that was last asked for.
        self._sealed = (-1, 0)

    def write(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write rows that will live in these slots; live rows stay as they are.

        Called again and again within an epoch; takes this local rank's free positions in order.
        """
        with self._guard:
            free = self._log.space.positions
            first = self._local_rank * (len(free) // self._local_size)
            if self.written:
                # Behind the last: to count what came would take longer with every call.
                first = int(np.searchsorted(free, self.written[-1].position[-1:][0])) + 1
            positions = free[first : first + len(slots)]
        assert len(positions) == len(slots), "the pool was sized for fewer arrivals"
        self.written.append(self._writer.write(slots, positions, rows))
        self._background.sync()
        if self._num_arriving == sum(map(len, self.written)):
            self._seal_later(self._log.epoch + 1)

    def keep(self, slots: NDArray[np.int64], *, held_in: NDArray[np.int64]) -> None:
        """Let the rows of ``held_in`` live in ``slots``; no byte moves."""
        held = self._log.entries.take(held_in)
        held.slot.put(np.arange(len(slots)), slots)
        self.kept.append(held)

    def ids(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Name the slots that these rows will live in, and their samples."""
        arrived = self._log.joined(self.written)
        return arrived.slot[:], arrived.sample_id[:]

    def seal(self, epoch: int) -> None:
        """Make the rows durable, and the delta that names them. Blocks on the disk."""
        if self._sealed != (epoch, sum(map(len, [*self.written, *self.kept]))):
            self._seal_later(epoch)
        self._background.await_seals()

    def drop(self) -> None:
        """Let go of the rows, and of the delta if there is one. Blocks on the disk."""
        self._background.await_seals()
        if self._sealed[0] >= 0:
            self._log.tables.unlink([self._log.deltas(self._sealed[0])[self._local_rank]])
        written = self.written
        self.forget()
        self._writer.give_back(written)

    def forget(self) -> None:
        """Begin an epoch in which nothing has arrived."""
        self.written, self.kept, self._sealed = [], [], (-1, 0)

    def _seal_later(self, epoch: int) -> None:
        changed = self._log.joined([*self.written, *self.kept])
        self._sealed = epoch, len(changed)
        self._background.seal(partial(self._log.seal, epoch, changed))
