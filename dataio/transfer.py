"""Carry rows from store to store while training runs: read, pack, send; receive, check, write.

Every call comes from the loader's own thread: messages are posted and polled between steps, never
waited for before the epoch's end. Nothing here decides what goes where: the parcels say it.
"""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.errors import ExchangeError
from dataio.parcel import pack_lengths, pack_parcel, parcel_bytes, unpack_lengths, unpack_parcel
from dataio.policies import RowStore, Scores
from dataio.rows import Rows, corrupt_rows
from dataio.world import Request, World

MAX_IN_FLIGHT = 4
"""Parcels that may be under way in each direction: bounds memory at 2 x 4 x 64 MiB."""


@dataclass(frozen=True)
class Parcel:
    """Rows that go to a rank, or come from one, in one message.

    Attributes:
        slots: int64[num_rows]: Where they lie, or are to live from the next epoch on.
        peer: The other rank.
        tag: The same at sender and receiver.
        step: Step of the epoch before which it is posted.
    """

    slots: NDArray[np.int64]
    peer: int
    tag: int
    step: int


@dataclass
class _Incoming:
    """A parcel being received: first its lengths, where fields are variable, then its rows."""

    parcel: Parcel
    buffer: NDArray[np.uint8]
    request: Request
    lengths: NDArray[np.int64] | None


@dataclass
class _Outgoing:
    """A parcel being sent; the buffers are kept until the requests are done."""

    parcel: Parcel
    buffers: list[NDArray[np.uint8]]
    requests: list[Request]


class Transfer:
    """Parcels of one rank, out and in, in the order in which they are posted; an `Exchange`.

    Args:
        world: All ranks.
        store: This node's rows.
        sends: What leaves; the receiver has a parcel of the same rows, in the same order.
        receives: What comes in.
    """

    def __init__(
        self,
        world: World,
        store: RowStore,
        *,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
    ) -> None:
        self._world = world
        self._store = store
        self._sends, self._receives = sends, receives
        self._to_send, self._to_receive = deque(sends), deque(receives)
        self._outgoing: list[_Outgoing] = []
        self._incoming: list[_Incoming] = []
        self._sent_bytes = 0
        self._messages = 0
        self._received_rows = 0

    def progress(self, step: int) -> None:
        """Post what is due by this step, take in what has come. Never blocks."""
        self._outgoing = [sent for sent in self._outgoing if not _done(sent.requests)]
        self._incoming = [coming for coming in map(self._advance, self._incoming) if coming]
        while (
            self._to_receive and self._to_receive[0].step <= step and self._has_room(self._incoming)
        ):
            self._incoming.append(self._begin_receive(self._to_receive.popleft()))
        while self._to_send and self._to_send[0].step <= step and self._has_room(self._outgoing):
            self._outgoing.append(self._begin_send(self._to_send.popleft()))

    def _has_room(self, under_way: "list[_Incoming] | list[_Outgoing]") -> bool:
        return len(under_way) < MAX_IN_FLIGHT

    def _begin_send(self, parcel: Parcel) -> _Outgoing:
        rows = self._store.read_rows(parcel.slots)
        buffers = [pack_parcel(rows)]
        if rows.schema.variable:
            buffers.insert(0, pack_lengths(rows.lengths))
        requests = [self._world.isend(data, dest=parcel.peer, tag=parcel.tag) for data in buffers]
        self._sent_bytes += sum(len(data) for data in buffers)
        self._messages += len(buffers)
        return _Outgoing(parcel, buffers, requests)

    def _begin_receive(self, parcel: Parcel) -> _Incoming:
        num_variable = len(self._store.schema.variable)
        num_rows = len(parcel.slots)
        if num_variable == 0:
            return self._receive_rows(parcel, np.empty((num_rows, 0), np.int64))
        buffer = np.empty(8 * num_rows * num_variable, np.uint8)
        return _Incoming(parcel, buffer, self._receive(buffer, parcel), None)

    def _receive_rows(self, parcel: Parcel, lengths: NDArray[np.int64]) -> _Incoming:
        num_rows = len(parcel.slots)
        buffer = np.empty(parcel_bytes(self._store.schema, num_rows, lengths), np.uint8)
        return _Incoming(parcel, buffer, self._receive(buffer, parcel), lengths)

    def _receive(self, buffer: NDArray[np.uint8], parcel: Parcel) -> Request:
        return self._world.irecv(buffer, source=parcel.peer, tag=parcel.tag)

    def _advance(self, coming: _Incoming) -> _Incoming | None:
        """Take a parcel one message further; None once its rows are written."""
        if not coming.request.test():
            return coming
        parcel = coming.parcel
        num_rows = len(parcel.slots)
        if coming.lengths is None:
            num_variable = len(self._store.schema.variable)
            return self._receive_rows(parcel, unpack_lengths(coming.buffer, num_rows, num_variable))
        rows = unpack_parcel(coming.buffer, self._store.schema, num_rows)
        self._check(rows, parcel)
        self._store.write_arrivals(parcel.slots, rows)
        self._received_rows += num_rows
        return None

    def _check(self, rows: Rows, parcel: Parcel) -> None:
        corrupt = corrupt_rows(rows)
        if len(corrupt):
            raise ExchangeError(
                f"[rank {self._world.rank}] {len(corrupt)} rows from rank {parcel.peer} do not "
                f"match their checksums, the first is sample {rows.sample_id[corrupt[0]]}; the "
                f"cache on rank {parcel.peer}'s node is damaged: run `tonari cache verify` there "
                "and start again, only these rows are read anew"
            )

    def finish(self, scores: Scores | None) -> dict[str, float]:
        """Complete the exchange; then the scores of the rows that moved follow, if any are kept."""
        before = self._received_rows
        started = time.perf_counter()
        last = max((parcel.step for parcel in [*self._sends, *self._receives]), default=0)
        pause_s = 0.0
        while self._to_send or self._to_receive or self._outgoing or self._incoming:
            self.progress(last)
            if time.perf_counter() - started > self._world.timeout_s:
                raise self._stalled()
            time.sleep(pause_s)
            pause_s = min(pause_s + 2e-5, 5e-4)
        if scores is not None:
            self._move_scores(scores)
        return {
            "rows": self._received_rows,
            "sent_bytes": self._sent_bytes,
            "messages": self._messages,
            "blocked_s": time.perf_counter() - started,
            "overlap_fraction": before / max(self._received_rows, 1),
        }

    def _stalled(self) -> ExchangeError:
        world = self._world
        parcels = [coming.parcel for coming in self._incoming]
        parcels += [sent.parcel for sent in self._outgoing]
        ranks = sorted({parcel.peer for parcel in parcels})
        return ExchangeError(
            f"[rank {world.rank}] exchange: ranks {ranks} did not answer within "
            f"{world.timeout_s:.0f} s; look at their logs for the first error, or raise the "
            "world's timeout_s if they are only slow"
        )

    def _move_scores(self, scores: Scores) -> None:
        """Send every partner the scores of the rows that went to it, in one message."""
        world = self._world
        requests: list[Request] = []
        peers: list[int] = []
        arriving: list[tuple[NDArray[np.int64], NDArray[np.uint8]]] = []
        for peer, (slots, tag) in _by_peer(self._receives).items():
            arriving.append((slots, np.empty(len(slots) * scores.dtype.itemsize, np.uint8)))
            requests.append(world.irecv(arriving[-1][1], source=peer, tag=tag))
            peers.append(peer)
        for peer, (slots, tag) in _by_peer(self._sends).items():
            leaving = np.frombuffer(scores[slots].tobytes(), np.uint8)
            requests.append(world.isend(leaving, dest=peer, tag=tag))
            peers.append(peer)
            self._messages += 1
        world.wait(requests, peers=peers, doing="exchange scores")
        for slots, data in arriving:
            scores[slots] = data.view(scores.dtype)


def _by_peer(parcels: Sequence[Parcel]) -> dict[int, tuple[NDArray[np.int64], int]]:
    """Join the slots of each peer's parcels, with the tag of its first."""
    groups: defaultdict[int, list[Parcel]] = defaultdict(list)
    for parcel in parcels:
        groups[parcel.peer].append(parcel)
    return {
        peer: (np.concatenate([parcel.slots for parcel in group]), group[0].tag)
        for peer, group in groups.items()
    }


def _done(requests: list[Request]) -> bool:
    return all([request.test() for request in requests])
