"""Steps to batches: rows brought in window by window, gathered, delivered, and waits measured."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from dataio.base.errors import StateError
from dataio.batch.figures import Figures
from dataio.batch.gather import Gather
from dataio.batch.lookup import Pick
from dataio.plan.epoch import EpochPlan
from dataio.plan.order import Order, StepsBlock
from dataio.rows.samples import Batch
from dataio.store.pool import Pool


class DeviceDelivery:
    """Copies batches to a GPU on a stream of its own, from pinned buffers; on a CPU it is nothing.

    A copy is ordered before the work that follows it by an event, never by waiting. The pinned
    buffers of a batch are let go, and so come back to their ring, when its event is done.

    Args:
        device: Where batches go; None leaves them as they are.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type != "cpu" else None
        self._stream: torch.cuda.Stream | None = None
        self._copying: deque[tuple[Batch, torch.cuda.Event]] = deque()

    @property
    def pinned(self) -> bool:
        """Whether batches should be made in pinned memory."""
        return self._device is not None and self._device.type == "cuda"

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Deliver batches, each copied while the one before it is used."""
        if self._device is None:
            return batches
        return self._copied(batches) if self.pinned else map(self._moved, batches)

    def _moved(self, batch: Batch) -> Batch:
        assert self._device is not None
        return _each(batch, self._device, non_blocking=False)

    def _copied(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        under_way: deque[tuple[Batch, torch.cuda.Event]] = deque()
        for batch in batches:
            under_way.append(self._begin(batch))
            del batch
            if len(under_way) > 1:
                yield self._end(*under_way.popleft())
        while under_way:
            yield self._end(*under_way.popleft())

    def _begin(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        assert self._device is not None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        while self._copying and self._copying[0][1].query():  # type: ignore[no-untyped-call]
            self._copying.popleft()
        with torch.cuda.stream(self._stream):
            copied = _each(batch, self._device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        self._copying.append((batch, done))
        return copied, done

    def _end(self, batch: Batch, done: torch.cuda.Event) -> Batch:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(done)
        for value in _tensors(batch):
            # Or its memory would be given away while this stream still reads it.
            value.record_stream(stream)
        return batch


def taken_ahead(batches: Iterator[Batch], take: Callable[[Batch], None]) -> Iterator[Batch]:
    """Yield batches, each once the next one was taken, or there is none.

    So what ``take`` begins goes on while the batch before is trained. It comes before the loader
    counts: what was taken and not yielded is no step of the epoch, and is taken again by whoever
    goes on with it.

    Args:
        batches: In order.
        take: Called with each of them once, in order.
    """
    before: Batch | None = None
    for batch in batches:
        take(batch)
        if before is not None:
            yield before
        before = batch
        del batch
    if before is not None:
        yield before


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        yield from value


def _each(batch: Batch, device: torch.device, *, non_blocking: bool) -> Batch:
    return {name: _to(value, device, non_blocking) for name, value in batch.items()}


def _to(value: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    # Fields without a tensor form are lists, of bytes or of 1-D tensors.
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [part.to(device, non_blocking=non_blocking) for part in value]
    return value


class BatchFeed:
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
        delivery: DeviceDelivery,
        *,
        figures: Figures,
        take: Callable[[Batch], None] | None = None,
    ) -> None:
        self._pool = pool
        self._gather = gather
        self._delivery = delivery
        self._figures = figures
        self.take = take
        self._awaited_s = 0.0

    def _spent(self) -> dict[str, float]:
        """Say what batches were blocked on, and what making them took: see `WaitCauses.add`."""
        source_s = self._pool.streamed.wait_s + self._awaited_s
        return {**self._gather.spent_s, "source": source_s}

    def training(self, plan: EpochPlan, steps: range, *, epoch: int) -> Iterator[Batch]:
        """Yield the training batches of some steps; amid staging, each when its rows are there.

        Args:
            plan: The epoch's batches.
            steps: Which.
            epoch: The running epoch.
        """

        def pick(first_step: int, num_steps: int) -> StepsBlock:
            if not self._pool.is_staging:
                return plan.block(first_step, num_steps)
            # Rows come in as they are trained: what is not asked for yet is not waited for.
            block, started = plan.block(first_step, 1), time.perf_counter()
            self._pool.await_rows(block.slots[0])
            self._awaited_s += time.perf_counter() - started
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
                    if batch is None:
                        raise StateError(
                            "Loader: it was closed while its loop waited for a batch, as by a "
                            "signal's handler; leave the loop first, and close it then"
                        )
                    waited_s = time.perf_counter() - started
                    self._figures.add_batch(waited_s, order.num_valid(step), self._spent)
                    delivered = time.perf_counter()
                    yield batch
                    started = time.perf_counter()
                    self._figures.steps.add(started - delivered)
        finally:
            self._gather.stop()
            runs.close()

    def stop(self) -> None:
        """Stop making batches ahead."""
        self._gather.stop()
        self._pool.close_windows()


def is_profiling() -> bool:
    """Say whether marks in a profile are seen by anybody.

    The one thing that the data layer takes from inside torch, apart from ``tonari/trainer/private``
    as it works without the trainer. Why: a mark takes some microseconds a batch where nobody
    profiles, too. Public instead: none.
    """
    return profiler._is_profiler_enabled


def _next(batches: Iterator[Batch]) -> Batch | None:
    if not is_profiling():
        return next(batches, None)
    with record_function("tonari: wait for a batch"):
        return next(batches, None)
