"""A node's rows in files: written, committed epoch by epoch, recovered after any kill.

All local ranks map the same files. Each writes only positions and heap extents that no manifest in
use mentions; local rank 0, the *leader*, alone replaces `manifest.json`, which is the only truth.
See docs/cache_format.md.
"""

import contextlib
import copy
import errno
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.atomic import read_table, write_json, write_table
from dataio.cache_lock import CacheLock, Mode, make_private, owners
from dataio.errors import CacheError, CacheStagingError, OtherDatasetError
from dataio.extents import FreeExtents, find_free_extents, find_free_positions, join_positions
from dataio.filesystem import room_for
from dataio.manifest import (
    Entries,
    empty_entries,
    from_arrays,
    from_table,
    join_entries,
    make_entries,
    to_table,
)
from dataio.placement import Placement
from dataio.quota import Budget
from dataio.readahead import Readahead
from dataio.reader import locate
from dataio.row_files import RowFiles
from dataio.rows import Rows, RowSchema, corrupt_rows
from dataio.store import FixedFile, map_table

log = logging.getLogger(__name__)

FORMAT_VERSION = 2
DELTAS_PER_BASE = 16
CHECKED_ROWS = 64
MOVED_PER_BASE = 0.25
"""Fraction of the rows that deltas may name: what opening reads stays small beside the base."""


@dataclass(frozen=True)
class Identity:
    """What a cache holds: refused when it is anything else.

    Attributes:
        source: The pattern as it was given, for messages.
        fingerprint: Of the source's content.
        schema: Stored form of the fields.
    """

    source: str
    fingerprint: str
    schema: RowSchema

    def to_json(self) -> dict[str, object]:
        """What `meta.json` keeps."""
        stored = json.loads(json.dumps(asdict(self)))
        return {"format": FORMAT_VERSION, **stored}


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
        is_filled: Whether as many rows are there as the budget lets stay.
        epoch: The epoch whose rows the manifest names.
        placement: Name of the placement that they follow.
        num_missing: Slots whose rows are not there.
        entries: The manifest.
        surplus: Rows that lie here and belong to no slot, until other nodes have pulled them.
        bytes_written: Bytes that this process wrote to the node's disk, manifests included.
        readahead: Asks the disk for what `read_into` reads, where memory cannot hold the pool.
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
    ) -> None:
        self.budget = budget
        self.num_arriving = num_arriving
        self.is_filled = False
        self.directory = directory
        self.identity = identity
        self.schema = identity.schema
        self.num_slots = num_slots
        self.num_positions = num_positions
        self.local_rank = local_rank
        self.local_size = local_size
        self.epoch = 0
        self.placement = ""
        self.num_missing = num_slots
        self.bytes_written = 0
        self.readahead: Readahead | None = None
        self.entries = empty_entries(num_slots, len(self.schema.variable))
        self.surplus = empty_entries(0, len(self.schema.variable))
        self._files = RowFiles(
            directory,
            self.schema,
            local_rank=local_rank,
            heap_bytes=budget.heap_bytes if budget is not None else None,
        )
        self._serial = 0
        # The entries that the last delta replaced: what stepping back needs.
        self._undo: Entries | None = None
        self._arrived: list[Entries] = []
        # Rows that only change slot at the next turn.
        self._kept: list[Entries] = []
        self._staged: list[Entries] = []
        # Beyond what may stay in the heap: sealed only if in the end all rows fit.
        self._held_back: list[Entries] = []
        self._adopted: set[str] = set()
        self._given: set[str] = set()
        # Derived when first a row must be written; None until then.
        self._free: FreeExtents | None = None
        self._free_positions: NDArray[np.int64] | None = None
        # A staging thread writes and adopts while others read, write arrivals and adopt.
        self._guard = threading.RLock()
        self._has_room = False
        self._lock = CacheLock(directory)
        # One thread for what need not be waited for: it flushes, seals and commits in this order.
        self._background: ThreadPoolExecutor | None = None
        self._syncs: list[Future[None]] = []
        self._unsynced = False
        # Epoch and rows of the delta that was last asked for.
        self._sealed = (-1, 0)
        self._committing: Future[None] | None = None

    def prepare(
        self,
        *,
        exchanging: bool = True,
        wanted: Placement | None = None,
        read_only: bool = False,
        expected_bytes: int = 0,
    ) -> None:
        """Create or adopt the directory, lock it and make room. Leader only, before anyone loads.

        Args:
            exchanging: Whether rows will come and go: then nobody else may use it meanwhile.
            wanted: The samples that a job which does not exchange needs; where
                they lie here already, the cache is shared with other such jobs. None: not known.
            read_only: Whether nothing may be made or changed.
            expected_bytes: Of the variable fields, as far as anyone can tell.

        Raises:
            CacheBusyError: If another process uses it in a way that cannot be shared.
            OtherDatasetError: If it holds something else.
            CacheError: If it cannot be written or the disk is full.
        """
        with self.named("prepare the cache"):
            self._enter(exchanging=exchanging, read_only=read_only)
            self._check_identity()
            self._keep_within_budget()
            if self.shared:
                if not self.is_right(wanted):
                    raise self._lock.busy("holds other rows than this job needs and is in use")
                return
            if not exchanging and self.is_right(wanted):
                self._lock.share()
                return
            self._make_room(expected_bytes)

    @property
    def fixed(self) -> Sequence[FixedFile]:
        """The files of the fixed fields."""
        return self._files.fixed

    @property
    def shared(self) -> bool:
        """Whether other jobs read it too, so that nothing may be written."""
        return self._lock.shared

    def is_right(self, wanted: Placement | None) -> bool:
        """Whether all these samples lie here, each in its slot."""
        if wanted is None or not self._holds_rows():
            return False
        self.load(writable=False)
        if (self.placement, self.epoch) == (wanted.name, wanted.epoch):
            return self.num_missing == 0
        if len(self.entries) != wanted.num_slots:
            return False
        return np.array_equal(self.entries.sample_id[:], wanted.sample_ids())

    def follow(self, *, shared: bool) -> None:
        """See it as the leader does, who holds the lock. Every other local rank."""
        self._lock.shared = shared

    def share(self) -> None:
        """Let other jobs read it from now on. Every local rank, when nothing will be written."""
        if self.local_rank == 0:
            self._lock.share()
        else:
            self.follow(shared=True)

    def begin_writing(self) -> None:
        """Hold it alone again. Every local rank.

        Raises:
            CacheBusyError: On the leader, if other jobs read it.
        """
        if self.local_rank == 0:
            self._lock.upgrade("staging")
        else:
            self.follow(shared=False)

    def _keep_within_budget(self) -> None:
        """Empty a cache that was filled under a larger quota, or none. Leader only."""
        budget = self.budget
        if budget is None or not self._head_path.exists():
            return
        with self._readable("the manifest"):
            head = json.loads(self._head_path.read_text())
            begun_under = head.get("quota")
            partial = int(head["missing"]) > 0
            begun_within = begun_under is not None and int(begun_under) <= budget.quota_bytes
            begun_within = begun_within and self._sized_within(budget)
        if begun_within:
            return
        if not partial and self.disk_bytes() + budget.spare_bytes <= budget.quota_bytes:
            return
        if self.shared:
            raise self._lock.busy("is larger than this job's quota and in use")
        if self._holds_rows():
            log.warning("%s: emptied, because it is larger than the quota", self.directory)
        self.rewrite(
            empty_entries(self.num_slots, len(self.schema.variable)), epoch=0, placement=""
        )
        self._unlink(
            [path.name for kind in ("fixed-*", "heap-*") for path in self.directory.glob(kind)]
        )

    def _sized_within(self, budget: Budget) -> bool:
        """Whether no file is larger than it could become; jobs of one quota may divide it anew."""
        positions = max((file.count_positions() for file in self.fixed), default=0)
        heaps = [path.stat().st_size for path in self.directory.glob("heap-*")]
        return positions <= budget.positions and max(heaps, default=0) <= budget.heap_bytes

    def disk_bytes(self) -> int:
        """Count what the files take on disk."""
        return sum(512 * path.lstat().st_blocks for path in self.directory.iterdir())

    def _make_room(self, expected_bytes: int) -> None:
        if not self._head_path.exists():
            self.rewrite(self.entries, epoch=0, placement="")
        num_positions = self.num_slots
        if self.budget is not None and self.budget.positions < self.num_slots:
            num_positions = self.budget.positions
        with self._readable("a field's file"):
            if not self._holds_rows():
                files = [file.path for file in self.fixed if file.path.exists()]
                # A staging that was killed has claimed its room already.
                claimed = sum(512 * path.stat().st_blocks for path in files)
                need = max(num_positions * self.schema.fixed_bytes - claimed, 0)
                room_for(self.directory, need)
                if self.budget is not None:
                    most = self.budget.heap_bytes * self.local_size
                    expected_bytes = min(expected_bytes, most)
                self._warn_of(need + expected_bytes)
            for file in self.fixed:
                file.reserve(num_positions)

    def _warn_of(self, expected_bytes: int) -> None:
        # Only a guess, by the size of the source: no reason to refuse.
        try:
            room_for(self.directory, expected_bytes)
        except CacheError as error:
            log.warning("staging may not fit, to judge by the size of the source: %s", error)

    def _enter(self, *, exchanging: bool, read_only: bool) -> None:
        for attempt in range(3):
            try:
                if not read_only:
                    make_private(self.directory)
                self._take_lock(exchanging=exchanging, read_only=read_only)
                return
            except FileNotFoundError:
                # Somebody who tidied up removed it, unused as it was, between the two.
                if read_only or attempt == 2:
                    raise

    def _take_lock(self, *, exchanging: bool, read_only: bool) -> None:
        mode: Mode = "exchanging" if exchanging else "staging"
        if not read_only and self._lock.take(mode):
            return
        if not exchanging and self._lock.join():
            return
        busy = self._lock.busy("is in use")
        soon_free: set[Mode] = {"verifying", "pruning", "exporting"}
        if {owner.mode for owner in owners(self.directory)} <= (
            soon_free if exchanging else soon_free | {"staging"}
        ):
            raise CacheStagingError(str(busy), self.directory)
        raise busy

    def _check_identity(self) -> None:
        path = self.directory / "meta.json"
        expected = self.identity.to_json()
        if not path.exists():
            if not self.shared:
                write_json(path, expected)
            return
        with self._readable("meta.json"):
            found = dict(json.loads(path.read_text()))
        if found.get("format") != FORMAT_VERSION:
            raise CacheError(
                f"{path}: cache format {found.get('format')}, this version reads {FORMAT_VERSION}; "
                f"remove {self.directory} and stage again"
            )
        # The source's name is for messages: what it holds is in the fingerprint.
        if {**found, "source": expected["source"]} == expected:
            return
        if self.shared:
            raise self._lock.busy(f"holds {found['fingerprint']}, not this dataset, and is in use")
        if self._holds_rows():
            raise OtherDatasetError(
                f"{self.directory}: the cache holds {found['source']} with fingerprint "
                f"{found['fingerprint']}, but {self.identity.source} now has "
                f"{self.identity.fingerprint} or other fields; remove the directory to stage the "
                f"changed dataset (`tonari cache prune --stale {self.directory.parents[1]}` does "
                f"it for all such), or give another cache directory"
            )
        # A staging that never ended binds nobody, and what it left is of a source that is gone.
        self.rewrite(self.entries, epoch=0, placement="")
        write_json(path, expected)

    def _holds_rows(self) -> bool:
        if not self._head_path.exists():
            return False
        with self._readable("the manifest"):
            head = json.loads(self._head_path.read_text())
            return int(head["missing"]) < int(head["rows"])

    @property
    def _head_path(self) -> Path:
        return self.directory / "manifest.json"

    def load(self, *, writable: bool | None = None) -> None:
        """Read the committed manifest and map the files; to write, unless it is shared.

        Nothing in it grows with the rows.

        Raises:
            CacheError: If they are not what the cache wrote.
        """
        self.settle()
        self._undo = None
        self._forget_epoch()
        self._staged, self._held_back = [], []
        self._free = self._free_positions = None
        with self.named("open the cache"), self._readable("the manifest"):
            self._read_manifest()
            for file in self.fixed:
                file.map(writable=not self.shared if writable is None else writable)

    def refresh(self) -> None:
        """Read the base that replaced the one in use, if one did; arrivals of the epoch stay."""
        self.settle()
        with self.named("read the manifest"), self._readable("the manifest"):
            if int(json.loads(self._head_path.read_text())["serial"]) == self._serial:
                return
            self._release(self._left_behind())
            self._undo = None
            self._release(self.surplus)
            self._read_manifest()

    def _read_manifest(self) -> None:
        head = json.loads(self._head_path.read_text())
        self.epoch, self._serial = int(head["epoch"]), int(head["serial"])
        self.placement, self.num_missing = str(head["placement"]), int(head["missing"])
        self.is_filled = self.budget is not None and (head.get("filled") == self.budget.quota_bytes)
        self._adopted = set()
        self.entries = from_arrays(*map_table(self.directory / head["base"]))
        for deltas in head["deltas"]:
            self._apply(deltas)
        self.adopt_staged()
        self._read_surplus(head.get("surplus"))

    def _apply(self, names: Sequence[str]) -> Entries:
        """Take in an epoch's deltas; what they replace is kept, to step back."""
        parts = [from_table(read_table(self.directory / name)) for name in names]
        delta = join_entries(parts, len(self.schema.variable))
        self._undo = self.entries.take(delta.slot[:])
        self.entries.put(delta)
        return delta

    @property
    def can_step_back(self) -> bool:
        """Whether the rows of the epoch before still lie there."""
        return self._undo is not None

    def before(self) -> Entries:
        """Copy the entries of the epoch before, which `can_step_back` must say are there."""
        assert self._undo is not None
        entries = self.entries.copy()
        entries.put(self._undo)
        entries.forget(self._overwritten().slot[:])
        return entries

    def _overwritten(self) -> Entries:
        """The entries of the epoch before whose bytes are another row's by now.

        The next epoch's arrivals may take their place before the manifest that lets go of them has
        replaced the one in force. Its deltas are there then: without them nothing is read.
        """
        assert self._undo is not None
        sealed = [self._delta(self.epoch + 1, share) for share in range(self.local_size)]
        if not all((self.directory / name).exists() for name in sealed):
            return self._undo.take(slice(0))
        view, gone = self.with_entries(self._undo), np.zeros(len(self._undo), np.bool_)
        present = np.flatnonzero(self._undo.present)
        for first in range(0, len(present), CHECKED_ROWS):
            rows = present[first : first + CHECKED_ROWS]
            gone[rows[corrupt_rows(view.read_rows(rows))]] = True
        return self._undo.take(gone)

    def _staged_files(self, serial: int) -> list[Path]:
        return sorted(self.directory.glob(f"staged-{serial}-*.arrow"))

    def adopt_staged(self) -> bool:
        """See the rows that any local rank sealed while staging. Thread-safe.

        Returns:
            Whether there were any.
        """
        with self._guard:
            new = [p for p in self._staged_files(self._serial) if p.name not in self._adopted]
            for path in new:
                delta = from_table(read_table(path))
                self.entries.put(delta)
                self.num_missing -= len(delta)
                self._adopted.add(path.name)
            return bool(new)

    def _read_surplus(self, name: str | None) -> None:
        self.surplus = empty_entries(0, len(self.schema.variable))
        self._given = set()
        if name is not None:
            self.surplus = from_table(read_table(self.directory / name))
            self.adopt_given()

    def held(self) -> Entries:
        """Every row that lies here: of the slots, of the epoch before, then the surplus."""
        parts = [self.entries.take(self.entries.present)]
        if self._undo is not None:
            gone = np.isin(self._undo.slot[:], self._overwritten().slot[:])
            parts.append(self._undo.take(self._undo.present & ~gone))
        return self._joined([*parts, self.surplus])

    def with_entries(self, entries: Entries) -> "Cache":
        """View the same files with other books, to read rows that belong to no slot."""
        other = copy.copy(self)
        other.entries = entries
        return other

    def give(self, sample_ids: NDArray[np.int64]) -> None:
        """Write down that surplus rows are durable elsewhere, or wanted nowhere.

        What `adopt_given` then frees may be overwritten, so it must be known after a kill.
        """
        gone = self.surplus.take(np.isin(self.surplus.sample_id[:], sample_ids))
        with self.named("free rows that were pulled"):
            # After a kill the files of the pull before are still there.
            share = f"given-{self._serial}-{self.local_rank}"
            lap = len(list(self.directory.glob(f"{share}-*.arrow")))
            self._write_table(f"{share}-{lap}.arrow", gone)

    def adopt_given(self) -> None:
        """Free the surplus rows that any local rank gave."""
        paths = sorted(self.directory.glob(f"given-{self._serial}-*.arrow"))
        for path in [path for path in paths if path.name not in self._given]:
            gone = from_table(read_table(path))
            left = ~np.isin(self.surplus.sample_id[:], gone.sample_id[:])
            self._release(self.surplus.take(~left))
            self.surplus = self.surplus.take(left)
            self._given.add(path.name)

    def forget_surplus(self) -> None:
        """Free all surplus rows. Every local rank, when no manifest in force names them."""
        self._release(self.surplus)
        self.surplus = empty_entries(0, len(self.schema.variable))
        self._free_positions = None

    def open_spare(self) -> None:
        """Let the fixed fields have room beside the pool. Every local rank.

        Raises:
            CacheError: If the disk is full.
        """
        with self._guard, self.named("make room for rows of other nodes"):
            for file in self.fixed:
                file.reserve(self.num_positions)
            self._map_growth()

    def room(self) -> NDArray[np.int64]:
        """int64[n]: Positions for more rows beside those held, the same on all local ranks.

        -1 where nothing is fixed: there the rows are only counted, to bound the heaps.
        """
        if self.fixed:
            self._free_positions = None
            return self.free_positions
        live = len(self.entries) - self.num_missing + len(self.surplus)
        return np.full(max(self.num_positions - live, 0), -1, np.int64)

    @property
    def free_positions(self) -> NDArray[np.int64]:
        """int64[n]: Positions that no manifest in use mentions, ascending; the same on all ranks.

        Derived from the manifests when it is first asked for, then kept up to date.
        """
        if self._free_positions is None:
            used = [self.entries.position]
            if self._undo is not None:
                used.append(self._undo.position)
            if len(self.surplus):
                used.append(self.surplus.position)
            num_positions = len(self.fixed[0].rows) if self.fixed else 0
            self._free_positions = find_free_positions(num_positions, used)
        return self._free_positions

    def set_aside(self, num_positions: int) -> NDArray[np.int64]:
        """Take the first free positions for rows to be staged: -1 where nothing is fixed."""
        if not self.fixed:
            return np.full(num_positions, -1, np.int64)
        free = self.free_positions
        self._free_positions = free[num_positions:]
        return free[:num_positions]

    def _free_extents(self) -> FreeExtents:
        if self._free is None:
            used = [self.entries] if self._undo is None else [self.entries, self._undo]
            used.append(self.surplus)
            self._free = find_free_extents(used, heap=self.local_rank)
        return self._free

    def _left_behind(self) -> Entries | None:
        """The rows of the epoch before that left the node; those that changed slot still lie there.

        Sorts the rows that moved.
        """
        if self._undo is None:
            return None
        now = self.entries.take(self._undo.slot[:])
        return self._undo.take(~np.isin(self._places(self._undo), self._places(now)))

    def _places(self, entries: Entries) -> NDArray[np.int64]:
        """int64[n]: A number for where each row lies; of rows without bytes, for their samples."""
        if self.fixed:
            return entries.position[:]
        # Heaps are few and below 2**48 bytes. Rows without bytes all lie at 0: nothing is released.
        place = entries.heap[:] << np.int64(48) | entries.offset[:]
        return np.where(entries.extent_bytes > 0, place, -1 - entries.sample_id[:])

    def _release(self, entries: Entries | None) -> None:
        """Give back the space of entries that no manifest in use mentions any more."""
        if entries is None:
            return
        if self._free_positions is not None and self.fixed:
            self._free_positions = join_positions(self._free_positions, entries.position[:])
        if self._free is not None:
            mine = entries.heap[:] == self.local_rank
            self._free.give_back(entries.offset[:][mine], entries.extent_bytes[mine])

    def make_room(self) -> None:
        """Claim the disk space of an exchange's arrivals, before any row moves.

        Raises:
            CacheError: If the disk is full.
        """
        if self._has_room:
            return
        with self._guard, self.named("make room for arrivals"):
            for file in self.fixed:
                file.reserve(self.num_positions)
            self._map_growth()
            if self.schema.variable:
                end = self._free_extents().end + self._arrivals_bytes()
                self._files.heap.reserve(end)
            self._has_room = True

    def _map_growth(self) -> None:
        if not self.fixed or len(self.fixed[0].rows) >= self.num_positions:
            return
        before = len(self.fixed[0].rows)
        for file in self.fixed:
            file.map()
        if self._free_positions is not None:
            more = np.arange(before, len(self.fixed[0].rows))
            self._free_positions = np.concatenate([self._free_positions, more])

    def lengths(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[len(slots), num_variable]: Bytes of the variable fields."""
        return self.entries.lengths[slots]

    def variable_fields(self, slots: NDArray[np.int64]) -> list[list[NDArray[np.uint8]]]:
        """View variable fields in place: for each row, uint8[length] of each field."""
        return self._files.views(self.entries, slots)

    def read_rows(self, slots: NDArray[np.int64]) -> Rows:
        """Copy rows out, in the order of ``slots``."""
        return self._files.read(self.entries, slots)

    def read_into(self, slots: NDArray[np.int64], into: Rows) -> None:
        """Copy rows, in the order of ``slots``, to where there is room for rows of their lengths.

        Any thread may call it while no epoch turns.
        """
        if self.readahead is not None:
            # A fault would bring in the pages around it too, which are rows that nobody asked for.
            self.readahead.ask(locate(self.entries, slots)).result()
        self._files.read_into(self.entries, slots, into)

    def write_rows(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        rows: Rows,
        *,
        offsets: NDArray[np.int64] | None = None,
    ) -> Entries:
        """Write rows into free space and return what the manifest is to say of them.

        Args:
            slots: int64[num_rows]: Where they belong.
            positions: int64[num_rows]: Of the fixed fields.
            rows: The rows.
            offsets: int64[num_rows]: Of the variable fields in this local rank's heap, where the
                caller keeps the books of a part of it; None: wherever it is free.
        """
        with self._guard, self.named("write rows"):
            if offsets is None:
                offsets = self._free_extents().take(rows.lengths.sum(axis=1))
            self.bytes_written += self._files.write(positions, offsets, rows)
        # Copies: the rows may lie in a buffer that is used again.
        return make_entries(
            slot=slots,
            sample_id=rows.sample_id.copy(),
            checksum=rows.checksum.copy(),
            position=positions,
            heap=np.full(len(slots), self.local_rank, np.int64),
            offset=offsets,
            lengths=rows.lengths.copy(),
        )

    def stage_rows(self, slots: NDArray[np.int64], positions: NDArray[np.int64], rows: Rows) -> int:
        """Write rows that were missing, at positions that were set aside for them.

        Returns:
            How many, from the first, the budget has room for: the others were not written.
        """
        num_rows = len(rows)
        if self.budget is not None and self.schema.variable:
            num_rows = self._count_fitting(rows.lengths.sum(axis=1), self.budget)
        if num_rows:
            part = rows if num_rows == len(rows) else rows.head(num_rows)
            self._staged.append(self.write_rows(slots[:num_rows], positions[:num_rows], part))
        return num_rows

    def _count_fitting(self, extents: NDArray[np.int64], budget: Budget) -> int:
        all_may_fit = budget.resident_rows >= self.num_slots
        limit = budget.heap_bytes if all_may_fit else budget.resident_heap_bytes
        with self._guard:
            free = self._free_extents()
            if free.end + int(extents.sum()) <= limit:
                return len(extents)
            offsets = free.take(extents)
            free.give_back(offsets, extents)
        over = np.flatnonzero((offsets + extents > limit) & (extents > 0))
        return int(over[0]) if len(over) else len(extents)

    def settle_staged(self, *, all_fit: bool) -> None:
        """Seal the rows that were held back, or drop them. Every local rank, before the commit."""
        held, self._held_back = self._held_back, []
        if all_fit:
            self._staged += held
            self.seal_staged(hold_back=False)
            return
        with self._guard:
            for part in held:
                self._free_extents().give_back(part.offset[:], part.extent_bytes)

    @property
    def may_seal(self) -> bool:
        """Whether the budget has room for one more file of staged rows, and then the last."""
        if self.budget is None:
            return True
        return self._count_sealed() < self.budget.num_seals - 2

    def mark_filled(self) -> None:
        """Remember that no more rows are to be staged under this quota. Leader only."""
        assert self.budget is not None
        head = json.loads(self._head_path.read_text())
        if head.get("filled") != self.budget.quota_bytes:
            head["filled"] = head["quota"] = self.budget.quota_bytes
            with self.named("write the manifest"):
                self._write_head(head)

    def beyond_budget(self) -> NDArray[np.bool_]:
        """bool[num_slots]: Rows that lie, or are, where windows must be."""
        assert self.budget is not None
        entries = self.entries
        beyond = entries.offset[:] + entries.extent_bytes > self.budget.resident_heap_bytes
        beyond &= entries.present
        kept = np.flatnonzero(entries.present & ~beyond)
        beyond[kept[self.budget.resident_rows :]] = True
        return beyond

    def reserve_windows(self) -> None:
        """Claim the space beside the rows that stay. Leader only."""
        assert self.budget is not None
        with self.named("make room for windows"):
            for file in self.fixed:
                file.reserve(self.budget.positions)

    def window_space(self) -> tuple[NDArray[np.int64], range]:
        """Find what this local rank may use beside the rows that stay, once it is reserved.

        Returns:
            Positions of the fixed fields, and bytes of its heap.
        """
        assert self.budget is not None
        with self.named("make room for windows"):
            for file in self.fixed:
                file.map()
            self._free_positions = None
            mine = np.array_split(self.free_positions, self.local_size)[self.local_rank]
            heap = range(0)
            if self.schema.variable:
                self._free = None
                heap = range(self._free_extents().end, self.budget.heap_bytes)
                self._files.heap.reserve(heap.stop)
        return mine, heap

    def has_room_to_move(self) -> bool:
        """Whether the budget lets arrivals lie beside all rows, to judge by the mean row."""
        if self.budget is None:
            return True
        if self.num_missing or not self.budget.has_room_to_move:
            return False
        if not self.schema.variable:
            return True
        # A tenth more, for what does not fit into the gaps.
        spare = self._arrivals_bytes() * 11 // 10
        with self._guard:
            return self._free_extents().end + spare <= self.budget.heap_bytes

    def may_have_room_to_move(self) -> bool:
        """Guess `has_room_to_move` of rows that are staged, before they are in the manifest."""
        if self.budget is None or not self.budget.has_room_to_move:
            return self.budget is None
        with self._guard:
            end = self._free_extents().end
        spare = end * (self.num_positions - self.num_slots) // self.num_slots
        return end + spare * 11 // 10 <= self.budget.heap_bytes

    def keep_alone(self) -> None:
        """Tell other jobs not to wait for this cache: it is never shared. Leader only."""
        self._lock.sign("exchanging")

    def _arrivals_bytes(self) -> int:
        spare = (self.num_positions - self.num_slots) // max(self.local_size, 1)
        mean = -(-self.entries.extents_total_bytes // max(len(self.entries), 1))
        return spare * mean

    def write_arrivals(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write rows that live in ``slots`` from the next epoch on; live rows stay as they are.

        Called again and again within an epoch; takes this local rank's free positions in turn.
        """
        if not len(slots):
            return
        self.make_room()
        with self._guard:
            free = self.free_positions
            first = self.local_rank * (len(free) // self.local_size)
            if self._arrived and self.fixed:
                # Behind the last: to count what came would take longer with every call.
                first = int(np.searchsorted(free, self._arrived[-1].position[-1:][0])) + 1
            positions = free[first : first + len(slots)]
        if not self.fixed:
            positions = np.full(len(slots), -1, np.int64)
        assert len(positions) == len(slots), "the pool was sized for fewer arrivals"
        self._arrived.append(self.write_rows(slots, positions, rows))
        # One that has not begun serves these rows too.
        if not self._unsynced:
            self._unsynced = True
            self._syncs.append(self._later(self._sync_arrivals))
        if self.num_arriving == sum(map(len, self._arrived)):
            self._seal_later(self.epoch + 1)

    def keep_rows(self, slots: NDArray[np.int64], *, held_in: NDArray[np.int64]) -> None:
        """Let the rows of ``held_in`` live in ``slots`` from the next epoch on; no byte moves."""
        held = self.entries.take(held_in)
        held.slot.put(np.arange(len(slots)), slots)
        self._kept.append(held)

    def arrived_ids(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Name the slots that this rank's arrivals will live in, and their samples."""
        arrived = self._joined(self._arrived)
        return arrived.slot[:], arrived.sample_id[:]

    def forget_arrivals(self) -> None:
        """Drop what arrived since the last commit: the epoch is not going to take effect."""
        with self._guard:
            arrived = self._arrived
            self._forget_epoch()
            if self._free is not None:
                for part in arrived:
                    self._free.give_back(part.offset[:], part.extent_bytes)

    def rewrite_rows(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write rows again where they lie: to repair bytes that the disk damaged."""
        with self._guard, self.named("repair rows"):
            self.bytes_written += self._files.overwrite(self.entries, slots, rows)

    def _forget_epoch(self) -> None:
        self._arrived, self._kept, self._sealed = [], [], (-1, 0)

    def _later(self, work: Callable[[], None]) -> Future[None]:
        # Beside training, so that little is left to wait for at the epoch turn.
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix="tonari-cache")
        return self._background.submit(work)

    def _sync_arrivals(self) -> None:
        # A flush serves all that was written before it began: those asked for meanwhile are one.
        if self._unsynced:
            self._unsynced = False
            self._files.sync()

    def seal(self, epoch: int) -> None:
        """Make this rank's arrivals durable, and the delta that names them.

        Blocks on the disk, unless all of ``num_arriving`` came a while ago. Nothing is committed:
        the next `commit` of the leader counts only after every rank of every node has sealed. The
        commit before is settled, which lets rows of the epoch before that be written over.
        """
        self.settle()
        if self._sealed != (epoch, sum(map(len, [*self._arrived, *self._kept]))):
            self._seal_later(epoch)
        with self.named("make arrivals durable"):
            for sync in self._syncs:
                sync.result()
            self._syncs = []

    def _seal_later(self, epoch: int) -> None:
        changed = self._joined([*self._arrived, *self._kept])
        self._sealed = epoch, len(changed)
        name = self._delta(epoch, self.local_rank)
        # Its name becomes durable with the manifest that refers to it.
        write = partial(self._write_table, name, changed, sync_name=False)
        self._syncs.append(self._later(write))

    def seal_staged(self, *, hold_back: bool = True) -> None:
        """Make the staged rows durable, and known to whoever opens the cache after a kill.

        Blocks on the disk. The manifest in force stays; `adopt_staged` and `load` add these rows.
        """
        staged, self._staged = self._staged, []
        if hold_back and self.budget is not None and self.schema.variable:
            limit = self.budget.resident_heap_bytes
            for number, part in enumerate(staged):
                late = part.offset[:] + part.extent_bytes > limit
                if late.any():
                    self._held_back.append(part.take(late))
                    staged[number] = part.take(~late)
        if not sum(map(len, staged)):
            return
        with self.named("make staged rows durable"):
            self._files.sync()
            share = f"staged-{self._serial}-{self.local_rank}"
            self._write_table(f"{share}-{self._count_sealed()}.arrow", self._joined(staged))

    def _count_sealed(self) -> int:
        share = f"staged-{self._serial}-{self.local_rank}"
        return len(list(self.directory.glob(f"{share}-*.arrow")))

    def _write_table(self, name: str, entries: Entries, *, sync_name: bool = True) -> None:
        write_table(self.directory / name, to_table(entries), sync_name=sync_name)
        self._count_written(self.directory / name)

    def _write_head(self, head: dict[str, object]) -> None:
        write_json(self._head_path, head)
        self._count_written(self._head_path)

    def _count_written(self, path: Path) -> None:
        with self._guard:
            self.bytes_written += path.stat().st_size

    def _delta(self, epoch: int, share: int) -> str:
        return f"delta-{epoch}-{share}.arrow"

    def _joined(self, parts: Sequence[Entries]) -> Entries:
        return join_entries(parts, len(self.schema.variable))

    def commit(self) -> None:
        """Make the epoch that `turn` began the truth, beside training; `settle` waits for it.

        Leader only, when all ranks have sealed. Until it is settled a kill leaves this node one
        epoch behind.
        """
        assert self._committing is None, "seal settles the commit before"
        self._committing = self._later(self._commit)

    def settle(self) -> None:
        """Wait until what was last committed is durable: at once, but for the leader.

        Raises:
            CacheError: If it could not be written; once.
        """
        committing, self._committing = self._committing, None
        if committing is not None:
            with self.named("commit"):
                committing.result()

    def _commit(self) -> None:
        assert self._undo is not None
        head = json.loads(self._head_path.read_text())
        head["moved"] += len(self._undo)
        obsolete: list[str] = []
        grown = head["moved"] > MOVED_PER_BASE * len(self.entries)
        if head["deltas"] and (grown or len(head["deltas"]) >= DELTAS_PER_BASE):
            # The new base is the epoch before: it stays possible to step back one.
            obsolete = [head["base"], *(name for deltas in head["deltas"] for name in deltas)]
            head["serial"] += 1
            head["base"] = f"base-{head['serial']}.arrow"
            head["deltas"], head["moved"] = [], 0
            before = self.entries.copy()
            before.put(self._undo)
            self._write_table(head["base"], before)
        head["epoch"], head["placement"] = self.epoch, self.placement
        head["deltas"].append([self._delta(self.epoch, share) for share in range(self.local_size)])
        self._write_head(head)
        self._unlink(obsolete)

    def turn(self, epoch: int) -> NDArray[np.int64]:
        """See the sealed rows from now on. Every rank, when all ranks have sealed.

        Work for the rows that moved only; the first time, also for those columns of all rows that
        could be said in two numbers until then.

        Returns:
            int64[n]: Slots that hold other rows than before.
        """
        before = self._left_behind()
        delta = self._apply([self._delta(epoch, share) for share in range(self.local_size)])
        self._release(before)
        if self._free_positions is not None and self.fixed:
            self._free_positions = np.setdiff1d(
                self._free_positions, delta.position[:], assume_unique=True
            )
        self.epoch = epoch
        self._forget_epoch()
        self._map_growth()
        return delta.slot[:]

    def fill_commit(self) -> None:
        """Make sealed rows part of the base, and let go of the surplus.

        After staging or a pull. Leader only, when all have sealed.
        """
        self.settle()
        self.adopt_staged()
        if self._adopted or len(self.surplus) or self._given:
            self.rewrite(self.entries, epoch=self.epoch, placement=self.placement)

    def rewrite(
        self, entries: Entries, *, epoch: int, placement: str, surplus: Entries | None = None
    ) -> None:
        """Replace the manifest by a new base. Leader only; nobody else writes the manifest.

        Args:
            entries: Of every slot.
            epoch: Whose rows they are.
            placement: Name of what they follow.
            surplus: Other rows that are to be kept until they were pulled.
        """
        self.settle()
        serial, obsolete = 0, []
        for kind in ("staged-*", "surplus-*", "given-*"):
            obsolete += [path.name for path in self.directory.glob(kind)]
        if self._head_path.exists():
            head = json.loads(self._head_path.read_text())
            serial = head["serial"] + 1
            obsolete += [head["base"], *(name for deltas in head["deltas"] for name in deltas)]
        base = f"base-{serial}.arrow"
        with self.named("write the manifest"):
            self._write_table(base, entries)
            more: dict[str, object] = {}
            if surplus is not None and len(surplus):
                more["surplus"] = f"surplus-{serial}.arrow"
                self._write_table(f"surplus-{serial}.arrow", surplus)
            self._write_head(
                {
                    "format": FORMAT_VERSION,
                    "serial": serial,
                    "epoch": epoch,
                    "placement": placement,
                    "rows": len(entries),
                    "missing": entries.count_missing(),
                    "base": base,
                    "deltas": [],
                    "moved": 0,
                    **more,
                }
                | ({"quota": self.budget.quota_bytes} if self.budget is not None else {})
            )
        self._unlink(obsolete)

    def _unlink(self, names: Sequence[str]) -> None:
        for name in names:
            (self.directory / name).unlink(missing_ok=True)

    def trim(self) -> None:
        """Give back disk space that staging claimed ahead, on this local rank's heap."""
        if self._free is not None and not self._has_room:
            self._files.heap.trim(self._free.end)

    def close(self) -> None:
        """Release the lock and the mappings, when the last commit is settled; idempotent."""
        try:
            self.settle()
        finally:
            if self._background is not None:
                self._background.shutdown()
                self._background = None
            self._lock.release()

    @contextlib.contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        # Arrow's errors of form are ValueErrors too.
        except (ValueError, KeyError, TypeError) as error:
            raise CacheError(
                f"{self.directory}: {name} is damaged ({error!r}), expected what this cache wrote; "
                "remove the directory, and the next run stages it again"
            ) from error

    @contextlib.contextmanager
    def named(self, doing: str) -> Iterator[None]:
        """Turn what the disk says within into a `CacheError` with directory and cure."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                cure = "free some space or give another directory (cache=..., TONARI_CACHE)"
            elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                cure = "make it writable or give another directory (cache=..., TONARI_CACHE)"
            else:
                cure = "look at the disk; removing the directory makes the next run stage again"
            raise CacheError(f"{self.directory}: could not {doing}: {error}; {cure}") from error
