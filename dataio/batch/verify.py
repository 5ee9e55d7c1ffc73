"""Rows are checked against their checksums as they are read, repaired once, or given up by name."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import About, CorruptRowError, DataioError
from dataio.options import Verify
from dataio.rows.samples import OnError
from dataio.store.cache import Cache
from dataio.store.files.reader import Located, RowReader, locate

log = logging.getLogger(__name__)

AGAIN = 256
"""Of so many batches one is checked in every epoch, though its rows were before: damage that comes
later is found so, for less than a hundredth of a batch's time."""

Repair = Callable[[NDArray[np.int64]], None]


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
        relocated: The batch's rows anew, in the cache's files, if a repair may have moved some.
        bad: Rows of the batch that stay corrupt.
    """

    relocated: Located | None = None
    bad: tuple[int, ...] = ()


class RowVerifier:
    """Remembers which rows of a pool this process has checked. One thread uses it.

    Args:
        cache: The rows.
        num_slots: Of the pool; copies of another node's rows behind them are in no batch.
        reader: Their files.
        verify: When to check a row.
        on_error: Whether a row that stays corrupt is an error.
        repair: Writes slots' rows anew; None if nothing can.
    """

    def __init__(
        self,
        cache: Cache,
        reader: RowReader,
        *,
        num_slots: int,
        verify: Verify,
        on_error: OnError,
        repair: Repair | None,
    ) -> None:
        self._cache, self._num_slots = cache, num_slots
        self._reader = reader
        self._verify = verify
        self._on_error = on_error
        self._repair = repair
        self._generation = -1
        self._checked = np.zeros(0, np.bool_)
        self._complete = False

    def unchecked(self, slots: NDArray[np.int64], *, first_step: int, epoch: int) -> list[bool]:
        """Find for each batch of int64[steps, batch] slots if it needs `check`.

        With ``"once"``, a batch in `AGAIN` of each epoch needs it again, others as epochs go by.
        """
        if self._verify != "once":
            return [self._verify == "always"] * len(slots)
        if self._cache.log.generation != self._generation:
            self._generation = self._cache.log.generation
            self._checked = np.zeros(self._num_slots, np.bool_)
            self._complete = False
        unchecked = np.zeros(len(slots), np.bool_)
        if not self._complete:
            unchecked = np.logical_not(self._checked[slots].all(axis=1))
            # Once every row was seen, later epochs do not even look.
            self._complete = not unchecked.any() and bool(self._checked.all())
        again = slice((epoch - first_step) % AGAIN, None, AGAIN)
        unchecked[again] = True
        self._checked[slots[again]] = False
        return unchecked.tolist()

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Check these slots again: other rows lie there now."""
        if len(slots) and self._generation >= 0:
            self._checked[slots[slots < self._num_slots]] = False
            self._complete = False

    def check(
        self, slots: NDArray[np.int64], located: Located, reader: RowReader | None = None
    ) -> Checked:
        """Check a batch's rows, repair those that are corrupt, and check these again.

        Args:
            slots: int64[batch].
            located: Where the rows lie.
            reader: Where they were fetched to; None: they lie in the cache's files.

        Raises:
            CorruptRowError: If a row stays corrupt and ``on_error`` is ``"raise"``.
        """
        once = self._verify == "once"
        rows = np.flatnonzero(~self._checked[slots]) if once else np.arange(len(slots))
        bad = self._corrupt(rows, slots, located, reader or self._reader)
        if once:
            if len(bad):  # what damaged these may have damaged others
                self._checked[:] = self._complete = False
            self._checked[slots[rows]] = True
            self._checked[slots[bad]] = False
        if not len(bad):
            return Checked()
        relocated = None
        if self._repair is not None:
            log.warning(
                "rows of slots %s do not match their checksums: reading them from the source again",
                slots[bad].tolist(),
            )
            self._try_repair(self._repair, np.unique(slots[bad]))
            relocated = locate(self._cache.entries, slots)
            bad = self._corrupt(bad, slots, relocated, self._reader)
        if len(bad) and self._on_error == "raise":
            raise self._error(int(slots[bad[0]]), int(located.sample_id[bad[0]]))
        return Checked(relocated, tuple(bad.tolist()))

    def _try_repair(self, repair: Repair, slots: NDArray[np.int64]) -> None:
        try:
            repair(slots)
        except CorruptRowError:
            if self._on_error == "raise":
                raise
        except DataioError as error:
            if self._on_error == "raise":
                raise CorruptRowError(
                    f"{self._cache.directory}: the rows of slots {slots.tolist()} do not match "
                    f"their checksums, and the source does not give them again: {error}; restore "
                    'the source, or go on without such rows with on_error="skip"'
                ) from error
            log.warning("rows of slots %s cannot be read again: %s", slots.tolist(), error)

    def _corrupt(
        self,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        located: Located,
        reader: RowReader,
    ) -> NDArray[np.int64]:
        found = reader.checksums(located.rows(rows))
        return rows[np.not_equal(found, self._cache.entries.checksum[slots[rows]])]

    def _error(self, slot: int, sample_id: int) -> CorruptRowError:
        expected = int(self._cache.entries.checksum[np.array([slot])][0])
        again = "also after it was read from the source again; " if self._repair is not None else ""
        return CorruptRowError(
            f"{self._cache.directory}: the row of slot {slot} (sample {sample_id}) does "
            f"not match its checksum, expected {expected:#018x}; {again}run `tonari cache verify`, "
            'look at the disk, or go on without such rows with on_error="skip"',
            about=About(sample_id),
        )
