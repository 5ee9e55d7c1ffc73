"""A dataset to evaluate on: every sample exactly once, in the same order each time."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from dataio.fields import Field
from dataio.gather import Batch, Gather
from dataio.order import Order, num_steps
from dataio.pool import Pool, lay_out
from dataio.prefetch import Prefetcher
from dataio.source.base import Source
from dataio.world import World


class Evaluation:
    """Batches of this replica's part, equally many on every replica; made by `Loader.evaluation`.

    A batch is a training batch plus ``valid`` bool[batch]: False on rows that only keep the shape.
    Counting the valid rows of all replicas counts every sample once.
    """

    def __init__(
        self,
        source: Source,
        fields: Mapping[str, Field],
        *,
        batch_size: int,
        world: World,
        root: Path,
        foreign: bool = False,
        num_threads: int,
        prefetch: int,
        progress: bool,
        deliver: Callable[[Batch], Batch],
    ) -> None:
        self.num_samples = source.num_samples
        layout = lay_out(source, world)
        pool_rows = layout.pool_rows(world.node)
        first = layout.pool_start(world.node)
        wanted = np.arange(first, first + pool_rows)
        self._pool = Pool(
            source,
            fields,
            world=world,
            root=root,
            num_slots=pool_rows,
            num_leaving=0,
            purpose="evaluation",
            progress=progress,
            wanted=wanted,
            uses_scores=False,
            foreign=foreign,
        )
        try:
            self._pool.ensure(wanted, epoch=0)
        except BaseException:
            self._pool.close()
            raise
        start, stop = layout.share_slots(world.replica)
        self._order = Order(
            np.arange(start, stop),
            None,
            np.array([stop - start]),
            0,
            batch_size,
            num_steps(layout.share_rows(0), batch_size),
        )
        self._gather = Gather(self._pool.cache, fields, num_threads=num_threads)
        self._depth = prefetch if num_threads else 0
        self._timeout_s = world.timeout_s
        self._deliver = deliver

    def __len__(self) -> int:
        """Count the batches, the same on every replica."""
        return self._order.steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches."""
        batches = Prefetcher(
            self._batch, range(len(self)), depth=self._depth, timeout_s=self._timeout_s
        )
        try:
            for batch in batches:
                yield self._deliver(batch)
        finally:
            batches.close()

    def _batch(self, step: int) -> Batch:
        chosen = self._order.batch(step)
        valid = np.arange(len(chosen.slots)) < chosen.num_valid
        batch = self._gather.batch(chosen, epoch=0, step=step, weight=valid.astype(np.float32))
        return batch | {"valid": torch.from_numpy(valid)}

    @property
    def source_bytes(self) -> int:
        """Bytes that this rank read from the source."""
        return self._pool.source.bytes_read

    def close(self) -> None:
        """Stop threads and release the cache; idempotent."""
        self._gather.close()
        self._pool.close()
