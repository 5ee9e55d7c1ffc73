"""Which rows leave, in which chunk, and where every row came from.

A *home* numbers the slots of all pools in one row: ``pool_start(node) + slot``. Before any
exchange home h holds sample h, so following a home back to epoch 0 names the sample in it.

Who sends what to whom depends neither on the number of steps nor on the size of a row: a run that
was resumed, or whose batches changed, traces to the same samples.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataio.layout import Layout
from dataio.permutation import permute, unpermute
from dataio.seeding import key
from shuffle.ring import make_ring

MAX_CHUNKS = 16
"""Different partners that a replica sends to in an epoch, at most."""

MAX_PARCEL_BYTES = 64 * 2**20

TURN_RANGE = 2**60


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
    return math.floor(Fraction(str(exchange)) * (layout.num_samples // layout.num_replicas))


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
    places = np.arange(num_leaving)
    replicas = np.full(num_leaving, replica)
    return start + _leaving_order(layout, replicas, places, seed=seed, epoch=epoch)


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
    leaving = num_leaving(layout, exchange)
    homes = layout.pool_start(node) + found
    for past in reversed(range(first_epoch, epoch) if leaving else range(0)):
        homes = _homes_before(layout, homes, num_leaving=leaving, seed=seed, epoch=past)
    return homes


def _homes_before(
    layout: Layout, homes: NDArray[np.int64], *, num_leaving: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Find where the rows of these homes stood during the epoch before they came there."""
    replicas = replica_of_home(layout, homes)
    starts, _ = _shares(layout, replicas)
    places = _leaving_order(layout, replicas, homes - starts, seed=seed, epoch=epoch, inverse=True)
    arrived = np.flatnonzero(places < num_leaving)
    places = places[arrived]
    bounds = chunk_bounds(num_leaving)
    chunks = np.searchsorted(bounds, places, side="right") - 1
    ring = make_ring(layout, seed=seed, epoch=epoch)
    sources = ring.destinations(replicas[arrived], -ring.shifts(len(bounds) - 1)[chunks])
    before = homes.copy()
    before[arrived] = _shares(layout, sources)[0] + _leaving_order(
        layout, sources, places, seed=seed, epoch=epoch
    )
    return before


def _leaving_order(
    layout: Layout,
    replicas: NDArray[np.int64],
    places: NDArray[np.int64],
    *,
    seed: int,
    epoch: int,
    inverse: bool = False,
) -> NDArray[np.int64]:
    """Map places in the order of leaving to rows of the replica's share, or back, one by one.

    All replicas share one permutation, each turned by its own random amount: a key for each
    replica would cost a call for each, and a pool's rows come from thousands of replicas.
    """
    _, sizes = _shares(layout, replicas)
    # Drawn from a range so wide that turns are as good as uniform and independent
    turns = permute(replicas, TURN_RANGE, key(seed, "leaving turn", epoch=epoch)) % sizes
    stream = key(seed, "leaving", epoch=epoch)
    result = (places - turns) % sizes if inverse else places.copy()
    smallest = layout.num_samples // layout.num_replicas
    for size in (smallest, smallest + 1):
        alike = np.flatnonzero(sizes == size)
        result[alike] = (unpermute if inverse else permute)(result[alike], size, stream)
    return result if inverse else (result + turns) % sizes


def _shares(
    layout: Layout, replicas: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the first home and the number of rows of replicas' shares."""
    quotient, remainder = divmod(layout.num_samples, layout.num_replicas)
    return replicas * quotient + np.minimum(replicas, remainder), quotient + (replicas < remainder)


def replica_of_home(layout: Layout, homes: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[...]: The replicas to whose shares these homes belong."""
    quotient, remainder = divmod(layout.num_samples, layout.num_replicas)
    # The first shares have a row more; with those rows taken off, the others are all alike
    large = remainder * (quotient + 1)
    return np.where(homes < large, homes // (quotient + 1), (homes - remainder) // quotient)


def _even_cut(num_rows: int, num_parts: int) -> NDArray[np.int64]:
    return np.arange(num_parts + 1, dtype=np.int64) * num_rows // max(1, num_parts)
