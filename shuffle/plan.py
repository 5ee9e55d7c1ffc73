"""Which rows leave, in which chunk, and where every row came from.

A *home* numbers the slots of all pools in one row: ``pool_start(node) + slot``. Before any
exchange home h holds sample h, so following a home back to epoch 0 names the sample in it.

Who sends what to whom depends neither on the number of steps nor on the size of a row: a run that
was resumed, or whose batches changed, traces to the same samples.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataio.base.permutation import permute, unpermute
from dataio.base.seeding import Key, key
from dataio.plan.layout import Layout
from shuffle.backwards import MOST_ROWS, BackTables, move_back
from shuffle.ring import make_ring

MAX_CHUNKS = 16
"""Different partners that a replica sends to in an epoch, at most."""

MAX_PARCEL_BYTES = 64 * 2**20

TURN_RANGE = 2**60

BLOCK = 1 << 15
"""Rows traced at once: what stays in a core's cache."""


def num_leaving(layout: Layout, exchange: float) -> int:
    """Count the rows that every replica gives and takes an epoch.

    Args:
        layout: Replicas and samples. On one node nothing leaves.
        exchange: Share of a replica's rows, in [0, 1], read as the decimal number it prints as.

    Raises:
        ValueError: If exchange lies outside [0, 1].
    """
    if not 0 <= exchange <= 1:
        raise ValueError(
            f"shuffle: exchange is {exchange}, expected a share in [0, 1]; 0.1 is usual"
        )
    if layout.num_nodes == 1:
        return 0
    # Not exchange * rows: in floating point 0.29 * 100 falls short of 29
    return math.floor(_exact(exchange) * (layout.num_samples // layout.num_replicas))


@lru_cache(maxsize=16)
def _exact(exchange: float) -> Fraction:
    return Fraction(str(exchange))


def num_chunks(num_leaving: int) -> int:
    """Count the chunks that an epoch's leaving rows are cut into, each with partners of its own."""
    return min(MAX_CHUNKS, num_leaving)


def chunk_bounds(num_leaving: int) -> NDArray[np.int64]:
    """Cut the leaving rows into chunks that differ by one row at most.

    Returns:
        int64[num_chunks + 1]: Chunk c is the leaving rows [bounds[c], bounds[c + 1]).
    """
    return _even_cut(num_leaving, num_chunks(num_leaving))


def parcel_bounds(
    num_rows: int, *, mean_row_bytes: int, max_parcel_bytes: int = MAX_PARCEL_BYTES
) -> NDArray[np.int64]:
    """Cut a chunk into as few parcels as keep each within the bound, for rows of mean size.

    Args:
        num_rows: Rows of the chunk.
        mean_row_bytes: Must be the same on all ranks, or sender and receiver would cut differently.
        max_parcel_bytes: A row that is larger alone still travels, as a parcel of one.

    Returns:
        int64[num_parcels + 1]: Bounds of the parcels, in rows of the chunk.
    """
    rows_per_parcel = max(1, max_parcel_bytes // max(1, mean_row_bytes))
    return _even_cut(num_rows, -(-num_rows // rows_per_parcel))


def chunk_step(chunk: int, num_chunks: int, steps: range) -> int:
    """Say before which of the remaining steps a chunk is sent, so that all are spread evenly.

    Where no step remains it is ``steps.start``: at once.
    """
    return steps[chunk * len(steps) // num_chunks] if steps else steps.start


def leaving_slots(
    layout: Layout, *, replica: int, num_leaving: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Choose the slots of a replica's share whose rows leave after this epoch.

    Returns:
        int64[num_leaving]: Distinct slots of the node's pool, uniformly chosen. The j-th row to
        arrive takes the j-th, so a pool never changes its size.

    Raises:
        ValueError: If num_leaving lies outside [0, rows of the share].
    """
    start, stop = layout.share_slots(replica)
    if not 0 <= num_leaving <= stop - start:
        raise ValueError(
            f"replica {replica}: num_leaving is {num_leaving}, its share has {stop - start} rows; "
            f"take num_leaving from the layout and the exchange fraction"
        )
    order = _LeavingOrder(layout, num_leaving, seed, epoch)
    return start + order.rows(np.array([replica]), np.arange(num_leaving))


def placement(
    layout: Layout, *, node: int, exchange: float, seed: int, epoch: int, first_epoch: int = 0
) -> NDArray[np.int64]:
    """int64[pool_rows]: Samples that a node's slots hold at the start of an epoch.

    Time O(pool rows x epochs since ``first_epoch``), memory O(pool rows + nodes), for any node from
    any rank.
    """
    slots = np.arange(layout.pool_rows(node))
    return trace(
        layout,
        node=node,
        slots=slots,
        exchange=exchange,
        seed=seed,
        epoch=epoch,
        first_epoch=first_epoch,
    )


def trace(
    layout: Layout,
    *,
    node: int,
    slots: ArrayLike,
    exchange: float,
    seed: int,
    epoch: int,
    first_epoch: int = 0,
) -> NDArray[np.int64]:
    """Name the samples that some slots of a node hold at the start of an epoch.

    Args:
        layout: Replicas and samples.
        node: Whose slots.
        slots: int64[n], in its pool.
        exchange: Share of a replica's rows, in [0, 1].
        seed: The run's seed.
        epoch: At whose start.
        first_epoch: In which the layout began, every home holding the sample of its number.

    Returns:
        int64[len(slots)].

    Raises:
        ValueError: If a slot lies outside the node's pool.
    """
    found, num_rows = np.asarray(slots, np.int64), layout.pool_rows(node)
    if found.size and (found.min() < 0 or found.max() >= num_rows):
        raise ValueError(f"node {node}: a slot lies outside its pool [0, {num_rows})")
    return trace_homes(
        layout,
        layout.pool_start(node) + found,
        exchange=exchange,
        seed=seed,
        epoch=epoch,
        first_epoch=first_epoch,
    )


def trace_homes(
    layout: Layout,
    homes: NDArray[np.int64],
    *,
    exchange: float,
    seed: int,
    epoch: int,
    first_epoch: int = 0,
) -> NDArray[np.int64]:
    """Name the samples in some homes, of any nodes, at the start of an epoch; see ``trace``."""
    leaving = num_leaving(layout, exchange)
    epochs = reversed(range(first_epoch, epoch) if leaving else range(0))
    share = layout.num_samples // layout.num_replicas
    if len(homes) > max(layout.num_replicas, share) and share < MOST_ROWS:
        return _trace_many(layout, homes, epochs, num_leaving=leaving, seed=seed)
    for past in epochs:
        homes = homes_before(layout, homes, num_leaving=leaving, seed=seed, epoch=past)
    return homes


def _trace_many(
    layout: Layout, homes: NDArray[np.int64], epochs: Iterable[int], *, num_leaving: int, seed: int
) -> NDArray[np.int64]:
    """Do as `homes_before` does after each of some epochs, the last one first."""
    replicas = replica_of_home(layout, homes)
    rows = (homes - _share_starts(layout, replicas)).astype(np.int32)
    held_by = replicas.astype(np.int32)
    for epoch in epochs:
        order = _LeavingOrder(layout, num_leaving, seed, epoch, is_table=True)
        move_back(order.back_tables(), held_by, rows)
    return _share_starts(layout, held_by.astype(np.int64)) + rows


def homes_before(
    layout: Layout, homes: NDArray[np.int64], *, num_leaving: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Find where the rows of these homes stood during the epoch before they came there.

    Time O(homes + rows that one replica sends) where homes are many; each by itself where few.

    Args:
        layout: Replicas and samples.
        homes: int64[n], of any nodes.
        num_leaving: Rows that every replica sends, >= 1.
        seed: The run's seed.
        epoch: After which the rows came there.

    Returns:
        int64[n]: A row that did not move has its home of before; one that moved has another.
    """
    order = _LeavingOrder(layout, num_leaving, seed, epoch, is_table=len(homes) > num_leaving)
    ring = make_ring(layout, seed=seed, epoch=epoch)
    bounds = chunk_bounds(num_leaving)
    back = -ring.shifts(len(bounds) - 1)
    before = homes.copy()
    for block in range(0, len(homes), BLOCK):
        here = before[block : block + BLOCK]
        replicas = replica_of_home(layout, here)
        places = order.places(replicas, here - _share_starts(layout, replicas))
        arrived = np.flatnonzero(places < num_leaving)
        places = places[arrived]
        chunks = np.searchsorted(bounds, places, side="right") - 1
        sources = ring.destinations(replicas[arrived], back[chunks])
        here[arrived] = _share_starts(layout, sources) + order.rows(sources, places)
    return before


def homes_after(
    layout: Layout, homes: NDArray[np.int64], *, num_leaving: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Find where the rows of these homes stand in the epoch after: undone by ``homes_before``."""
    order = _LeavingOrder(layout, num_leaving, seed, epoch)
    ring = make_ring(layout, seed=seed, epoch=epoch)
    bounds = chunk_bounds(num_leaving)
    replicas = replica_of_home(layout, homes)
    places = order.places(replicas, homes - _share_starts(layout, replicas))
    leaves = np.flatnonzero(places < num_leaving)
    if not len(leaves):
        return homes
    places, after = places[leaves], homes.copy()
    chunks, which = np.unique(
        np.searchsorted(bounds, places, side="right") - 1, return_inverse=True
    )
    shifts = np.array([ring.shift(chunk) for chunk in chunks.tolist()], np.int64)
    receivers = ring.destinations(replicas[leaves], shifts[which])
    after[leaves] = _share_starts(layout, receivers) + order.rows(receivers, places)
    return after


@dataclass(frozen=True)
class _LeavingOrder:
    """In which order the rows of every replica's share leave after an epoch.

    All replicas share one permutation, each turned by its own random amount: a key for each replica
    would cost a call for each, and a pool's rows come from thousands of replicas.

    Attributes:
        layout: Replicas and samples.
        num_leaving: Rows that leave.
        seed: The run's seed.
        epoch: The epoch.
        is_table: Whether to lay the permutation out once, as pays for more rows than leave.
    """

    layout: Layout
    num_leaving: int
    seed: int
    epoch: int
    is_table: bool = False

    def rows(self, replicas: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the rows of the replicas' shares that leave at some places of the order."""
        sizes = _share_rows(self.layout, replicas)
        if self.is_table:
            rows = self._tables[0][places + self.num_leaving * (sizes - self._smallest)]
        else:
            rows = self._by_size(permute, places, sizes)
        return _wrap(rows + self._turns(replicas) - sizes, sizes)

    def places(self, replicas: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find when rows of the replicas' shares leave; num_leaving or more for one that stays."""
        sizes = _share_rows(self.layout, replicas)
        turned = _wrap(rows - self._turns(replicas), sizes)
        if self.is_table:
            found = self._tables[1][turned + self._smallest * (sizes - self._smallest)]
            return np.asarray(found, np.int64)
        return self._by_size(unpermute, turned, sizes)

    def _by_size(
        self,
        function: Callable[[NDArray[np.int64], int, Key], NDArray[np.int64]],
        index: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        index, sizes = np.broadcast_arrays(index, sizes)
        result = np.empty_like(index)
        for size in (self._smallest, self._smallest + 1):
            alike = np.flatnonzero(sizes == size)
            if len(alike):
                result[alike] = function(index[alike], size, self._stream)
        return result

    def back_tables(self) -> BackTables:
        """Lay out what `move_back` goes by."""
        leaving, places = self._tables
        ring = make_ring(self.layout, seed=self.seed, epoch=self.epoch)
        standing, positions = ring.tables
        bounds = chunk_bounds(self.num_leaving)
        shifts = np.repeat(ring.shifts(len(bounds) - 1), np.diff(bounds))
        larger = self.layout.num_samples % self.layout.num_replicas
        return BackTables(
            self._smallest, larger, places, leaving, self._all_turns, shifts, standing, positions
        )

    @cached_property
    def _tables(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The permutations of both sizes, one behind the other.

        Of each: the rows at the places that leave; the place of every row, num_leaving if it stays.
        """
        leaving = np.arange(self.num_leaving)
        small, large = (
            permute(leaving, size, self._stream) for size in (self._smallest, self._smallest + 1)
        )
        places = np.full(2 * self._smallest + 1, self.num_leaving)
        places[small] = leaving
        places[self._smallest + large] = leaving
        return np.concatenate([small, large]), places

    @cached_property
    def _smallest(self) -> int:
        return self.layout.num_samples // self.layout.num_replicas

    def _turns(self, replicas: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(replicas) > self.layout.num_replicas:
            return self._all_turns[replicas]
        # Drawn from a range so wide that turns are as good as uniform and independent
        stream = key(self.seed, "leaving turn", epoch=self.epoch)
        return permute(replicas, TURN_RANGE, stream) % _share_rows(self.layout, replicas)

    @cached_property
    def _all_turns(self) -> NDArray[np.int64]:
        return self._turns(np.arange(self.layout.num_replicas))

    @cached_property
    def _stream(self) -> Key:
        return key(self.seed, "leaving", epoch=self.epoch)


def _wrap(values: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bring values of [-size, size) into [0, size); cheaper than a division."""
    return values + ((values >> 63) & sizes)


def _share_starts(layout: Layout, replicas: NDArray[np.int64]) -> NDArray[np.int64]:
    """First homes of replicas' shares."""
    quotient, remainder = divmod(layout.num_samples, layout.num_replicas)
    return replicas * quotient + np.minimum(replicas, remainder)


def _share_rows(layout: Layout, replicas: NDArray[np.int64]) -> NDArray[np.int64]:
    quotient, remainder = divmod(layout.num_samples, layout.num_replicas)
    return quotient + (replicas < remainder).astype(np.int64)


def replica_of_home(layout: Layout, homes: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[...]: The replicas to whose shares these homes belong."""
    quotient, remainder = divmod(layout.num_samples, layout.num_replicas)
    # The first shares have a row more; with those rows taken off, the others are all alike
    large = remainder * (quotient + 1)
    return np.where(homes < large, homes // (quotient + 1), (homes - remainder) // quotient)


def _even_cut(num_rows: int, num_parts: int) -> NDArray[np.int64]:
    return np.arange(num_parts + 1, dtype=np.int64) * num_rows // max(1, num_parts)
