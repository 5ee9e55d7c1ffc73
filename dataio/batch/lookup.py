"""Slots of the next steps -> where their rows lie, in blocks of steps; fetched ahead."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataio.base.cgroup import memory_limit
from dataio.base.errors import CorruptRowError
from dataio.batch.assemble import Assembler
from dataio.batch.job import BatchWork
from dataio.batch.verify import RowVerifier
from dataio.plan.order import PADDING, StepsBlock
from dataio.store.cache import Cache
from dataio.store.files.fetch import Fetch, Fetcher
from dataio.store.files.reader import Located, locate

Pick = Callable[[int, int], StepsBlock]

BLOCK_ROWS = 32768
"""Rows that are decided and looked up at once."""

AHEAD = 8
"""Batches at most whose rows are fetched before they are used."""

AHEAD_FRACTION = 0.05
"""Of a node's memory, what those of all its ranks may take; and of each rank's, `AHEAD_BYTES`."""
AHEAD_BYTES = 256 << 20


@dataclass(slots=True)
class Pending:
    """A batch on its way: what it is made of, and what is known already.

    Attributes:
        unchecked: Slots of its rows, if their checksums are to be checked.
        num_bytes: Stored bytes of its rows.
        fetch: Its rows on their way to memory; None where they are mapped.
    """

    work: BatchWork
    slot: NDArray[np.int64]
    sample_id: NDArray[np.int64]
    weight: NDArray[np.float32]
    unchecked: NDArray[np.int64] | None
    num_bytes: int
    fetch: Fetch | None = None


class LookedUp(NamedTuple):
    """A block of steps, and where its rows lie; all arrays begin with [steps, batch]."""

    first_step: int
    block: StepsBlock
    located: Located
    small: dict[str, NDArray[np.generic]]
    slot: NDArray[np.int64]
    sample_id: NDArray[np.int64]


class Lookup:
    """Finds the rows of coming steps; one thread uses it, and may hand blocks to another.

    Args:
        cache: The rows.
        assembler: Gathers the small fields of a whole block.
        verifier: Knows which rows are to be checked.
        threads: Look up the next block meanwhile; None looks up on the caller's thread.
        num_tiles: Tiles of a sample, each with as many ranks on the node as the cache has.

    Attributes:
        num_bytes: Stored bytes of the rows of the batches begun.
    """

    def __init__(
        self,
        cache: Cache,
        assembler: Assembler,
        verifier: RowVerifier,
        *,
        threads: ThreadPoolExecutor | None,
        num_tiles: int = 1,
    ) -> None:
        self._cache, self._assembler, self._verifier = cache, assembler, verifier
        self._threads, self._num_tiles = threads, num_tiles
        self.num_bytes = 0

    def pending(
        self, pick: Pick, steps: range, *, epoch: int, fetcher: Fetcher | None
    ) -> Iterator[Pending]:
        """Find the rows of some steps, in order; the fetcher begins to read them, if given."""
        blocks = self._ahead(self._looked_up(pick, steps))
        found = chain.from_iterable(map(self._cut, blocks, repeat(epoch)))
        return found if fetcher is None else self._fetched(found, fetcher)

    def _fetched(self, pending: Iterator[Pending], fetcher: Fetcher) -> Iterator[Pending]:
        """Begin to read some batches before the first of them is made."""
        num_ranks = self._cache.local_size * self._num_tiles
        most_bytes = min(AHEAD_FRACTION * memory_limit() / num_ranks, AHEAD_BYTES)
        waiting: deque[Pending] = deque()
        ahead_bytes = 0
        try:
            for one in pending:
                parts = self._assembler.filler.parts(one.work)
                one.fetch = fetcher.fetch(one.work.located, one.work.small, parts)
                waiting.append(one)
                ahead_bytes += one.num_bytes
                while len(waiting) > 1 and (len(waiting) > AHEAD or ahead_bytes > most_bytes):
                    ahead_bytes -= waiting[0].num_bytes
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:  # also of an iteration that is left in the middle
            for one in waiting:
                if one.fetch is not None:
                    one.fetch.cancel()

    def _ahead(self, blocks: Iterator[LookedUp]) -> Iterator[LookedUp]:
        """Look up the next block on another thread meanwhile, if there is one."""
        if self._threads is None:
            yield from blocks
            return
        coming = self._threads.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = self._threads.submit(next, blocks, None)
            yield block

    def _looked_up(self, pick: Pick, steps: range) -> Iterator[LookedUp]:
        # Short blocks first: no batch waits long for the look-up of the next.
        num_steps = 4
        while steps:
            block = pick(steps.start, min(num_steps, len(steps)))
            located = locate(self._cache.entries, block.slots)
            try:
                small = self._assembler.filler.gather_small(located.position)
            except IndexError as error:
                raise CorruptRowError(
                    f"{self._cache.directory}: a row of steps from {steps.start} on lies in no "
                    f"file ({error}), expected where the manifest said when it was opened: run "
                    "`tonari cache verify`, which finds its rows again"
                ) from error
            slot, sample_id = block.slots, located.sample_id
            if block.num_valid.min() < slot.shape[1]:
                padding = np.arange(slot.shape[1]) >= block.num_valid[:, None]
                slot, sample_id = np.where(padding, PADDING, [slot, sample_id])
            yield LookedUp(steps.start, block, located, small, slot, sample_id)
            steps = steps[len(slot) :]
            num_steps = min(4 * num_steps, max(BLOCK_ROWS // slot.shape[1], 1))

    def _cut(self, block: LookedUp, epoch: int) -> Iterator[Pending]:
        slots, _, weight, repeats = block.block
        unchecked = self._verifier.unchecked(slots, first_step=block.first_step, epoch=epoch)
        columns = zip(*block.small.values(), strict=True) if block.small else repeat(())
        rows = zip(
            map(Located, *block.located), columns, block.slot, block.sample_id, weight, strict=False
        )
        num_bytes = self._stored_bytes(block.located)
        for number, (located, small, slot, sample_id, weights) in enumerate(rows):
            self.num_bytes += num_bytes[number]
            work = BatchWork(
                epoch,
                block.first_step + number,
                located,
                dict(zip(block.small, small, strict=True)),
                repeat=repeats[number] if repeats is not None else None,
            )
            todo = slots[number] if unchecked[number] else None
            yield Pending(work, slot, sample_id, weights, todo, num_bytes[number])

    def _stored_bytes(self, located: Located) -> list[int]:
        """Bytes of each batch of a block, as they are read of the cache's files."""
        num_steps, num_rows = located.position.shape
        fixed_bytes = num_rows * self._assembler.filler.fixed_bytes
        if not self._cache.schema.variable:
            return [fixed_bytes] * num_steps
        extents = located.bounds[..., -1] - located.bounds[..., 0]
        return (fixed_bytes + extents.sum(axis=1)).tolist()  # type: ignore[no-any-return]
