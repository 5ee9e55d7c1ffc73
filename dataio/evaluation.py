"""A dataset to evaluate on: every sample exactly once, in the same order each time."""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dataio.batch.deliver import Delivery
from dataio.batch.gather import Gather
from dataio.batch.values import Batch, BatchTransform, Collate, OnError, Transform
from dataio.cache.files.reader import Verify
from dataio.iterations import OneLoop
from dataio.options import Reports, Staging, Workers
from dataio.plan.order import PADDING, Block, Order, num_steps
from dataio.plan.placement import Placement
from dataio.pool.pool import Pool, lay_out
from dataio.rows.fields import Field
from dataio.source.base import Source, place_of
from dataio.world import World


@dataclass(frozen=True, kw_only=True)
class Transforms:
    """What is made of the samples of an evaluation; see `Loader`.

    Attributes:
        transform: Changes a sample; its randomness is that of epoch 0, in every pass.
        batch_transform: Changes a batch.
        collate: Makes a batch of a list of samples.
    """

    transform: Transform | None = None
    batch_transform: BatchTransform | None = None
    collate: Collate | None = None


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
        staging: Staging,
        workers: Workers,
        reports: Reports,
        verify: Verify,
        on_error: OnError,
        delivery: Delivery,
        seed: int = 0,
        transforms: Transforms,
    ) -> None:
        self.num_samples = source.num_samples
        layout = lay_out(source, world)
        pool_rows = layout.pool_rows(world.node)
        first = layout.pool_start(world.node)
        wanted = Placement(
            f"evaluation from {first}", 0, pool_rows, lambda: first + np.arange(pool_rows)
        )
        self._pool = Pool(
            source,
            fields,
            world=world,
            root=root,
            num_slots=pool_rows,
            num_leaving=0,
            purpose="evaluation",
            progress=reports.progress,
            wanted=wanted,
            foreign=foreign,
            readers=staging.readers,
            bandwidth=staging.bytes_per_s,
            check=staging.check,
            skips=on_error == "skip",
        )
        try:
            self._pool.ensure(wanted)
        except BaseException:
            self._pool.close()
            raise
        start, stop = layout.share_slots(world.replica)
        self._order = Order(
            range(start, stop),
            None,
            np.array([stop - start]),
            0,
            batch_size,
            num_steps(np.array([layout.share_rows(0)]), batch_size),
        )
        self._gather = Gather(
            self._pool.cache,
            fields,
            num_threads=workers.num_threads(local_size=world.local_size),
            # Without a transform of its own there is nothing that would hold the interpreter.
            num_processes=workers.processes if transforms.transform is not None else 0,
            transform=transforms.transform,
            batch_transform=transforms.batch_transform,
            collate=transforms.collate,
            seed=seed,
            replica=world.replica,
            prefetch=workers.prefetch,
            timeout_s=world.timeout_s,
            verify=verify,
            on_error=on_error,
            pinned=delivery.pinned,
            place_of=partial(place_of, source),
            begin=self._pool.raise_refused,
            trusts_pictures=staging.check == "none",
        )
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
        return self._passes.loop(self._batches())

    def _batches(self) -> Generator[Batch, None, None]:
        batches = self._gather.batches(self._block, range(len(self)), epoch=0)
        for batch in self._delivery(batches):
            # A collate may return something else.
            if isinstance(batch, dict):
                batch |= {"valid": batch["slot"] != PADDING}
            yield batch

    def _block(self, first_step: int, num_steps: int) -> Block:
        slots, num_valid = self._order.block(first_step, num_steps)
        weight = (np.arange(slots.shape[1]) < num_valid[:, None]).astype(np.float32)
        return Block(slots, num_valid, weight)

    @property
    def source_bytes(self) -> int:
        """Bytes that this rank read from the source."""
        return self._pool.source.bytes_read

    def close(self) -> None:
        """Stop threads and release the cache; idempotent."""
        self._gather.close()
        self._pool.close()
