"""Visible slots -> batches of slots, equally many on every replica.

A *deck* is a set of rows dealt out together: a node's pool to the node's replicas, or, where every
node holds all rows, the dataset to all replicas. It is shuffled by one keyed permutation and cut
into one run a replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.permutation import permute
from dataio.seeding import Key

PADDING = -1
"""``slot`` and ``sample_id`` of a batch's rows that only keep its shape."""


@dataclass(frozen=True)
class BatchSlots:
    """One batch of one replica.

    Attributes:
        slots: int64[batch]: Rows to read; padding repeats rows of the same replica.
        num_valid: The first this many are trained on; the rest is padding.
    """

    slots: NDArray[np.int64]
    num_valid: int


class Block(NamedTuple):
    """The batches of some steps of one replica.

    Attributes:
        slots: int64[steps, batch]: Rows to read; padding repeats rows of the same replica.
        num_valid: int64[steps]: The first this many of a batch are trained on.
        weight: float32[steps, batch]: As delivered, padding 0.
    """

    slots: NDArray[np.int64]
    num_valid: NDArray[np.int64]
    weight: NDArray[np.float32]


@dataclass(frozen=True)
class Order:
    """The batches of one replica in one epoch: any of them, in any order, as a function call.

    Attributes:
        visible: int64[num_visible]: Slots of the deck, ascending.
        stream: Key of the deck's permutation in this epoch; None keeps slot order.
        dealt: int64[replicas of the deck]: Rows that each of its replicas gets, in turn.
        turn: This replica's place among them.
        batch_size: Rows a batch.
        steps: Batches of the epoch, the same on every replica of the job.
    """

    visible: NDArray[np.int64]
    stream: Key | None
    dealt: NDArray[np.int64]
    turn: int
    batch_size: int
    steps: int

    @cached_property
    def _first(self) -> int:
        return int(self.dealt[: self.turn].sum())

    @property
    def num_rows(self) -> int:
        """Rows that this replica trains on in the epoch."""
        return int(self.dealt[self.turn])

    def batch(self, step: int) -> BatchSlots:
        """Find the rows of one step.

        Args:
            step: In [0, steps).
        """
        start = step * self.batch_size
        num_valid = min(max(self.num_rows - start, 0), self.batch_size)
        # int64[batch]: places within the replica's run; past its end it starts over, as padding
        places = np.arange(start, start + self.batch_size) % max(self.num_rows, 1)
        return BatchSlots(self.slots_at(places), num_valid)

    def block(self, first_step: int, num_steps: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the rows of some steps at once: a fraction of the cost of one by one.

        Returns:
            int64[num_steps, batch] slots and int64[num_steps] valid rows, as `batch` gives them.
        """
        first = first_step * self.batch_size
        places = np.arange(first, first + num_steps * self.batch_size)
        num_valid = np.clip(self.num_rows - places[:: self.batch_size], 0, self.batch_size)
        if len(places) and places[-1] >= self.num_rows:
            places %= max(self.num_rows, 1)
        slots = self.slots_at(places)
        return slots.reshape(num_steps, self.batch_size), num_valid

    def slots_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots at some places of this replica's run, each in [0, num_rows)."""
        if self.num_rows == 0:
            return np.full(len(places), self.visible[0] if len(self.visible) else 0)
        index = places + self._first
        if self.stream is not None:
            index = permute(index, len(self.visible), self.stream)
        return self.visible[index]


def deal(num_rows: int, num_replicas: int) -> NDArray[np.int64]:
    """Cut a deck evenly: int64[num_replicas], floor or ceil, the larger parts first."""
    quotient, remainder = divmod(num_rows, num_replicas)
    return quotient + (np.arange(num_replicas) < remainder).astype(np.int64)


def deal_all(num_rows: NDArray[np.int64], replicas: Sequence[int]) -> NDArray[np.int64]:
    """Cut all decks evenly: int64[all replicas], each deck's as `deal` would."""
    width = np.asarray(replicas, np.int64)
    quotient, remainder = num_rows // width, num_rows % width
    turn = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
    return np.repeat(quotient, width) + (turn < np.repeat(remainder, width))


def num_steps(most_rows: int, batch_size: int) -> int:
    """Steps that the replica with the most rows needs."""
    return -(-most_rows // batch_size)


def top_up(
    num_visible: NDArray[np.int64],
    num_owned: NDArray[np.int64],
    replicas: Sequence[int],
    *,
    batch_size: int,
) -> NDArray[np.int64]:
    """Count the rows that each deck shows when steps that someone needs are filled everywhere.

    Args:
        num_visible: int64[num_decks]: Rows that the policy left visible.
        num_owned: int64[num_decks]: Rows of the decks.
        replicas: Replicas that each deck is dealt to.
        batch_size: Rows a batch.

    Returns:
        int64[num_decks]: At least ``num_visible``; as many more as fill the last steps, while there
        are any.
    """
    width = np.asarray(replicas, np.int64)
    steps = num_steps(int((-(-num_visible // width)).max()), batch_size)
    return np.minimum(num_owned, np.maximum(num_visible, steps * batch_size * width))


def valid_rows(
    dealt: NDArray[np.int64], step: int | NDArray[np.int64], batch_size: int
) -> NDArray[np.int64]:
    """Count the rows that all replicas together train on in a step, or in each of some.

    Args:
        dealt: int64[num_replicas]: Rows of every replica of the job.
        step: int64[...].
        batch_size: Rows a batch.
    """
    first = np.asarray(step)[..., None] * batch_size
    return np.asarray(np.clip(dealt - first, 0, batch_size).sum(axis=-1), np.int64)
