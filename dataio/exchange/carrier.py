"""The engine of a transfer: every parcel's way, cut into pieces that never block.

One thread at a time advances it. Nothing here decides what goes where: the parcels do.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dataio.base.errors import DataioError, ExchangeError, WorldError
from dataio.plan.policies import AtHand, RowStore
from dataio.rows.parcel import (
    Parcel,
    ParcelBuffers,
    lay_parcel,
    pack_lengths,
    parcel_bytes,
    unpack_lengths,
    unpack_parcel,
)
from dataio.rows.rows import Fetch, Rows, corrupt_rows, replace_rows, row_blocks
from dataio.world import Request, World

if TYPE_CHECKING:
    from dataio.exchange.compress import Compressor

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 4
"""Parcels that may be under way in each direction: bounds memory at 2 x 4 x 64 MiB."""
BLOCK_BYTES = 16 << 20
"""Rows read, or checked and written, in one piece: a few milliseconds, and few calls."""
SEGMENT_BYTES = 1 << 20
"""What goes in one message. Over TCP a longer one holds up what the other direction asks for: two
nodes that sent one another 4 MiB and more had one speed or half of it, by chance."""
LEAST_BYTES = 64 << 10
"""Of a parcel that may be compressed."""
SEGMENTS_OUT, SEGMENTS_IN = 4, 8
"""Segments under way, of the parcel that leaves and of each that comes."""
LONGEST_GAP_S = 1.0
"""What counts at most of the time in which nobody looked."""

Way = Generator[bool, None, None]
"""Yields True after a piece of work, False where only the other rank can go on."""


class Clock:
    """Seconds in which the caller took part: between two of its calls LONGEST_GAP_S at most.

    One thread ticks; any may read, because the state is replaced as a whole.
    """

    def __init__(self) -> None:
        self._state = (0.0, time.monotonic(), LONGEST_GAP_S)

    def tick(self, *, longest_gap_s: float = LONGEST_GAP_S) -> None:
        """The caller is here; what it does next counts for ``longest_gap_s`` at most."""
        self._state = (self.elapsed_s, time.monotonic(), longest_gap_s)

    @property
    def elapsed_s(self) -> float:
        counted_s, last, longest_gap_s = self._state
        return counted_s + min(time.monotonic() - last, longest_gap_s)


class Carrier:
    """Parcels of one rank, out and in, in the order in which they are posted.

    Args:
        world: All ranks.
        store: This node's rows.
        sends: What leaves; the receiver has a parcel of the same rows, in the same order.
        receives: What comes in.
        clock: Seconds that count against a silent partner.
        fetch: Reads samples from the source; None if nothing can.
        buffers: Memory for parcels.
        at_hand: What need not be sent.
        compressor: Of parcels of ``LEAST_BYTES``, on all ranks alike; None: they go as they are.

    Attributes:
        due_step: Parcels of this step and those before it are posted. Any thread may write it.
        sent_bytes: Posted so far.
        saved_bytes: That compression has left out of them.
        messages: Posted so far.
        received_rows: Written so far.
        received_bytes: Written so far.
    """

    def __init__(
        self,
        world: World,
        store: RowStore,
        *,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        clock: Clock,
        fetch: Fetch | None,
        buffers: ParcelBuffers,
        at_hand: AtHand,
        compressor: "Compressor | None" = None,
    ) -> None:
        self.due_step = -1
        self.saved_bytes = 0
        self.sent_bytes = self.messages = self.received_rows = self.received_bytes = 0
        self._world, self._store, self._fetch = world, store, fetch
        self._buffers, self._at_hand, self._compressor = buffers, at_hand, compressor
        self._to_send, self._to_receive = deque(sends), deque(receives)
        self._leaving: Parcel | None = None
        self._outgoing: list[tuple[Parcel, Way]] = []
        self._incoming: list[tuple[Parcel, Way]] = []
        # How long each partner has been silent, on a clock of its own that stops while we work.
        self._clock, self._seen_s, self._now_s = clock, clock.elapsed_s, 0.0
        self._heard_s: dict[int, float] = {}

    @property
    def done(self) -> bool:
        """Whether all has left and come."""
        return not (self._to_send or self._to_receive or self.busy)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._outgoing or self._incoming)

    def advance(self) -> bool:
        """Take every parcel under way one piece further, and post what is due. Never blocks.

        Returns:
            Whether it did anything: if not, only the other ranks can go on.

        Raises:
            StallError: If a partner is silent for longer than the world's time limit.
            ExchangeError: If one failed, or sent rows that do not match their checksums and cannot
                be fetched.
        """
        seen_s = self._clock.elapsed_s
        self._now_s += min(seen_s - self._seen_s, LONGEST_GAP_S)
        self._seen_s = seen_s
        posted = self._post(self._to_receive, self._incoming, self._receive)
        posted |= self._post(self._to_send, self._outgoing, self._send)
        moved = posted
        for under_way in (self._incoming, self._outgoing):
            for parcel, way in list(under_way):
                went_on = self._step(parcel, way)
                if went_on is not False:
                    moved, self._heard_s[parcel.peer] = True, self._now_s
                if went_on is None:
                    under_way.remove((parcel, way))
                elif went_on:
                    # One after the other: the first is soon on its way, its buffer soon free.
                    break
        self._check_silence()
        return moved

    def _post(
        self,
        waiting: deque[Parcel],
        under_way: list[tuple[Parcel, Way]],
        begin: Callable[[Parcel], Way],
    ) -> bool:
        before = len(under_way)
        while waiting and waiting[0].step <= self.due_step and len(under_way) < MAX_IN_FLIGHT:
            parcel = waiting.popleft()
            if parcel.peer not in self._peers():
                self._heard_s[parcel.peer] = self._now_s
            under_way.append((parcel, begin(parcel)))
        return len(under_way) > before

    def _peers(self) -> set[int]:
        return {parcel.peer for parcel, _ in [*self._incoming, *self._outgoing]}

    def _send(self, parcel: Parcel) -> Way:
        if parcel.peer in self._at_hand.receivers:
            yield from _until([self._post_send(pack_lengths(parcel.slots), parcel)])
            return
        schema = self._store.schema
        lengths = self._store.lengths(parcel.slots)
        requests: list[Request] = []
        if schema.variable:
            # Ahead of the rows, so that the receiver is ready when they come.
            requests.append(self._post_send(pack_lengths(lengths), parcel))
        buffer = self._buffers.take(parcel_bytes(schema, len(parcel.slots), lengths))
        rows = lay_parcel(buffer, schema, lengths)
        for part, block in row_blocks(rows, BLOCK_BYTES):
            # Not checked here: the receiver does, and fetches what was damaged on either side.
            self._store.read_into(parcel.slots[part], block)
            yield True
        segments = _segments(buffer)
        compressor = self._compressor if len(buffer) >= LEAST_BYTES else None
        if compressor is not None:
            segments = yield from compressor.pack(segments)
            lengths = np.array([len(segment) for segment in segments])
            self.saved_bytes += len(buffer) - int(lengths.sum())
            requests.append(self._post_send(pack_lengths(lengths), parcel))
        # One after the other, in the order in which their receivers wait for them.
        while self._leaving is not None:
            if self._leaving.peer != parcel.peer:
                # Nothing was sent to this partner yet: it is not the one that is silent.
                self._heard_s[parcel.peer] = self._now_s
            yield False
        self._leaving = parcel
        began = time.monotonic()
        yield from _in_turn(segments, lambda part: self._post_send(part, parcel), SEGMENTS_OUT)
        self._leaving = None
        if compressor is not None:
            compressor.note_sent(sum(map(len, segments)), time.monotonic() - began)
        yield from _until(requests)
        self._buffers.give_back(buffer)

    def _post_send(self, data: NDArray[np.uint8], parcel: Parcel) -> Request:
        self.sent_bytes += len(data)
        self.messages += 1
        return self._world.isend(data, dest=parcel.peer, tag=parcel.tag)

    def _receive(self, parcel: Parcel) -> Way:
        schema, num_rows = self._store.schema, len(parcel.slots)
        if parcel.peer in self._at_hand.senders:
            yield from self._keep(parcel)
            return
        lengths: NDArray[np.int64] | None = None
        if schema.variable:
            num_variable = len(schema.variable)
            ahead = np.empty(8 * num_rows * num_variable, np.uint8)
            yield from _until([self._post_receive(ahead, parcel)])
            lengths = unpack_lengths(ahead, num_rows, num_variable)
        num_bytes = parcel_bytes(schema, num_rows, lengths)
        try:
            buffer = self._buffers.take(num_bytes)
        except MemoryError as error:
            raise ExchangeError(
                f"[rank {self._world.rank}] rank {parcel.peer} announces {num_rows} rows of "
                f"{num_bytes} bytes, expected what fits into memory beside the other parcels; the "
                "message is damaged, or samples differ too much in size: exchange less at a time, "
                "or restart from the last checkpoint"
            ) from error
        segments = whole = _segments(buffer)
        compressor = self._compressor if num_bytes >= LEAST_BYTES else None
        if compressor is not None:
            ahead = np.empty(8 * len(whole), np.uint8)
            yield from _until([self._post_receive(ahead, parcel)])
            segments = compressor.make_room(ahead.view(np.int64), whole)
        yield from _in_turn(segments, lambda part: self._post_receive(part, parcel), SEGMENTS_IN)
        for packed, into in zip(segments, whole, strict=True):
            if compressor is not None and packed is not into:
                compressor.unpack(packed, into)
                yield True
        rows = unpack_parcel(buffer, schema, num_rows)
        for part, block in row_blocks(rows, BLOCK_BYTES):
            self._check(block, parcel)
            self._store.write_arrivals(parcel.slots[part], block)
            self.received_rows += len(block)
            yield True
        self.received_bytes += len(buffer)
        self._buffers.give_back(buffer)

    def _keep(self, parcel: Parcel) -> Way:
        """Take over rows that lie on this node, by the slots that their sender names."""
        named = np.empty(8 * len(parcel.slots), np.uint8)
        yield from _until([self._post_receive(named, parcel)])
        held_in = named.view(np.int64) + self._at_hand.first_slot
        self._store.keep_rows(parcel.slots, held_in=held_in)
        self.received_rows += len(parcel.slots)
        self.received_bytes += len(named)

    def _post_receive(self, into: NDArray[np.uint8], parcel: Parcel) -> Request:
        return self._world.irecv(into, source=parcel.peer, tag=parcel.tag)

    def _step(self, parcel: Parcel, way: Way) -> bool | None:
        try:
            return next(way, None)
        except WorldError as error:
            raise ExchangeError(
                f"[rank {self._world.rank}] exchange with rank {parcel.peer} failed: {error}"
            ) from error

    def _check(self, rows: Rows, parcel: Parcel) -> None:
        """Put right, in place, the rows that were damaged where they lay or on their way."""
        corrupt = corrupt_rows(rows, lost_too=False)
        if not len(corrupt):
            return
        cause: DataioError | None = None
        if self._fetch is not None:
            log.warning(
                "[rank %d] rows of samples %s from rank %d do not match their checksums: reading "
                "them from the source again",
                self._world.rank, rows.sample_id[corrupt].tolist(), parcel.peer,
            )  # fmt: skip
            try:
                for others in self._fetch(np.unique(rows.sample_id[corrupt])):
                    replace_rows(rows, others, corrupt)
            except DataioError as error:
                cause = error
            corrupt = corrupt_rows(rows, lost_too=False)
        if len(corrupt):
            raise ExchangeError(
                f"[rank {self._world.rank}] {len(corrupt)} rows from rank {parcel.peer} do not "
                f"match their checksums, the first is sample {rows.sample_id[corrupt[0]]}, and the "
                f"source has no such rows{f' ({cause})' if cause else ''}; that rank's cache is "
                "damaged, or memory or network between the two: run `tonari cache verify` there "
                "and start again, only these rows are read anew"
            ) from cause

    def _check_silence(self) -> None:
        limit_s = self._world.timeout_s
        silent = [
            rank for rank in sorted(self._peers()) if self._now_s - self._heard_s[rank] > limit_s
        ]
        if silent:
            raise self._world.stall_error(silent, doing="exchanging rows", limit_s=limit_s)


def _segments(buffer: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return [buffer[at : at + SEGMENT_BYTES] for at in range(0, len(buffer), SEGMENT_BYTES)]


def _in_turn(
    segments: Sequence[NDArray[np.uint8]],
    post: Callable[[NDArray[np.uint8]], Request],
    width: int,
) -> Way:
    """Post segments, so many at a time, and wait for them all."""
    under_way: deque[Request] = deque()
    for segment in segments:
        if len(under_way) == width:
            yield from _until([under_way.popleft()])
            yield True
        under_way.append(post(segment))
    yield from _until(list(under_way))


def _until(requests: list[Request]) -> Way:
    while requests := [request for request in requests if not request.test()]:
        yield False
