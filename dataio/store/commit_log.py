"""Which rows lie where, as `manifest.json`, its base and its deltas say, and how that changes.

`manifest.json` is the only truth; local rank 0 alone replaces it. See docs/cache_format.md.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.base.atomic import read_table
from dataio.base.errors import DamagedFileError
from dataio.base.filesystem import named
from dataio.rows.rows import corrupt_rows
from dataio.store.files.extents import Space
from dataio.store.files.manifest import (
    Entries,
    empty_entries,
    from_arrays,
    from_table,
    join_entries,
)
from dataio.store.files.row_files import RowFiles
from dataio.store.files.store import map_table
from dataio.store.manifest_files import ManifestFiles
from dataio.store.state import (
    Head,
    base_name,
    delta_name,
    given_prefix,
    judge,
    next_deltas,
    next_serial,
    staged_prefix,
    surplus_name,
)

DELTAS_PER_BASE = 16
MOVED_PER_BASE = 0.25
"""Fraction of the rows that deltas may name: what opening reads stays small beside the base."""
CHECKED_ROWS = 64


class CommitLog:
    """The entries in force, and the files that say so.

    Args:
        directory: The cache.
        files: Its rows.
        num_slots: Rows of the node's pool.
        num_variable: Variable fields.
        local_rank: This rank's number on the node; 0 leads.
        local_size: Ranks on the node.
        guard: Held while entries or counts change: threads do that beside one another.

    Attributes:
        head: What `manifest.json` says, as this process read or wrote it last.
        generation: Counts how often all entries were read anew.
        epoch: The epoch whose rows the entries name.
        placement: Name of what they follow.
        num_missing: Slots whose rows are not there.
        entries: Of every slot.
        undo: The entries that the last delta replaced, to step back; None where there was none.
        surplus: Rows that lie here and belong to no slot, until other nodes have pulled them.
        space: What no entries in force mention.
        tables: The files that say so.
    """

    def __init__(
        self,
        directory: Path,
        files: RowFiles,
        *,
        num_slots: int,
        num_variable: int,
        local_rank: int,
        local_size: int,
        guard: threading.RLock,
    ) -> None:
        self._directory = directory
        self.tables = ManifestFiles(directory, guard)
        self._files = files
        self._num_variable = num_variable
        self._local_rank = local_rank
        self._local_size = local_size
        self._guard = guard
        self.head: Head | None = None
        self.generation = 0
        self.epoch = 0
        self.placement = ""
        self.num_missing = num_slots
        self.entries = empty_entries(num_slots, num_variable)
        self.undo: Entries | None = None
        self.surplus = empty_entries(0, num_variable)
        self.space = Space(files, local_rank=local_rank, in_use=self.in_use)
        # Serial of the base that this process has compared with its checksum, or written.
        self._sound_base = -1
        self._adopted: set[str] = set()
        self._given: set[str] = set()

    def in_use(self) -> list[Entries]:
        """Every manifest that this process may have to read by."""
        used = [self.entries] if self.undo is None else [self.entries, self.undo]
        return [*used, self.surplus] if len(self.surplus) else used

    def read(self) -> None:
        """Read base, deltas, staged rows and surplus, as the manifest on disk names them."""
        self.undo = None
        head = self.head = self.tables.read_head()
        if head is None:
            raise DamagedFileError(f"{self.tables.path}: is not there")
        self.epoch, self.placement, self.num_missing = head.epoch, head.placement, head.missing
        self._adopted = set()
        verify = self._local_rank == 0 and self._sound_base != head.serial
        self.entries = from_arrays(*map_table(self._directory / head.base, verify=verify))
        self.generation += 1
        self._sound_base = head.serial
        if len(self.entries) != head.rows:
            raise DamagedFileError(f"{head.base} has {len(self.entries)} rows, not {head.rows}")
        for names in head.deltas:
            self._apply(names)
        self.adopt_staged()
        self.surplus = empty_entries(0, self._num_variable)
        self._given = set()
        if head.surplus is not None:
            self.surplus = from_table(read_table(self._directory / head.surplus))
            self.adopt_given()

    def read_again(self) -> None:
        """Read the base that replaced the one in use, if one did."""
        head = self.tables.read_head()
        if head is None or self.head is None or head.serial == self.head.serial:
            return
        self.space.release(self._left_behind())
        self.space.release(self.surplus)
        self.read()

    @property
    def can_step_back(self) -> bool:
        """Whether the rows of the epoch before still lie there."""
        return self.undo is not None

    def before(self) -> Entries:
        """Copy the entries of the epoch before, which must be there by `can_step_back`."""
        assert self.undo is not None
        entries = self.entries.copy()
        entries.put(self.undo)
        entries.forget(self._overwritten(self.undo).slot[:])
        return entries

    def held(self) -> Entries:
        """Every row that lies here: of the slots, of the epoch before, then the surplus."""
        parts = [self.entries.take(self.entries.present)]
        if self.undo is not None:
            gone = np.isin(self.undo.slot[:], self._overwritten(self.undo).slot[:])
            parts.append(self.undo.take(self.undo.present & ~gone))
        return self.joined([*parts, self.surplus])

    def _overwritten(self, undo: Entries) -> Entries:
        """The entries of the epoch before whose bytes are another row's by now.

        The next epoch's arrivals may take their place before the manifest that lets go of them has
        replaced the one in force. Its deltas are there then: without them nothing is read.
        """
        assert self.head is not None
        # As many as their writers were, who may have been others than now.
        names = next_deltas(self.head) or self.deltas(self.epoch + 1)
        if not all((self._directory / name).exists() for name in names):
            return undo.take(slice(0))
        gone = np.zeros(len(undo), np.bool_)
        present = np.flatnonzero(undo.present)
        for first in range(0, len(present), CHECKED_ROWS):
            rows = present[first : first + CHECKED_ROWS]
            gone[rows[corrupt_rows(self._files.read(undo, rows))]] = True
        return undo.take(gone)

    def adopt_staged(self) -> bool:
        """See the rows that any local rank sealed while staging. Thread-safe.

        Returns:
            Whether there were any.
        """
        with self._guard:
            staged = judge(self.tables.names(), self.head).staged
            new = [name for name in staged if name not in self._adopted]
            for name in new:
                delta = from_table(read_table(self._directory / name))
                self.entries.put(delta)
                self.num_missing -= len(delta)
                self._adopted.add(name)
            return bool(new)

    def give(self, sample_ids: NDArray[np.int64]) -> None:
        """Write down that surplus rows are durable elsewhere, or wanted nowhere.

        What `adopt_given` then frees may be overwritten, so it must be known after a kill.
        """
        gone = self.surplus.take(np.isin(self.surplus.sample_id[:], sample_ids))
        # After a kill the files of the pull before are still there.
        assert self.head is not None
        prefix = given_prefix(self.head.serial, self._local_rank)
        lap = len(list(self._directory.glob(f"{prefix}*.arrow")))
        self.tables.write_table(f"{prefix}{lap}.arrow", gone)

    def adopt_given(self) -> None:
        """Free the surplus rows that any local rank gave."""
        for name in judge(self.tables.names(), self.head).given:
            if name in self._given:
                continue
            gone = from_table(read_table(self._directory / name))
            left = ~np.isin(self.surplus.sample_id[:], gone.sample_id[:])
            self.space.release(self.surplus.take(~left))
            self.surplus = self.surplus.take(left)
            self._given.add(name)

    def forget_surplus(self) -> None:
        """Free all surplus rows. Every local rank, when no manifest in force names them."""
        self.space.release(self.surplus)
        self.surplus = empty_entries(0, self._num_variable)
        self.space.forget_positions()

    def staged_prefix(self) -> str:
        """Begin the names of files of rows that this local rank staged."""
        assert self.head is not None
        return staged_prefix(self.head.serial, self._local_rank)

    def count_sealed(self) -> int:
        """Count those files."""
        return len(list(self._directory.glob(f"{self.staged_prefix()}*.arrow")))

    def deltas(self, epoch: int) -> tuple[str, ...]:
        """Name what all local ranks seal for an epoch."""
        return tuple(delta_name(epoch, share) for share in range(self._local_size))

    def seal(self, epoch: int, changed: Entries) -> None:
        """Write this local rank's delta; its name becomes durable with the manifest that names it.

        Args:
            epoch: From which on the entries hold.
            changed: Of rows that came, or have other slots then.
        """
        self.tables.write_table(delta_name(epoch, self._local_rank), changed, sync_name=False)

    def adopt_sealed(self, epoch: int) -> NDArray[np.int64]:
        """See the sealed rows from now on. Every rank, when all ranks have sealed.

        Work for the rows that moved only; the first time, also for those columns of all rows that
        were kept as two numbers until then.

        Returns:
            int64[n]: Slots that hold other rows than before.
        """
        before = self._left_behind()
        delta = self._apply(self.deltas(epoch))
        self.space.release(before)
        self.space.take_positions(delta.position[:])
        self.epoch = epoch
        return delta.slot[:]

    def commit(self) -> None:
        """Make the epoch that `adopt_sealed` began the truth.

        Leader only, when all ranks have sealed.
        """
        assert self.undo is not None
        assert self.head is not None
        head, moved = self.head, len(self.undo)
        grown = head.moved + moved > MOVED_PER_BASE * len(self.entries)
        if head.deltas and (grown or len(head.deltas) >= DELTAS_PER_BASE):
            # The new base is the epoch before: it stays possible to step back one.
            head = replace(head, serial=head.serial + 1, deltas=(), moved=0)
            before = self.entries.copy()
            before.put(self.undo)
            self.tables.write_table(head.base, before)
            self._sound_base = head.serial
        self.write_head(
            head.with_delta(
                self.deltas(self.epoch), epoch=self.epoch, placement=self.placement, moved=moved
            )
        )

    def fill(self, *, quota_bytes: int | None) -> None:
        """Make sealed rows part of the base, and let go of the surplus; see `rewrite`."""
        self.adopt_staged()
        if self._adopted or len(self.surplus) or self._given:
            self.rewrite(
                self.entries, epoch=self.epoch, placement=self.placement, quota_bytes=quota_bytes,
                beside_exchange=True,
            )  # fmt: skip

    def mark_filled(self, *, quota_bytes: int | None) -> None:
        """Remember that no more rows are to be staged under this quota."""
        assert self.head is not None
        filled = replace(self.head, is_filled=True, quota_bytes=quota_bytes)
        if filled != self.head:
            self.write_head(filled)

    def adopt_for_good(self, head: Head) -> None:
        """Make what `read` adopted beside this head part of a new base."""
        if self._adopted or self._given:
            self.rewrite(
                self.entries, epoch=head.epoch, placement=head.placement, surplus=self.surplus,
                quota_bytes=head.quota_bytes,
            )  # fmt: skip

    def rewrite(
        self,
        entries: Entries,
        *,
        epoch: int,
        placement: str,
        surplus: Entries | None = None,
        quota_bytes: int | None = None,
        beside_exchange: bool = False,
    ) -> None:
        """Replace the manifest by a new base. Leader only; nobody else writes the manifest.

        Args:
            entries: Of every slot.
            epoch: Whose rows they are.
            placement: Name of what they follow.
            surplus: Other rows that are to be kept until they were pulled.
            quota_bytes: Under which its files were begun, if under any.
            beside_exchange: Whether rows of the next epoch may be sealed by now.
        """
        has_surplus = surplus is not None and len(surplus) > 0
        serial = next_serial(self.tables.names())
        with named(self._directory, "write the manifest"):
            self.tables.write_table(base_name(serial), entries)
            if surplus is not None and has_surplus:
                self.tables.write_table(surplus_name(serial), surplus)
            self.write_head(
                Head(
                    serial,
                    epoch,
                    placement,
                    len(entries),
                    entries.count_missing(),
                    has_surplus=has_surplus,
                    quota_bytes=quota_bytes,
                ),
                beside_exchange=beside_exchange,
            )
        self._sound_base = serial

    def write_head(self, head: Head, *, beside_exchange: bool = True) -> None:
        """Make a manifest the truth, and remove what it leaves without meaning.

        Args:
            head: The manifest.
            beside_exchange: Whether another local rank may be writing what it seals next, or have
                done so.
        """
        self.tables.write_head(head)
        self.head = head
        sealed = f"delta-{head.epoch + 1}-"
        litter = [
            name for name in judge(self.tables.names(), head).litter if name.endswith(".arrow")
        ]
        self.tables.unlink(
            [name for name in litter if not (beside_exchange and name.startswith(sealed))]
        )

    def joined(self, parts: Sequence[Entries]) -> Entries:
        """Join entries, of which there may be none."""
        return join_entries(parts, self._num_variable)

    def _apply(self, names: Sequence[str]) -> Entries:
        """Take in an epoch's deltas; what they replace is kept, to step back."""
        parts = [from_table(read_table(self._directory / name)) for name in names]
        delta = self.joined(parts)
        self.undo = self.entries.take(delta.slot[:])
        self.entries.put(delta)
        return delta

    def _left_behind(self) -> Entries | None:
        """The rows of the epoch before that left the node; those that changed slot still lie there.

        Sorts the rows that moved.
        """
        if self.undo is None:
            return None
        now = self.entries.take(self.undo.slot[:])
        return self.undo.take(~np.isin(self.undo.position[:], now.position[:]))
