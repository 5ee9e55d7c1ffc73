"""One stream of batches, whichever end of it this rank has."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dataio.base.buffers import BufferRing
from dataio.batch.feed import DeviceDelivery
from dataio.rows.samples import Batch
from tonari.trainer.deliver.columns import Columns, lay_columns
from tonari.trainer.deliver.relay import (
    DROPPED,
    END,
    STAGES,
    Inlet,
    Outlet,
    RelayRoute,
    hash_of,
    stages_wanted,
)


class Delivered(NamedTuple):
    """A batch on one rank.

    Attributes:
        number: Of the batch in its stream, from 1 on; the same on all ranks of the replica.
        batch: What this rank's stages take, on its device.
        whole: As it was read; on other ranks than the reader the same as ``batch``.
        ids_hash: Of its sample ids, the same wherever they are seen; 0 where nobody compares them.
    """

    number: int
    batch: Batch
    whole: Batch
    ids_hash: int = 0


class Stream:
    """Runs batches from the reader to the ranks of its feed.

    The reader may hand batches on ahead of those that it trains (`take_ahead`), so that the others
    find the next one there when they ask for it. They ask only for what the reader trains: where a
    loop breaks off, all ranks pass over what was handed on ahead, and the next loop begins with it
    again.

    Args:
        route: From where to where.
        delivery: Takes batches to this rank's device.
    """

    def __init__(self, route: RelayRoute, delivery: DeviceDelivery) -> None:
        self._route, self._delivery = route, delivery
        place = route.place
        owned = dict(zip(STAGES, (route.inputs, route.targets), strict=True))
        self._own = {name for stage in stages_wanted(place, place.rank) for name in owned[stage]}
        self._copies = PinnedCopies() if delivery.pinned else None
        self._outlet: Outlet | None = None
        self._inlet: Inlet | None = None
        # On the reader: the numbers of batches handed on ahead, and the next one's step.
        self._ahead: deque[int] = deque()
        self._next_step = 0
        self._is_under_way = False
        if place.reads:
            self._outlet = Outlet(route)
        else:
            self._inlet = Inlet(route, pinned=delivery.pinned)

    @property
    def held_bytes(self) -> int:
        """Bytes of a batch that this rank gets from the reader."""
        return self._inlet.held_bytes if self._inlet is not None else 0

    @property
    def goes_ahead(self) -> bool:
        """Whether `take_ahead` serves this stream."""
        return self._outlet is not None and self._outlet.goes_ahead

    def take_ahead(self, batch: Batch) -> None:
        """Hand on a batch that `run` is to yield after those taken before. The reader's."""
        assert self._outlet is not None, "the reader hands on"
        self._outlet.hand_on(batch, step=self._next_step)
        self._ahead.append(self._outlet.number)
        self._next_step += 1

    def break_off(self) -> None:
        """Pass over what was handed on ahead, if a loop was left amid it. Collective in the feed.

        It comes of itself before the next header or loop.
        """
        if not self._is_under_way:
            return
        self._is_under_way = False
        self._ahead.clear()
        if self._outlet is not None:
            self._outlet.send_header(DROPPED)
        if self._inlet is not None:
            self._inlet.drop()

    def send_header(self, kind: int, *words: int) -> None:
        """Send all other ranks of the feed a header. The reader's."""
        assert self._outlet is not None, "the reader sends"
        self.break_off()
        self._outlet.send_header(kind, *words)

    def receive_header(self, *kinds: int, limit_s: float | None = None) -> list[int] | None:
        """Wait for the reader's header: its words; None for an end. The other ranks'."""
        assert self._inlet is not None, "the others receive"
        self.break_off()
        kind, words = self._inlet.receive_header(*kinds, limit_s=limit_s)
        return None if kind == END else words

    def run(self, batches: Iterable[Batch] | None, *, first_step: int = 0) -> Iterator[Delivered]:
        """Yield what this rank takes of each batch.

        Args:
            batches: On the reader; None elsewhere.
            first_step: Of the first batch.
        """
        self.break_off()
        self._is_under_way = not self._route.place.is_lone
        if self._inlet is not None:
            for batch in self._inlet.batches():
                own = self._deliver(batch)
                yield Delivered(self._inlet.number, own, own, self._ids_hash(batch))
            self._is_under_way = False
            return
        assert self._outlet is not None, "the reader has the other end"
        assert batches is not None, "the reader has them"
        self._next_step = first_step
        for batch in batches:
            if self._route.place.is_lone:
                yield Delivered(0, batch, batch)
                continue
            if not self._ahead:
                self.take_ahead(batch)
            number = self._ahead.popleft()
            own = {name: value for name, value in batch.items() if name in self._own}
            ids_hash = self._ids_hash(batch)
            if self._copies is not None and own:
                own = self._copies.make(own)
            yield Delivered(number, self._deliver(own), batch, ids_hash)
        self._outlet.send_header(END)
        self._is_under_way = False

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        for end in (self._outlet, self._inlet):
            if end is not None:
                end.close()

    def _ids_hash(self, batch: Batch) -> int:
        """Hash the sample ids, which are on the host still."""
        if not self._route.guard or "sample_id" not in batch:
            return 0
        return hash_of(batch["sample_id"].contiguous().numpy().view(np.uint8))

    def _deliver(self, batch: Batch) -> Batch:
        # One at a time: the next is announced only when this one has been trained.
        return next(self._delivery(iter([batch])))


class PinnedCopies:
    """Copies a reader's batches into memory that its GPU copies from without waiting.

    The loader of a replica of several ranks makes batches in plain memory, which all the ranks take
    from. A copy's memory comes back when the device has it and nobody sees it any more.
    """

    def __init__(self) -> None:
        self._buffers = BufferRing(pinned=True)
        self._columns: Columns | None = None

    def make(self, batch: Batch) -> Batch:
        """Copy a batch; every batch must have the columns of the first.

        Raises:
            DeliveryError: If its columns have other shapes or dtypes than those of the first.
        """
        if self._columns is None:
            self._columns = lay_columns(batch, inputs=tuple(batch), targets=())
        data = self._buffers.take((self._columns.num_bytes,), np.uint8).view(np.uint8)
        self._columns.write(batch, data, where="the reader's own copy of a batch")
        return self._columns.read(data, "input")
