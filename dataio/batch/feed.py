"""Steps to batches: rows brought in window by window, gathered, delivered, and waits measured."""

import time
from collections.abc import Callable, Iterator

from torch.autograd import profiler
from torch.profiler import record_function

from dataio.batch.deliver import Delivery, taken_ahead
from dataio.batch.figures import Figures
from dataio.batch.gather import Gather
from dataio.batch.lookup import Pick
from dataio.plan.epoch import EpochPlan
from dataio.plan.order import Block, Order
from dataio.rows.samples import Batch
from dataio.store.pool import Pool


class Feed:
    """Delivers the batches of some steps, made ahead of them.

    Args:
        pool: Has the rows, or brings them in ahead of their batches.
        gather: Makes batches.
        delivery: Takes them to the device.
        figures: What is waited for is added to them.
        take: Called with each batch before the one in front of it is delivered; None: nothing is.
    """

    def __init__(
        self,
        pool: Pool,
        gather: Gather,
        delivery: Delivery,
        *,
        figures: Figures,
        take: Callable[[Batch], None] | None = None,
    ) -> None:
        self._pool = pool
        self._gather = gather
        self._delivery = delivery
        self._figures = figures
        self.take = take

    def training(self, plan: EpochPlan, steps: range, *, epoch: int) -> Iterator[Batch]:
        """Yield the training batches of some steps; amid staging, each when its rows are there.

        Args:
            plan: The epoch's batches.
            steps: Which.
            epoch: The running epoch.
        """

        def pick(first_step: int, num_steps: int) -> Block:
            if not self._pool.is_staging:
                return plan.block(first_step, num_steps)
            # Rows come in as they are trained: what is not asked for yet is not waited for.
            block = plan.block(first_step, 1)
            self._pool.await_rows(block.slots[0])
            return block

        return self.batches(pick, plan.order, steps, epoch=epoch)

    def batches(self, pick: Pick, order: Order, steps: range, *, epoch: int) -> Iterator[Batch]:
        """Yield the batches of some steps.

        Args:
            pick: Finds the rows and weights of steps.
            order: Their order.
            steps: Which.
            epoch: The running epoch.
        """
        # One run, unless a quota keeps some rows out of the cache.
        runs = self._pool.windows(lambda first, count: order.block(first, count)[0], steps)
        try:
            started = time.perf_counter()
            for run in runs:
                batches = self._delivery(self._gather.batches(pick, run, epoch=epoch))
                if self.take is not None:
                    batches = taken_ahead(batches, self.take)
                for step in run:
                    batch = _next(batches)
                    waited_s = time.perf_counter() - started
                    self._figures.add_batch(waited_s, order.num_valid(step))
                    delivered = time.perf_counter()
                    yield batch
                    started = time.perf_counter()
                    self._figures.add_step(started - delivered)
        finally:
            self._gather.stop()
            runs.close()

    def stop(self) -> None:
        """Stop making batches ahead."""
        self._gather.stop()
        self._pool.close_windows()


def _next(batches: Iterator[Batch]) -> Batch:
    if not profiler._is_profiler_enabled:
        return next(batches)
    with record_function("tonari: wait for a batch"):
        return next(batches)
