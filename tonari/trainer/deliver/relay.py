"""A stream of batches from a replica's reader to its other ranks, each column where it is needed.

Every batch is announced to each rank by a header. Its bytes go through shared memory to ranks of
the reader's node, and in messages to those of others; middle stages get the header alone.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from dataio.base.buffers import BufferRing
from dataio.exchange.carrier import SEGMENT_BYTES
from dataio.rows.samples import Batch
from dataio.world import Request, World
from tonari.trainer.deliver.columns import Columns, lay_columns
from tonari.trainer.deliver.ring import MAX_PEERS, NUM_SLOTS, Ring
from tonari.trainer.errors import DeliveryError
from tonari.trainer.mesh.place import Place

Bytes = NDArray[np.uint8]

STATE, BATCH, END, DROPPED = 1, 2, 3, 4
KINDS = {
    STATE: "a state", BATCH: "a batch", END: "the end of an epoch",
    DROPPED: "that batches announced before will not be trained now",
}  # fmt: skip
NUM_WORDS = 8
"""int64 of a header: kind, number of the batch, then what the kind needs."""

WINDOW_SEGMENTS = 8
"""Segments under way to each rank: each has a thread where gloo carries it."""

HEADER_TAG, DATA_TAG, SCORE_TAG, NUM_TAGS = range(4)
STAGES = ("input", "target")
SPANS: tuple[tuple[str, ...], ...] = (("input",), ("target",), STAGES)
"""What a rank may take; the hashes of a header are in this order."""


def stages_wanted(place: Place, rank: int) -> tuple[str, ...]:
    """Say which of the columns a rank of the replica takes: of the first stage, of the last."""
    owned = (place.input_ranks, place.target_ranks)
    return tuple(stage for stage, ranks in zip(STAGES, owned, strict=True) if rank in ranks)


@dataclass(frozen=True, kw_only=True)
class RelayRoute:
    """What both ends of a stream must agree on.

    Attributes:
        world: All ranks.
        place: This rank's in its feed: the ranks that get the stream, and their reader.
        inputs: Columns that the first stage takes.
        targets: Columns that the last stage takes.
        first_tag: Of NUM_TAGS tags.
        guard: Whether every rank checks what it got.
        shared: Whether ranks of a node share memory; they exchange messages otherwise.
    """

    world: World
    place: Place
    inputs: Collection[str]
    targets: Collection[str]
    first_tag: int
    guard: bool
    shared: bool


class Outlet:
    """The reader's end: hands batches on."""

    def __init__(self, route: RelayRoute) -> None:
        world, place, shared = route.world, route.place, route.shared
        self._world, self._tag, self._guard = world, route.first_tag, route.guard
        self._inputs, self._targets = route.inputs, route.targets
        self._peers = [rank for rank in place.ranks if rank != world.rank]
        self._wanted = {rank: stages_wanted(place, rank) for rank in self._peers}
        nodes = world.topology.node_of_rank
        taking = [rank for rank in self._peers if self._wanted[rank]]
        self._near = [rank for rank in taking if shared and nodes[rank] == world.node][:MAX_PEERS]
        self._far = [rank for rank in taking if rank not in self._near]
        self._columns: Columns | None = None
        self._ring: Ring | None = None
        self._memory: Bytes = np.empty(0, np.uint8)
        # Of each slot of the ring, or of the memory: the columns there.
        self._views: dict[int, list[Tensor]] = {}
        self._where = f"[rank {world.rank}] replica {place.replica}"
        self._headers: list[tuple[Request, int]] = []
        self.number = 0

    @property
    def goes_ahead(self) -> bool:
        """Whether `hand_on` may be called before the others ask for the batch.

        It may where all bytes go through shared memory: messages to other nodes are waited for.
        """
        return bool(self._peers) and not self._far

    def send_header(self, kind: int, *words: int) -> None:
        """Send every other rank of the replica a header. Blocks, but for a batch's, until it came.

        Of a batch only the headers of NUM_SLOTS batches before are waited for.
        """
        header = np.zeros(NUM_WORDS, np.int64)
        header[: 2 + len(words)] = kind, self.number, *words
        data, tag = header.view(np.uint8), self._tag + HEADER_TAG
        sent = [(self._world.isend(data, dest=rank, tag=tag), rank) for rank in self._peers]
        waiting = [(request, rank) for request, rank in self._headers if not request.test()] + sent
        num_kept = NUM_SLOTS * len(self._peers) if kind == BATCH else 0
        awaited = waiting[: max(len(waiting) - num_kept, 0)]
        self._headers = waiting[len(awaited) :]
        self._world.wait(
            [request for request, _ in awaited], peers=[rank for _, rank in awaited],
            doing=f"announcing {KINDS[kind]}",
        )  # fmt: skip

    def hand_on(self, batch: Batch, *, step: int) -> None:
        """Give every rank what it takes of a batch. Blocks until it can be changed again.

        Where it `goes_ahead` that is while another rank still looks at the batch NUM_SLOTS before.
        """
        self.number += 1
        if not self._peers:
            return
        description = self._open(batch) if self._columns is None else b""
        columns = self._columns
        assert columns is not None, "opened above"
        data = self._free_memory()
        if self._near or self._far:
            slot = self.number % NUM_SLOTS if self._ring is not None else 0
            if slot not in self._views:
                self._views[slot] = columns.views(data)
            columns.copy(batch, self._views[slot], where=f"{self._where}, step {step}")
        hashes = [self._hash(data, columns, wanted) for wanted in SPANS]
        self.send_header(BATCH, step, len(description), *hashes)
        if description:
            self._describe(description)
        self._send_far(columns, data)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._ring is not None:
            self._ring.unlink()
        self._ring, self._memory = None, np.empty(0, np.uint8)
        self._views.clear()
        self._world.keep(self._headers)
        self._headers = []

    def _open(self, batch: Batch) -> bytes:
        """Lay out the columns; say what those who take them need to know."""
        self._columns = lay_columns(batch, inputs=self._inputs, targets=self._targets)
        if self._near:
            self._ring = Ring.create(self._columns.num_bytes)
        elif self._far:
            self._memory = np.empty(self._columns.num_bytes, np.uint8)
        path = str(self._ring.path) if self._ring is not None else ""
        near = ",".join(map(str, self._near))
        return f"{path}\n{near}\n{self._columns.to_json()}".encode()

    def _describe(self, description: bytes) -> None:
        """Send the columns to all that take some, and let those near open the shared memory."""
        described = np.frombuffer(description, np.uint8)
        try:
            self._send(
                [(rank, described) for rank in (*self._near, *self._far)], DATA_TAG,
                "describing the columns",
            )  # fmt: skip
            self._await_near(0, "waiting for the shared memory of batches to be opened")
        finally:
            # Whatever becomes of this process, the memory ends with those that have it open.
            if self._ring is not None:
                self._ring.unlink()

    def _free_memory(self) -> Bytes:
        """Where the next batch may be written; waits for those who look at the one before there."""
        if self._ring is None:
            return self._memory
        self._await_near(self.number - NUM_SLOTS, "waiting for an earlier batch to be let go")
        return self._ring.slot(self.number)

    def _await_near(self, number: int, doing: str) -> None:
        ring = self._ring
        if ring is None:
            return
        waiting = [(_LettingGo(ring, i, number), rank) for i, rank in enumerate(self._near)]
        waits = [wait for wait, _ in waiting]
        self._world.wait(waits, peers=[rank for _, rank in waiting], doing=doing)

    def _hash(self, data: Bytes, columns: Columns, wanted: tuple[str, ...]) -> int:
        """Hash what some rank takes; 0 for what none does, and where nobody checks."""
        if not (self._guard and len(data) and wanted in self._wanted.values()):
            return 0
        span = columns.span(*wanted)
        return hash_of(data[span.start : span.stop])

    def _send_far(self, columns: Columns, data: Bytes) -> None:
        spans = {rank: columns.span(*self._wanted[rank]) for rank in self._far}
        for first in range(0, columns.num_bytes, WINDOW_SEGMENTS * SEGMENT_BYTES):
            pieces = [
                (rank, data[span.start : span.stop][part])
                for rank, span in spans.items()
                for part in _segments(first, len(span))
            ]
            # Seen through before this rank goes on: some media only move bytes while it waits.
            self._send(pieces, DATA_TAG, "sending a batch")

    def _send(self, pieces: list[tuple[int, Bytes]], tag: int, doing: str) -> None:
        requests = [self._world.isend(data, dest=to, tag=self._tag + tag) for to, data in pieces]
        self._world.wait(requests, peers=[to for to, _ in pieces], doing=doing)


class Inlet:
    """The end of a rank that reads nothing: takes what its stages need of each batch.

    Args:
        route: Of the stream.
        pinned: Whether batches are made in memory that a GPU copies from without waiting.

    Attributes:
        number: Of the last batch.
        step: Of the last batch.
    """

    def __init__(self, route: RelayRoute, *, pinned: bool) -> None:
        self.number = self.step = 0
        world, place = route.world, route.place
        self._world, self._place, self._tag = world, place, route.first_tag
        self._wanted = stages_wanted(place, world.rank)
        self._buffers = BufferRing(pinned=pinned)
        self._columns: Columns | None = None
        self._ring: Ring | None = None
        self._peer = -1
        self._where = f"[rank {world.rank}] replica {place.replica}"

    @property
    def held_bytes(self) -> int:
        """Bytes of batches that this rank sees or has made buffers for."""
        if self._columns is None:
            return 0
        return len(self._columns.span(*self._wanted))

    def receive_header(self, *kinds: int, limit_s: float | None = None) -> tuple[int, list[int]]:
        """Wait for the reader's next header, which must be of these kinds: kind and words.

        Raises:
            StallError: If the reader does not send one in time.
            DeliveryError: If it sends another.
        """
        header = np.empty(NUM_WORDS, np.int64)
        awaited = " or ".join(KINDS[kind] for kind in kinds)
        self._receive([header.view(np.uint8)], HEADER_TAG, f"waiting for {awaited}", limit_s)
        kind, self.number, *words = header.tolist()
        if kind not in kinds:
            raise DeliveryError(
                f"{self._where}: rank {self._place.reader} announced {KINDS.get(kind, kind)}, "
                f"expected {awaited}; all ranks of a replica must run the same loop"
            )
        return kind, words

    def batches(self) -> Iterator[Batch]:
        """Yield the rest of the batches, with the columns that this rank takes."""
        while True:
            kind, words = self.receive_header(BATCH, END)
            if kind == END:
                return
            step, description_bytes, *hashes = words
            yield self._take(step, description_bytes, hashes)

    def drop(self) -> None:
        """Pass over the batches that were announced ahead of a loop that broke off. Blocks."""
        # Letting a later batch go lets these go too.
        while self.receive_header(BATCH, DROPPED)[0] != DROPPED:
            pass

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._ring = None

    def _take(self, step: int, description_bytes: int, hashes: Sequence[int]) -> Batch:
        self.step = step
        if not self._wanted:
            return {}
        if description_bytes:
            self._open(description_bytes)
        assert self._columns is not None, "described with the first batch"
        span = self._columns.span(*self._wanted)
        data = self._buffers.take((len(span),), np.uint8).view(np.uint8)
        if self._ring is None:
            self._receive_far(data)
        else:
            # A copy: whoever keeps a batch must not hold up the ring, nor see it change.
            data[:] = self._ring.slot(self.number)[span.start : span.stop]
            self._ring.let_go(self._peer, self.number)
        self._check(data, hashes[SPANS.index(self._wanted)])
        return self._columns.read(data, *self._wanted)

    def _open(self, description_bytes: int) -> None:
        description = np.empty(description_bytes, np.uint8)
        self._receive([description], DATA_TAG, "waiting for the columns of batches")
        path, near, columns = description.tobytes().decode().split("\n", 2)
        self._columns = Columns.from_json(columns)
        ranks = [int(rank) for rank in near.split(",") if rank]
        if self._world.rank not in ranks:
            return
        self._peer = ranks.index(self._world.rank)
        try:
            self._ring = Ring(Path(path), self._columns.num_bytes, writes=False)
        except OSError as error:
            raise DeliveryError(
                f"{self._where}: cannot open {path} ({error}), expected the memory that rank "
                f"{self._place.reader} shares on this node; let the node's ranks share /dev/shm, "
                "or turn shared_memory off"
            ) from error
        self._ring.let_go(self._peer, 0)

    def _receive_far(self, data: Bytes) -> None:
        for first in range(0, len(data), WINDOW_SEGMENTS * SEGMENT_BYTES):
            pieces = [data[part] for part in _segments(first, len(data))]
            self._receive(pieces, DATA_TAG, "waiting for the rest of a batch")

    def _receive(
        self, pieces: list[Bytes], tag: int, doing: str, limit_s: float | None = None
    ) -> None:
        reader = self._place.reader
        requests = [
            self._world.irecv(piece, source=reader, tag=self._tag + tag) for piece in pieces
        ]
        self._world.wait(requests, peers=[reader] * len(pieces), doing=doing, timeout_s=limit_s)

    def _check(self, data: Bytes, expected: int) -> None:
        found = hash_of(data) if expected else 0
        if found != expected:
            raise DeliveryError(
                f"{self._where}, step {self.step}: the bytes of the batch that came hash to "
                f"{found:#018x}, rank {self._place.reader} read {expected:#018x}; the ranks "
                "would train different rows: check this node's memory and network, and start "
                "again from the last checkpoint"
            )


class _LettingGo:
    """Is done when a peer needs a batch no more."""

    def __init__(self, ring: Ring, peer: int, number: int) -> None:
        self._ring, self._peer, self._number = ring, peer, number

    def test(self) -> bool:
        return self._ring.has_let_go(self._peer, self._number)


def _segments(first: int, num_bytes: int) -> list[slice]:
    """Cut the next window of a run of bytes."""
    stop = min(first + WINDOW_SEGMENTS * SEGMENT_BYTES, num_bytes)
    return [slice(i, min(i + SEGMENT_BYTES, stop)) for i in range(first, stop, SEGMENT_BYTES)]


def hash_of(data: Bytes) -> int:
    """Hash bytes to a positive int64."""
    # 63 bits: it travels as int64; and never 0, which says that there is none.
    return (xxhash.xxh3_64_intdigest(data.data) >> 1) | 1
