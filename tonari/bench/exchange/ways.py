"""Ways of getting fresh samples: our loader, one message a sample, and reading a shared file again.

The two that are not ours are small and as fast as they can be: no process of their own, no pickle,
a batch read ahead. Contents are a function of the seed.
"""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dataio import Array, ExchangeError, Field, Int, Loader, Reports, Throttle, Workers, World
from dataio.base.seeding import generator, key
from dataio.plan.history import Scores
from dataio.plan.policies import ExchangeContext, Shuffle
from dataio.rows.parcel import pack_parcel, parcel_bytes, unpack_parcel
from dataio.world import Request
from shuffle.plan import leaving_slots
from shuffle.policies import Partial
from shuffle.schedule import plan_legs
from tonari.bench.exchange.task import ExchangeTask
from tonari.bench.generated import Generated

NO_FIGURES: Mapping[str, float] = {
    "exchanged_bytes": 0, "exchange_messages": 0, "exchange_blocked_s": 0.0,
    "exchange_overlap_fraction": 0.0,
}  # fmt: skip


class ExchangeWay(Protocol):
    """Delivers one rank's epochs."""

    def epoch(self) -> Iterator[NDArray[np.int64]]:
        """Yield the sample ids of each batch, whose bytes are in memory by then."""
        ...

    def end_epoch(self) -> None:
        """End the epoch and begin the next one. Collective."""
        ...

    def figures(self) -> Mapping[str, float]:
        """Totals so far, by the names of ``Loader.stats``."""
        ...

    def close(self) -> None: ...


class Loaded:
    """Our loader, with any shuffle. Construction is collective; the first epoch begins."""

    def __init__(self, task: ExchangeTask, world: World, shuffle: Shuffle, name: str) -> None:
        num_samples = task.rows_per_rank * world.world_size
        fields: dict[str, Field] = {"x": Array("x", (task.row_bytes,), "uint8"), "y": Int("label")}
        self._loader = Loader(
            Generated(name, num_samples, task.row_bytes),
            batch_size=task.batch_size,
            fields=fields,
            cache=Path(task.cache) / name,
            shuffle=shuffle,
            world=world,
            workers=Workers(threads=1),
            seed=task.seed,
            reports=Reports(progress=False),
        )
        # The last epoch of a run exchanges nothing: it is never reached.
        self._epochs = self._loader.epochs(2**31)
        next(self._epochs)

    def epoch(self) -> Iterator[NDArray[np.int64]]:
        for batch in self._loader:
            yield batch["sample_id"].numpy()

    def end_epoch(self) -> None:
        next(self._epochs)

    def figures(self) -> Mapping[str, float]:
        return self._loader.stats()

    def close(self) -> None:
        self._loader.close()


@dataclass(frozen=True)
class OneByOne(Partial):
    """The same rows as `Partial`, each requested and sent in messages of its own."""

    def begin(self, context: ExchangeContext) -> "Gets | None":
        """Spread the samples evenly over the epoch's steps."""
        leaving = self.num_leaving(context.layout)
        if leaving == 0:
            return None
        replica = context.world.replica
        slots = leaving_slots(
            context.layout,
            replica=replica,
            num_leaving=leaving,
            seed=context.seed,
            epoch=context.epoch,
        )
        legs = plan_legs(
            context.layout,
            replica=replica,
            num_leaving=leaving,
            seed=context.seed,
            epoch=context.epoch,
            steps=context.steps,
            mean_row_bytes=context.mean_row_bytes,
            first_tag=context.first_tag,
        )
        counts = [leg.stop - leg.start for leg in legs]
        ranks = [context.world.rank_of_replica(leg.source) for leg in legs]
        dests = [context.world.rank_of_replica(leg.dest) for leg in legs]
        return Gets(context, slots, np.repeat(ranks, counts), np.repeat(dests, counts))


class Gets:
    """Fetch one sample after the other by a request and an answer; an `Exchange`.

    All ranks work through their lists in the same order: the rank that is furthest behind is
    answered by one that has nothing older to serve, so no ranks wait for each other in a circle.
    """

    def __init__(
        self, context: ExchangeContext, slots: NDArray[np.int64], sources: NDArray[np.int64],
        dests: NDArray[np.int64],
    ) -> None:  # fmt: skip
        self._context, self._slots, self._sources, self._dests = context, slots, sources, dests
        steps = max(len(context.steps), 1)
        self._steps = context.steps.start + np.arange(len(slots)) * steps // len(slots)
        self._got = self._served = self._sent_bytes = 0
        self._question: tuple[Request, NDArray[np.uint8]] | None = None
        self._answer: tuple[Request, NDArray[np.uint8]] | None = None
        self._sending: list[Request] = []

    def progress(self, step: int) -> None:
        """Fetch what is due before this step. Blocks for the partners, as a plain get does."""
        self._move(int(np.searchsorted(self._steps, step, side="right")))

    def stop(self) -> None:
        """Let go: nothing of it runs between two calls."""

    def finish(self, scores: Scores | None) -> dict[str, float]:
        """Fetch the rest."""
        before, started = self._got, time.perf_counter()
        self._move(len(self._slots))
        while self._sending:
            self._sending = [request for request in self._sending if not request.test()]
            self._check(started)
        return {
            "rows": self._got,
            "sent_bytes": self._sent_bytes,
            "messages": self._got + self._served,
            "blocked_s": time.perf_counter() - started,
            "overlap_fraction": before / len(self._slots),
        }

    def _move(self, due: int) -> None:
        started = time.perf_counter()
        while self._got < due or self._served < due:
            self._serve(due)
            self._take(due)
            self._check(started)

    def _serve(self, due: int) -> None:
        world, context = self._context.world, self._context
        if self._served == due:
            return
        if self._question is None:
            into = np.empty(8, np.uint8)
            source = int(self._dests[self._served])
            self._question = (world.irecv(into, source=source, tag=context.first_tag), into)
        request, asked = self._question
        if not request.test():
            return
        number = int(asked.view(np.int64)[0])
        self._question = None
        packed = pack_parcel(context.store.read_rows(self._slots[number : number + 1]))
        dest = int(self._dests[number])
        self._sending = [request for request in self._sending if not request.test()]
        self._sending.append(world.isend(packed, dest=dest, tag=context.first_tag + 1))
        self._served += 1
        self._sent_bytes += len(packed)

    def _take(self, due: int) -> None:
        world, context = self._context.world, self._context
        if self._answer is None:
            if self._got == due:
                return
            source = int(self._sources[self._got])
            into = np.empty(parcel_bytes(context.store.schema, 1, np.empty((1, 0), int)), np.uint8)
            self._answer = (world.irecv(into, source=source, tag=context.first_tag + 1), into)
            asked = np.array([self._got]).view(np.uint8)
            self._sending.append(world.isend(asked, dest=source, tag=context.first_tag))
            self._sent_bytes += len(asked)
        request, packed = self._answer
        if request.test():
            rows = unpack_parcel(packed, context.store.schema, 1)
            context.store.write_arrivals(self._slots[self._got : self._got + 1], rows)
            self._answer = None
            self._got += 1

    def _check(self, started: float) -> None:
        world = self._context.world
        if time.perf_counter() - started > world.timeout_s:
            peer = self._sources[min(self._got, len(self._sources) - 1)]
            raise ExchangeError(
                f"[rank {world.rank}] get: rank {peer} did not answer within {world.timeout_s:g} "
                "s; look at its log for the first error"
            )
        time.sleep(0)


class Reread:
    """Read a new random share of a shared file every epoch, a sample at a time, a batch ahead.

    Construction is collective: rank 0 writes the file.
    """

    def __init__(self, task: ExchangeTask, world: World) -> None:
        self._task, self._world = task, world
        self._path = Path(task.shared) / "samples.bin"
        self._throttle = Throttle(
            str(Path(task.shared) / "throttle"), bytes_per_s=task.settings.shared_rate * 1e6
        )
        if world.rank == 0:
            block = generator(key(task.seed, "contents")).bytes(task.row_bytes)
            with open(self._path, "wb") as file:
                for _ in range(task.rows_per_rank * world.world_size):
                    file.write(block)
        world.barrier(doing="write the shared file")
        self._file = os.open(self._path, os.O_RDONLY)
        self._thread = ThreadPoolExecutor(1)
        self._epoch = 0

    def epoch(self) -> Iterator[NDArray[np.int64]]:
        task, world = self._task, self._world
        stream = key(task.seed, "order", epoch=self._epoch)
        mine = generator(stream).permutation(task.rows_per_rank * world.world_size)
        mine = mine[world.rank :: world.world_size]
        cuts = range(0, len(mine), task.batch_size)
        batches = [mine[start : start + task.batch_size] for start in cuts]
        ahead = self._thread.submit(self._read, batches[0])
        for number, ids in enumerate(batches):
            ahead.result()
            if number + 1 < len(batches):
                ahead = self._thread.submit(self._read, batches[number + 1])
            yield ids

    def _read(self, ids: NDArray[np.int64]) -> torch.Tensor:
        row_bytes = self._task.row_bytes
        batch = np.empty((len(ids), row_bytes), np.uint8)
        for row, sample_id in zip(batch, ids.tolist(), strict=True):
            self._throttle.take(row_bytes)
            os.preadv(self._file, [row.data], sample_id * row_bytes)
        return torch.from_numpy(batch)

    def end_epoch(self) -> None:
        self._epoch += 1
        self._world.barrier(doing="end the epoch")

    def figures(self) -> Mapping[str, float]:
        return NO_FIGURES

    def close(self) -> None:
        self._thread.shutdown()
        os.close(self._file)
