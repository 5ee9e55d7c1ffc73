"""A node's rows in files: written, committed epoch by epoch, recovered after any kill.

All local ranks map the same files. Each writes only positions and heap extents that no manifest in
use mentions; local rank 0, the *leader*, alone replaces `manifest.json`, which is the only truth.
See docs/cache_format.md.
"""

import contextlib
import errno
import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio.atomic import read_table, write_json, write_table
from dataio.cache_lock import CacheLock, Mode, make_private, owners
from dataio.errors import CacheError, CacheStagingError, OtherDatasetError
from dataio.extents import FreeExtents
from dataio.filesystem import room_for
from dataio.manifest import Entries, empty_entries, from_table, to_table
from dataio.rows import Rows, RowSchema, row_offsets
from dataio.store import FixedFile, HeapFile

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
DELTAS_PER_BASE = 16


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
        num_positions: Rows the fixed fields have room for: the pool and its arrivals.
        local_rank: This rank's number on the node; 0 leads.
        local_size: Ranks on the node.
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
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.schema = identity.schema
        self.num_slots = num_slots
        self.num_positions = num_positions
        self.local_rank = local_rank
        self.local_size = local_size
        self.epoch = 0
        self.entries = empty_entries(num_slots, len(self.schema.variable))
        self.previous: Entries | None = None
        self.fixed = [
            FixedFile(directory / f"fixed-{number}.npy", column)
            for number, column in enumerate(self.schema.fixed)
        ]
        self._heaps: dict[int, HeapFile] = {}
        self._arrived: list[Entries] = []
        self._free: FreeExtents | None = None
        self.free_positions = np.empty(0, np.int64)
        self._lock = CacheLock(directory)
        self._syncer: ThreadPoolExecutor | None = None
        self._syncs: list[Future[None]] = []

    def prepare(
        self,
        *,
        exchanging: bool = True,
        wanted: NDArray[np.int64] | None = None,
        read_only: bool = False,
        expected_bytes: int = 0,
    ) -> None:
        """Create or adopt the directory, lock it and make room. Leader only, before anyone loads.

        Args:
            exchanging: Whether rows will come and go: then nobody else may use it meanwhile.
            wanted: int64[num_slots]: The samples that a job which does not exchange needs; where
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
            if self.shared:
                if not self.is_right(wanted):
                    raise self._lock.busy("holds other rows than this job needs and is in use")
                return
            if not exchanging and self.is_right(wanted):
                self._lock.share()
                return
            self._make_room(expected_bytes)

    @property
    def shared(self) -> bool:
        """Whether other jobs read it too, so that nothing may be written."""
        return self._lock.shared

    def is_right(self, wanted: NDArray[np.int64] | None) -> bool:
        """Whether all these samples lie here, each in its slot."""
        if wanted is None or not self._holds_rows():
            return False
        self.load(writable=False)
        return np.array_equal(self.entries.sample_id, wanted)

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

    def _make_room(self, expected_bytes: int) -> None:
        if not self._head_path.exists():
            self.rewrite(self.entries, epoch=0)
        with self._readable("a field's file"):
            if not self._holds_rows():
                files = [file.path for file in self.fixed if file.path.exists()]
                # A staging that was killed has claimed its room already.
                claimed = sum(512 * path.stat().st_blocks for path in files)
                need = max(self.num_positions * self.schema.fixed_bytes - claimed, 0)
                room_for(self.directory, need)
                self._warn_of(need + expected_bytes)
            for file in self.fixed:
                file.reserve(self.num_positions)

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
        if found == expected:
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
        # A staging that failed leaves the name of its dataset, but no row: that binds nobody.
        write_json(path, expected)

    def _holds_rows(self) -> bool:
        if not self._head_path.exists():
            return False
        with self._readable("the manifest"):
            head = json.loads(self._head_path.read_text())
            base = from_table(read_table(self.directory / head["base"]))
            return bool(head["deltas"]) or bool(base.present.any())

    @property
    def _head_path(self) -> Path:
        return self.directory / "manifest.json"

    def load(self, *, writable: bool | None = None) -> None:
        """Read the committed manifest and map the files; to write, unless it is shared.

        Raises:
            CacheError: If they are not what the cache wrote.
        """
        with self.named("open the cache"), self._readable("the manifest"):
            head = json.loads(self._head_path.read_text())
            self.epoch = int(head["epoch"])
            self.entries = from_table(read_table(self.directory / head["base"]))
            self.previous = None
            for deltas in head["deltas"]:
                self.previous = self.entries
                self.entries = self._applied(self.entries, deltas)
            for file in self.fixed:
                file.map(writable=not self.shared if writable is None else writable)
        self._begin_epoch()

    def _applied(self, entries: Entries, deltas: Sequence[str]) -> Entries:
        for name in deltas:
            entries = entries.replace(from_table(read_table(self.directory / name)))
        return entries

    def _begin_epoch(self) -> None:
        # Derived anew each epoch from the manifests in use: nothing to store, nothing to leak.
        used = [self.entries] if self.previous is None else [self.entries, self.previous]
        free = np.ones(len(self.fixed[0].rows) if self.fixed else 0, np.bool_)
        offsets, lengths = [], []
        for entries in used:
            here = entries.take(entries.present)
            if self.fixed:
                free[here.position] = False
            mine = here.take(here.heap == self.local_rank)
            offsets.append(mine.offset)
            lengths.append(mine.extent_bytes)
        self.free_positions = np.flatnonzero(free)
        self._free = FreeExtents(np.concatenate(offsets), np.concatenate(lengths))
        self._arrived = []

    def lengths(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[len(slots), num_variable]: Bytes of the variable fields."""
        return self.entries.lengths[slots]

    def variable_fields(self, slots: NDArray[np.int64]) -> list[list[NDArray[np.uint8]]]:
        """View variable fields in place: for each row, uint8[length] of each field."""
        entries = self.entries
        bounds = np.concatenate(
            [np.zeros((len(slots), 1), np.int64), np.cumsum(entries.lengths[slots], axis=1)], axis=1
        )
        bounds += entries.offset[slots][:, None]
        views = []
        for heap, bound in zip(entries.heap[slots].tolist(), bounds.tolist(), strict=True):
            mapped = self._heap(heap).view(bound[-1])
            views.append([mapped[a:b] for a, b in pairwise(bound)])
        return views

    def read_rows(self, slots: NDArray[np.int64]) -> Rows:
        """Copy rows out, in the order of ``slots``."""
        entries = self.entries
        fixed = tuple(file.rows[entries.position[slots]] for file in self.fixed)
        variable = []
        if self.schema.variable:
            views = self.variable_fields(slots)
            for number in range(len(self.schema.variable)):
                parts = [row[number] for row in views]
                variable.append(np.concatenate(parts) if parts else np.empty(0, np.uint8))
        return Rows(
            self.schema,
            entries.sample_id[slots],
            entries.checksum[slots],
            fixed,
            entries.lengths[slots],
            tuple(variable),
        )

    def _heap(self, number: int) -> HeapFile:
        if number not in self._heaps:
            self._heaps[number] = HeapFile(self.directory / f"heap-{number}.bin")
        return self._heaps[number]

    def write_rows(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], rows: Rows
    ) -> None:
        """Write rows that belong to ``slots`` from the next commit on, into free space."""
        with self.named("write rows"):
            for file, column in zip(self.fixed, rows.fixed, strict=True):
                file.rows[positions] = column
            assert self._free is not None
            extents = rows.lengths.sum(axis=1)
            offsets = np.array([self._free.take(size) for size in extents.tolist()], np.int64)
            self._heap(self.local_rank).write(offsets, extents, _interleave(rows))
        heap = np.full(len(slots), self.local_rank, np.int64)
        self._arrived.append(
            Entries(slots, rows.sample_id, rows.checksum, positions, heap, offsets, rows.lengths)
        )

    def write_arrivals(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write rows that live in ``slots`` from the next epoch on; live rows stay as they are.

        Called again and again within an epoch; takes this local rank's free positions in turn.
        """
        taken = sum(len(part) for part in self._arrived)
        room = len(self.free_positions) // self.local_size
        first = self.local_rank * room + taken
        positions = self.free_positions[first : first + len(slots)]
        if not self.fixed:
            positions = np.full(len(slots), -1, np.int64)
        assert len(positions) == len(slots), "the pool was sized for fewer arrivals"
        self.write_rows(slots, positions, rows)
        self._sync_later()

    def forget_arrivals(self) -> None:
        """Drop what arrived since the last commit: the epoch is not going to take effect."""
        self._begin_epoch()

    def _sync_later(self) -> None:
        # Beside training, so that little is left to wait for at the epoch turn.
        if self._syncer is None:
            self._syncer = ThreadPoolExecutor(1, thread_name_prefix="tonari-sync")
        self._syncs.append(self._syncer.submit(self._sync))

    def _sync(self) -> None:
        for file in self.fixed:
            file.sync()
        self._heap(self.local_rank).sync()

    def seal(self, epoch: int) -> None:
        """Make this rank's arrivals durable, and the delta that names them.

        Blocks on the disk. Nothing is committed: the next `commit` of the leader counts only after
        every rank of every node has sealed.
        """
        with self.named("make arrivals durable"):
            for sync in self._syncs:
                sync.result()
            self._syncs = []
            self._sync()
            write_table(
                self.directory / self._delta(epoch, self.local_rank), to_table(self._joined())
            )

    def _delta(self, epoch: int, share: int) -> str:
        return f"delta-{epoch}-{share}.arrow"

    def _joined(self) -> Entries:
        if not self._arrived:
            return self.entries.take(np.empty(0, np.int64))
        columns = zip(*(vars(part).values() for part in self._arrived), strict=True)
        return Entries(*(np.concatenate(column) for column in columns))

    def commit(self, epoch: int) -> None:
        """Make the sealed deltas the truth. Leader only, when all ranks have sealed."""
        head = json.loads(self._head_path.read_text())
        obsolete: list[str] = []
        if len(head["deltas"]) >= DELTAS_PER_BASE:
            # The new base is the epoch before: it stays possible to step back one.
            obsolete = [head["base"], *(name for deltas in head["deltas"] for name in deltas)]
            head["serial"] += 1
            head["base"] = f"base-{head['serial']}.arrow"
            head["deltas"] = []
            with self.named("rewrite the manifest"):
                write_table(self.directory / head["base"], to_table(self.entries))
        head["epoch"] = epoch
        head["deltas"].append([self._delta(epoch, share) for share in range(self.local_size)])
        with self.named("commit"):
            write_json(self._head_path, head)
        self._unlink(obsolete)

    def turn(self, epoch: int) -> None:
        """See the sealed rows from now on. Every rank, when all ranks have sealed."""
        deltas = [self._delta(epoch, share) for share in range(self.local_size)]
        self.previous, self.entries = self.entries, self._applied(self.entries, deltas)
        self.epoch = epoch
        self._begin_epoch()

    def fill_commit(self, epoch: int) -> None:
        """Make sealed rows part of the base, after staging. Leader only, when all have sealed."""
        deltas = [self._delta(epoch, share) for share in range(self.local_size)]
        self.rewrite(self._applied(self.entries, deltas), epoch=epoch)
        self._unlink(deltas)

    def rewrite(self, entries: Entries, *, epoch: int) -> None:
        """Replace the manifest by a new base. Leader only, while no other rank reads or writes."""
        serial, obsolete = 0, []
        if self._head_path.exists():
            head = json.loads(self._head_path.read_text())
            serial = head["serial"] + 1
            obsolete = [head["base"], *(name for deltas in head["deltas"] for name in deltas)]
        base = f"base-{serial}.arrow"
        with self.named("write the manifest"):
            write_table(self.directory / base, to_table(entries))
            head = {
                "format": FORMAT_VERSION,
                "serial": serial,
                "epoch": epoch,
                "base": base,
                "deltas": [],
            }
            write_json(self._head_path, head)
        self._unlink(obsolete)

    def _unlink(self, names: Sequence[str]) -> None:
        for name in names:
            (self.directory / name).unlink(missing_ok=True)

    def trim(self) -> None:
        """Give back disk space that staging claimed ahead, on this local rank's heap."""
        assert self._free is not None
        self._heap(self.local_rank).trim(self._free.end)

    def close(self) -> None:
        """Release the lock and the mappings; idempotent."""
        if self._syncer is not None:
            self._syncer.shutdown()
            self._syncer = None
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


def _interleave(rows: Rows) -> NDArray[np.uint8]:
    """Lay each row's variable fields side by side: uint8[sum of all lengths]."""
    if len(rows.variable) <= 1:
        return rows.variable[0] if rows.variable else np.empty(0, np.uint8)
    bounds = [row_offsets(rows.lengths[:, field]).tolist() for field in range(len(rows.variable))]
    parts = [
        column[bound[row] : bound[row + 1]]
        for row in range(len(rows))
        for column, bound in zip(rows.variable, bounds, strict=True)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)
