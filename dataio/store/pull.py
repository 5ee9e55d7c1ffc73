"""Rows that some node holds come from that node: found by a directory, moved in rounds.

A round fills the positions that are free, so nothing that is wanted anywhere is overwritten; what
arrived is durable before the givers let go of theirs. Nothing is read from the source here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.base.progress import ProgressBar
from dataio.exchange.directory import MESSAGE_BYTES, all_to_all, find_holders
from dataio.exchange.transfer import Parcel, Transfer
from dataio.rows.rows import Rows, RowSchema, copy_rows, corrupt_rows, make_rows
from dataio.store.cache import Cache
from dataio.store.files.manifest import MISSING
from dataio.store.files.row_files import RowView
from dataio.world import CHANNEL_TAGS, World

ROUND_BYTES = 512 << 20
"""What a rank takes in at most before it is sealed: a kill loses no more."""
PARCEL_TAG = 16
"""Tags below it are for the directory and the rounds."""


@dataclass(frozen=True)
class Pulled:
    """What came from other nodes to this rank.

    Attributes:
        rows: How many.
        num_bytes: Their fields' bytes.
    """

    rows: int = 0
    num_bytes: int = 0


class _Store:
    """Rows that this rank gives, and free positions for what arrives; a `RowStore`."""

    def __init__(self, cache: Cache, given: RowView) -> None:
        self._cache = cache
        self._given = given
        self.rows = self.num_bytes = 0
        self.is_full = False
        self._slots = self._ids = self._positions = np.empty(0, np.int64)

    @property
    def schema(self) -> RowSchema:
        return self._cache.schema

    def expect(
        self, slots: NDArray[np.int64], ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> None:
        """Set where the rows of the next round belong."""
        order = np.argsort(slots)
        self._slots, self._ids, self._positions = slots[order], ids[order], positions

    def lengths(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[len(slots), num_variable]: Bytes of the variable fields."""
        return self._given.lengths(slots)

    def read_rows(self, slots: NDArray[np.int64]) -> Rows:
        """Copy rows out; a damaged one is sent as MISSING, and its taker reads the source."""
        rows = self._given.read_rows(slots)
        corrupt = corrupt_rows(rows)
        if not len(corrupt):
            return rows
        ids = rows.sample_id.copy()
        ids[corrupt] = MISSING
        return make_rows(rows.schema, ids, rows.fixed, rows.lengths, rows.variable)

    def read_into(self, slots: NDArray[np.int64], into: Rows) -> None:
        """Copy rows to where there is room for them, as `read_rows` gives them."""
        copy_rows(self.read_rows(slots), into)

    def keep_rows(self, slots: NDArray[np.int64], *, held_in: NDArray[np.int64]) -> None:
        """Keep nothing: rows that stay are in their slots before the pull begins."""

    def write_arrivals(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Stage rows in the slots that miss them."""
        place = np.searchsorted(self._slots, slots)
        good = rows.sample_id == self._ids[place]
        if not good.all():
            rows, slots, place = _only(rows, good), slots[good], place[good]
        if self.is_full or not len(slots):
            return
        fitting = self._cache.staged.write(slots, self._positions[place], rows)
        self.is_full = fitting < len(slots)
        self.rows += fitting
        taken = rows.head(fitting)
        self.num_bytes += sum(column.nbytes for column in (*taken.fixed, *taken.variable))


class Pull:
    """One rank's part in bringing missing rows from the nodes that hold them.

    Every round ends in progress, or the pull ends. Suppose that rows are left to pull and no node
    that lacks one has a free position. Such a node's pool and spare positions are taken up by rows
    that stay and by surplus that others still ask for, so its surplus is as large as its missing
    rows and its spare positions together. But a missing row is asked of one holder only: summed
    over the nodes there is no more such surplus than there are missing rows. So where there are
    spare positions some node has room. Where there are none, as for rows that never move, nodes
    that wait for one another in a circle give up: those rows are read from the source.

    Args:
        world: All ranks.
        cache: This node's files, no commit of which is under way. What they hold beside the pool is
            in ``surplus``.
        slots: int64[n]: Slots of this node whose rows are to come, ascending.
        sample_ids: int64[n]: Their samples.
        num_samples: Of the dataset.
        first_tag: Of this pool's channel.
        shown: Whether this rank may show progress.
    """

    def __init__(
        self,
        world: World,
        cache: Cache,
        *,
        slots: NDArray[np.int64],
        sample_ids: NDArray[np.int64],
        num_samples: int,
        first_tag: int,
        shown: bool,
    ) -> None:
        self._world, self._cache = world, cache
        self._num_samples, self._first_tag, self._shown = num_samples, first_tag, shown
        rank, size = world.local_rank, world.local_size
        self._slots = np.array_split(slots, size)[rank]
        self._ids = np.array_split(sample_ids, size)[rank]
        held = cache.log.held()
        numbers = np.arange(rank, len(held), size)
        self._mine = held.take(numbers)
        self._leaves = numbers >= len(held) - len(cache.log.surplus)
        most = cache.schema.fixed_bytes + int(self._mine.extent_bytes.max(initial=0))
        row_bytes = int(world.allreduce(np.array([most]), op="max", doing="compare row sizes")[0])
        self._parcel_rows = max(MESSAGE_BYTES // max(row_bytes, 1), 1)
        self._round_rows = max(ROUND_BYTES // max(row_bytes, 1), 1)
        self._store = _Store(cache, RowView(cache.files, self._mine))
        self._done = 0

    def run(self) -> Pulled:
        """Take in what other nodes hold of this node's missing rows, sealed. Collective.

        Returns:
            What came to this rank; what did not is still missing.

        Raises:
            ExchangeError, StallError: If a rank does not answer within the world's time limit.
        """
        world, cache = self._world, self._cache
        self._find()
        if len(cache.log.surplus):
            cache.disk.claim_spare()
        bar, before, seen = None, 0, 0
        while True:
            # Past this point all that arrived so far is durable everywhere.
            mine = np.array([len(self._slots) - self._done, self._store.num_bytes])
            left = world.allgather_array(mine, doing="pull rows")
            total, num_bytes = left.sum(axis=0).tolist()
            bar = bar or ProgressBar("pulling rows from other nodes", total, shown=self._shown)
            if total in (0, before):
                bar.close()
                return Pulled(self._store.rows, self._store.num_bytes)
            if before:
                bar.add(before - total, num_bytes=num_bytes - seen)
            before, seen = total, num_bytes
            # Between the two nobody seals: local ranks see the same rows, hence the same room.
            cache.log.adopt_staged()
            self._let_go()
            world.barrier(doing="free rows that were pulled")
            self._round(left[list(world.topology.ranks_of_node[world.node]), 0])

    def _find(self) -> None:
        """Ask who holds what, and the holders for it; then every rank knows what it is to send."""
        world, mine = self._world, self._mine.sample_id[:]
        holders = find_holders(
            world,
            held=mine,
            stays=~self._leaves,
            missing=self._ids,
            num_samples=self._num_samples,
            tag=self._first_tag,
        )
        order = _spread(holders, rank=world.rank, world_size=world.world_size)
        self._slots, self._ids, self._holders = self._slots[order], self._ids[order], holders[order]
        self._owed = np.bincount(self._holders, minlength=world.world_size)
        wanted = _split(self._ids, self._holders, world.world_size)
        asked = all_to_all(world, wanted, tag=self._first_tag, doing="ask for rows")
        by_id = np.argsort(mine, kind="stable")
        # For each rank, numbers of the rows that it takes, in the order in which it does.
        self._asked = [by_id[np.searchsorted(mine, ids, sorter=by_id)] for ids in asked]
        self._served = np.zeros(world.world_size, np.int64)
        # How often a row is still to be sent; below 0 once it is freed.
        self._due = np.bincount(np.concatenate(self._asked), minlength=len(mine))

    def _let_go(self) -> None:
        """Free the surplus rows that nobody needs from here any more."""
        if self._cache.room.budget is not None:
            return  # the quota has room for so many files only; all goes when the pull is over
        free = np.flatnonzero(self._leaves & (self._due == 0))
        if len(free):
            self._due[free] = -1
            self._cache.give(self._mine.sample_id[free])

    def _round(self, left: NDArray[np.int64]) -> None:
        """Take in as many rows as there is room for, give as many as are asked for, and seal."""
        cache, size = self._cache, self._world.world_size
        now = slice(self._done, self._done + self._positions(left))
        count = now.stop - now.start
        holders = self._holders[now]
        self._store.expect(self._slots[now], self._ids[now], self._free[:count])
        takes = np.bincount(holders, minlength=size)
        gives = self._agree(takes)
        arriving = _split(self._slots[now], holders, size)
        leaving = []
        for asked, first, number in zip(self._asked, self._served, gives, strict=True):
            leaving.append(asked[first : first + number])
        Transfer(
            self._world,
            self._store,
            sends=self._parcels(leaving, direction=1),
            receives=self._parcels(arriving, direction=-1),
        ).finish(None)
        self._due -= np.bincount(np.concatenate(leaving), minlength=len(self._due))
        self._served += gives
        self._owed -= takes
        self._done = now.stop
        cache.seal_staged()
        if cache.room.budget is not None:
            # What may have to make way for windows is not kept from here.
            cache.flush_staged(all_fit=False)

    def _positions(self, left: NDArray[np.int64]) -> int:
        """Choose how many rows to take now, and where: the node's room by what its ranks lack."""
        cache, rank = self._cache, self._world.local_rank
        cache.log.adopt_given()
        room = cache.free_room()
        total = int(left.sum())
        ends = np.concatenate([[0], np.cumsum(left)]) * min(len(room), total) // max(total, 1)
        self._free = room[ends[rank] : ends[rank + 1]]
        if self._store.is_full or not cache.room.may_seal:
            return 0
        return min(len(self._free), self._round_rows)

    def _agree(self, takes: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[world_size]: Rows that every rank takes from here in this round."""
        world, tag = self._world, self._first_tag + 1
        gives = np.zeros(world.world_size, np.int64)
        waiting = np.array([len(asked) for asked in self._asked]) - self._served
        peers_in, peers_out = np.flatnonzero(waiting).tolist(), np.flatnonzero(self._owed).tolist()
        requests = [
            world.irecv(gives[peer : peer + 1].view(np.uint8), source=peer, tag=tag)
            for peer in peers_in
        ]
        requests += [
            world.isend(takes[peer : peer + 1].view(np.uint8), dest=peer, tag=tag)
            for peer in peers_out
        ]
        world.wait(requests, peers=[*peers_in, *peers_out], doing="agree on a round of rows")
        return gives

    def _parcels(self, rows: Sequence[NDArray[np.int64]], *, direction: int) -> list[Parcel]:
        """Cut each peer's rows into parcels, in an order in which no ranks wait in a circle.

        All ranks send to their neighbour first, then to the next but one: the parcel that is first
        of those under way is first at its sender and at its receiver.
        """
        world = self._world
        parcels = []
        for shift in range(1, world.world_size):
            peer = (world.rank + direction * shift) % world.world_size
            part = rows[peer]
            for number, first in enumerate(range(0, len(part), self._parcel_rows)):
                tag = self._first_tag + PARCEL_TAG + number % (CHANNEL_TAGS - PARCEL_TAG)
                parcels.append(Parcel(part[first : first + self._parcel_rows], peer, tag, 0))
        return parcels


def _spread(holders: NDArray[np.int64], *, rank: int, world_size: int) -> NDArray[np.int64]:
    """Order the rows that somebody holds so that any run of them is spread over the holders."""
    by_holder = np.argsort(holders, kind="stable")
    starts = np.searchsorted(holders[by_holder], holders[by_holder])
    lap = np.empty(len(holders), np.int64)
    lap[by_holder] = np.arange(len(holders)) - starts
    order = np.lexsort(((holders - rank) % world_size, lap))
    return order[holders[order] >= 0]


def _split(
    values: NDArray[np.int64], ranks: NDArray[np.int64], world_size: int
) -> list[NDArray[np.int64]]:
    """Part values by rank; each part keeps its order."""
    order = np.argsort(ranks, kind="stable")
    return np.split(values[order], np.searchsorted(ranks[order], np.arange(1, world_size)))


def _only(rows: Rows, good: NDArray[np.bool_]) -> Rows:
    """Keep some rows."""
    return Rows(
        rows.schema,
        rows.sample_id[good],
        rows.checksum[good],
        tuple(column[good] for column in rows.fixed),
        rows.lengths[good],
        tuple(
            column[np.repeat(good, rows.lengths[:, field])]
            for field, column in enumerate(rows.variable)
        ),
    )
