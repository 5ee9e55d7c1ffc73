"""Copies of rows move as the rows do: each rank does for the node next door what that node does.

What moves rows sees a world in which this rank is a replica of the node whose rows are copied here,
and a store that holds that node's slots. So it plans the same parcels, sent between holders.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dataio.plan.history import Scores
from dataio.plan.policies import AtHand, ExchangeContext, RowExchange, RowStore, Shuffle
from dataio.rows.parcel import ParcelBuffers
from dataio.rows.rows import Rows, RowSchema
from dataio.world import World


class NextDoor(World):
    """A world as a rank sees it that acts for a replica of the node whose rows it copies.

    For messages between two ranks only: in collective calls each rank acts for itself.

    Args:
        world: All ranks, equally many on each node.
        holders: int64[num_nodes]: Who holds a copy of each node's rows.
    """

    def __init__(self, world: World, holders: NDArray[np.int64]) -> None:
        vars(self).update(vars(world))
        self._holders = holders
        self.node = int(np.flatnonzero(holders == world.node)[0])
        self.replica = self.node * self.local_size + self.local_rank

    def rank_of_replica(self, replica: int) -> int:
        node, local_rank = divmod(replica, self.local_size)
        return super().rank_of_replica(int(self._holders[node]) * self.local_size + local_rank)


class CopyStore:
    """The copies in a node's store, by the slots of the node that owns the rows; a `RowStore`.

    Args:
        store: The node's rows.
        first_slot: Of the copies.
    """

    def __init__(self, store: RowStore, first_slot: int) -> None:
        self._store, self._first = store, first_slot

    @property
    def schema(self) -> RowSchema:
        return self._store.schema

    def lengths(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[len(slots), num_variable]: Bytes of the variable fields."""
        return self._store.lengths(slots + self._first)

    def read_rows(self, slots: NDArray[np.int64]) -> Rows:
        """Copy rows out, in the order of ``slots``."""
        return self._store.read_rows(slots + self._first)

    def read_into(self, slots: NDArray[np.int64], into: Rows) -> None:
        """Copy rows to where there is room for rows of their lengths."""
        self._store.read_into(slots + self._first, into)

    def write_arrivals(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write copies that live in ``slots`` from the next epoch on."""
        self._store.write_arrivals(slots + self._first, rows)

    def keep_rows(self, slots: NDArray[np.int64], *, held_in: NDArray[np.int64]) -> None:
        """Let the copies of ``held_in`` live in ``slots`` from the next epoch on."""
        self._store.keep_rows(slots + self._first, held_in=held_in + self._first)


class WithCopies:
    """An exchange of rows and, beside it, that of the copies; an `RowExchange`.

    Args:
        rows: Of the rows that this rank owns.
        copies: Of those that it copies; they have no scores.
    """

    def __init__(self, rows: RowExchange, copies: RowExchange) -> None:
        self._rows, self._copies = rows, copies

    def progress(self, step: int) -> None:
        """Send and take in what is due by this step. Never blocks."""
        self._rows.progress(step)
        self._copies.progress(step)

    def stop(self) -> None:
        """Let go after an error, without the other ranks."""
        self._rows.stop()
        self._copies.stop()

    def finish(self, scores: Scores | None) -> dict[str, float]:
        """Complete both; the figures are those of both together."""
        rows, copies = self._rows.finish(scores), self._copies.finish(None)
        both = {name: rows[name] + copies[name] for name in rows}
        return both | {"overlap_fraction": both["overlap_fraction"] / 2}


def begin_with_copies(
    shuffle: Shuffle,
    context: ExchangeContext,
    *,
    holders: NDArray[np.int64],
    first_slot: int,
    first_tag: int,
) -> RowExchange | None:
    """Start an epoch's exchange, of rows and of copies.

    Args:
        shuffle: Decides which row goes where.
        context: Of the rows that this rank owns.
        holders: int64[num_nodes]: Who holds a copy of each node's rows.
        first_slot: Of the copies on this node.
        first_tag: Of the copies' own channel.
    """
    next_door, ranks = NextDoor(context.world, holders), context.world.topology.ranks_of_node
    holder, copied = ranks[holders[context.world.node]], ranks[next_door.node]
    rows = shuffle.begin(replace(context, at_hand=AtHand(holder, copied, first_slot)))
    copies = shuffle.begin(
        replace(
            context,
            world=next_door,
            store=CopyStore(context.store, first_slot),
            first_tag=first_tag,
            buffers=ParcelBuffers(),
            # The node whose rows these are has owned what goes there; the holder copies this one's.
            at_hand=AtHand(copied, holder, -first_slot),
        )
    )
    return None if rows is None or copies is None else WithCopies(rows, copies)
