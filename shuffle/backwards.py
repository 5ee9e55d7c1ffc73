"""Trace many rows back through an epoch's exchange at once, by tables of all replicas. Pure.

What `plan.homes_before` finds row by row, in a few passes over small numbers: each table fits a
core's cache, and only rows that arrived are looked at further.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 15
"""Rows traced at once: what stays in a core's cache."""

MOST_ROWS = 1 << 28
"""Of a share: four times as many are numbers of 32 bits."""


@dataclass(frozen=True)
class BackTables:
    """One epoch's exchange.

    A share has ``smallest`` rows, or one more; below, the tables of both sizes stand one behind the
    other.

    Attributes:
        smallest: Rows of a smaller share.
        num_larger: Replicas whose shares have one row more: the first ones.
        places: integer[2 * smallest + 1]: When each row leaves, ``num_leaving`` if it stays.
        leaving: int64[2 * num_leaving]: The rows that leave, in their order.
        rotations: int64[num_replicas]: How far each order is rotated, in [0, rows of its replica).
        shifts: int64[num_leaving]: How many places on in the ring each leaving row goes, in
            (0, num_replicas).
        standing: int64[num_replicas]: Replicas in the order of the ring.
        positions: int64[num_replicas]: Where each replica stands in it.
    """

    smallest: int
    num_larger: int
    places: NDArray[np.int64]
    leaving: NDArray[np.int64]
    rotations: NDArray[np.int64]
    shifts: NDArray[np.int64]
    standing: NDArray[np.int64]
    positions: NDArray[np.int64]


def move_back(tables: BackTables, replicas: NDArray[np.int32], rows: NDArray[np.int32]) -> None:
    """Replace places of rows by those where they stood before the exchange brought them there.

    Args:
        tables: Of the exchange.
        replicas: int32[n]: In whose share each row is.
        rows: int32[n]: Which row of the share it is.
    """
    smallest, larger, num_replicas = tables.smallest, tables.num_larger, len(tables.rotations)
    num_leaving = len(tables.shifts)
    narrow = np.int16 if num_leaving < 1 << 15 else np.int32
    small, large = (
        tables.places[:smallest].astype(narrow), tables.places[smallest:].astype(narrow)
    )  # fmt: skip
    # A row and the rotation of its replica wrap around the share: each order stands there twice
    places = np.concatenate([small, small, large, large])
    sizes = np.full(num_replicas, smallest)
    sizes[:larger] += 1
    starts = np.where(np.arange(num_replicas) < larger, 2 * smallest, 0)
    bases = (starts + (sizes - tables.rotations) % sizes).astype(np.int32)
    rotations = (tables.rotations - sizes).astype(np.int32)
    leaving = tables.leaving.astype(np.int32)
    backs = (num_replicas - tables.shifts).astype(np.int32)
    standing = np.concatenate([tables.standing, tables.standing]).astype(np.int32)
    positions = tables.positions.astype(np.int32)
    for start in range(0, len(rows), BLOCK):
        held_by, row = replicas[start : start + BLOCK], rows[start : start + BLOCK]
        place = places.take(bases.take(held_by) + row)
        arrived = np.flatnonzero(place < num_leaving)
        place = place[arrived]
        source = standing.take(positions.take(held_by[arrived]) + backs.take(place))
        is_larger = source < larger
        found = leaving.take(place + num_leaving * is_larger) + rotations.take(source)
        # Of [-size, size) into [0, size)
        found += (found >> 31) & (smallest + is_larger)
        held_by[arrived], row[arrived] = source, found
