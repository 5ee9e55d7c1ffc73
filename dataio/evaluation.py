"""A dataset to evaluate on: every sample exactly once, in the same order each time."""

from collections.abc import Generator, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from dataio.arguments import Arguments
from dataio.batch.feed import DeviceDelivery
from dataio.iterations import Loop, OneLoop
from dataio.plan.layout import Layout
from dataio.plan.order import PADDING, Order, StepsBlock, num_steps
from dataio.rows.fields import Field
from dataio.rows.samples import Batch
from dataio.session import Session
from dataio.source.base import Source
from dataio.store.open import NodeRows
from dataio.store.share import consecutive, lay_out
from dataio.world import World


class Evaluation:
    """Batches of this replica's part, equally many on every replica; made by `Loader.evaluation`.

    A batch is a training batch plus ``valid`` bool[batch]: False on rows that only keep the shape.
    Counting the valid rows of all replicas counts every sample once. The randomness of a transform
    is that of epoch 0, in every pass.

    Args:
        source: The dataset.
        fields: What is kept of a sample, as rows are stored.
        arguments: Those of the loader, but for what an evaluation has of its own.
        world: All ranks.
        root: The directory of caches.
        delivery: Takes batches to the device.
    """

    def __init__(
        self,
        source: Source,
        fields: Mapping[str, Field],
        arguments: Arguments,
        world: World,
        *,
        root: Path,
        delivery: DeviceDelivery,
    ) -> None:
        self.num_samples, self.batch_size = source.num_samples, arguments.batch_size
        layout = lay_out(source, world)
        share = consecutive(layout, node=world.node, named="evaluation", purpose="evaluation")
        rows = NodeRows(source, fields, share, arguments, world, root)
        self._session = Session(rows, pinned=delivery.pinned)
        try:
            assert share.wanted is not None
            self._session.pool.ensure(share.wanted)
        except BaseException:
            self._session.close()
            raise
        self._order = _order(layout, world.replica, arguments.batch_size)
        self._delivery = delivery
        self._passes = OneLoop("Evaluation")

    def __len__(self) -> int:
        """Count the batches, the same on every replica."""
        return self._order.steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches.

        Raises:
            StateError: From ``next``, if another loop has begun since.
        """
        return Loop(self._passes, self._batches(self._order))

    def batches_of(self, replica: int, *, num_replicas: int) -> Iterator[Batch]:
        """Yield the batches that one of so many replicas would have. In a world of one process."""
        layout = Layout((num_replicas,), self.num_samples)
        order = _order(layout, replica, self.batch_size)
        return Loop(self._passes, self._batches(order))

    def _batches(self, order: Order) -> Generator[Batch, None, None]:
        block = partial(_block, order)
        batches = self._session.gather.batches(block, range(order.steps), epoch=0)
        for batch in self._delivery(batches):
            # A collate may return something else.
            if isinstance(batch, dict):
                batch |= {"valid": batch["slot"] != PADDING}
            yield batch

    @property
    def source_bytes(self) -> int:
        """Bytes that this rank read from the source."""
        return self._session.source.bytes_read

    def close(self) -> None:
        """Stop threads and release the cache; idempotent."""
        self._session.close()


def _order(layout: Layout, replica: int, batch_size: int) -> Order:
    start, stop = layout.share_slots(replica)
    steps = num_steps(np.array([layout.share_rows(0)]), batch_size)
    return Order(range(start, stop), None, np.array([stop - start]), 0, batch_size, steps)


def _block(order: Order, first_step: int, num_steps: int) -> StepsBlock:
    slots, num_valid = order.block(first_step, num_steps)
    weight = (np.arange(slots.shape[1]) < num_valid[:, None]).astype(np.float32)
    return StepsBlock(slots, num_valid, weight)
