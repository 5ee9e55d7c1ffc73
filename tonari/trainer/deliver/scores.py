"""What a batch's rows cost, from the rank that scores them back to the one that reads them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataio.world import Request, World
from tonari.trainer.errors import DeliveryError

Bytes = NDArray[np.uint8]
HEADER_BYTES, ROW_BYTES = 24, 13
"""int64 number of the batch, how it was scored, hash of its sample ids; loss, confidence and
correct of a row."""

UNSCORED, LOSSES, OUTCOMES = range(3)
"""How a batch was scored: not at all, by its losses (the rest of its rows is 0), in full."""


@dataclass(frozen=True)
class Scores:
    """Of one batch: float64[batch], bool[batch], float32[batch]; None where nobody judged."""

    loss: Tensor
    correct: Tensor | None = None
    confidence: Tensor | None = None


@dataclass(frozen=True)
class _Unscored:
    """A batch on the scorer: its number, a tensor that names it, and the hash of its ids."""

    number: int
    slot: Tensor
    ids_hash: int


@dataclass(frozen=True)
class _Computing:
    """A message whose scores are on their way from the device until ``done``; None: they came."""

    pack: Callable[[], Bytes]
    done: torch.cuda.Event | None


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """A batch on the reader, whose scores are to come.

    Attributes:
        rows: What the reader's loader says of them: ``weight``, ``sample_id``, ``slot``.
        ids_hash: Of its sample ids.
        step: Of the epoch, or of the refresh.
        trains: Whether it is a training batch.
    """

    rows: dict[str, Tensor]
    ids_hash: int
    step: int
    trains: bool


class ScoreSender:
    """The scorer's end. It waits for the device in `complete` alone.

    Args:
        world: All ranks.
        reader: Who gets the scores.
        tag: Of the messages.
    """

    def __init__(self, world: World, *, reader: int, tag: int) -> None:
        self._world, self._reader, self._tag = world, reader, tag
        self._open: list[_Unscored] = []
        self._computing: deque[_Computing] = deque()
        self._sending: list[Request] = []

    def expect(self, number: int, slot: Tensor, *, ids_hash: int) -> None:
        """A batch was delivered, which may be scored."""
        self._open.append(_Unscored(number, slot, ids_hash))

    def send(self, slot: Tensor, scores: Scores) -> None:
        """Send a batch's scores as soon as the device has them.

        Raises:
            ValueError: If it is no batch that was delivered and not yet scored.
        """
        found = next((at for at, its in enumerate(self._open) if its.slot is slot), None)
        if found is None:
            raise ValueError(
                "report: found a batch that was reported before, or not delivered in this epoch; "
                "report each batch that the loader yields once"
            )
        self._computing.append(_begin(self._open.pop(found), scores))
        self._advance()

    def complete(self) -> None:
        """Send all that is left, and that the other batches were not scored. Blocks."""
        while self._computing:
            computing = self._computing.popleft()
            if computing.done is not None:
                computing.done.synchronize()
            self._post(computing.pack())
        for batch in self._open:
            self._post(_pack(batch, None))
        self._open.clear()
        peers = [self._reader] * len(self._sending)
        self._world.wait(self._sending, peers=peers, doing="sending losses to the reader")
        self._sending = []

    def _advance(self) -> None:
        while self._computing:
            computing = self._computing[0]
            if computing.done is not None and not computing.done.query():  # type: ignore[no-untyped-call]
                break
            self._post(self._computing.popleft().pack())
        self._sending = [request for request in self._sending if not request.test()]

    def _post(self, message: Bytes) -> None:
        self._sending.append(self._world.isend(message, dest=self._reader, tag=self._tag))


class ScoreReceiver:
    """The reader's end: receives are posted ahead, and taken in when somebody looks.

    Args:
        world: All ranks.
        scorer: Who sends.
        tag: Of the messages.
        take: Given the batch and its scores.
    """

    def __init__(
        self, world: World, *, scorer: int, tag: int, take: Callable[[Awaited, Scores], None]
    ) -> None:
        self._world, self._scorer, self._tag, self._take = world, scorer, tag, take
        self._open: dict[int, Awaited] = {}
        self._coming: deque[tuple[Request, Bytes]] = deque()
        # Of batches that the scorer, which may be ahead, scored while it left out one before.
        self._early: dict[int, Bytes] = {}

    def expect(self, number: int, batch: Awaited) -> None:
        """A batch was delivered, which may be scored; take in what has come of those before."""
        self._open[number] = batch
        if number in self._early:
            self._take_in(self._early.pop(number))
        buffer = np.empty(HEADER_BYTES + ROW_BYTES * len(batch.rows["slot"]), np.uint8)
        request = self._world.irecv(buffer, source=self._scorer, tag=self._tag)
        self._coming.append((request, buffer))
        while self._coming[0][0].test():
            self._take_in(self._coming.popleft()[1])
            if not self._coming:
                break

    def complete(self) -> None:
        """Take in all scores of the batches delivered. Blocks for the scorer.

        Raises:
            DeliveryError: As from `expect`, if the scorer's rows were others than this rank's.
        """
        while self._coming:
            request, buffer = self._coming.popleft()
            self._world.wait([request], peers=[self._scorer], doing="waiting for a batch's losses")
            self._take_in(buffer)

    def close(self) -> None:
        """Wait for nothing any more."""
        # The medium may still write into their buffers.
        self._world.keep(self._coming)
        self._coming = deque()

    def _take_in(self, buffer: Bytes) -> None:
        number, scored, ids_hash = buffer[:HEADER_BYTES].view(np.int64).tolist()
        if number not in self._open:
            self._early[number] = buffer
            return
        batch = self._open.pop(number)
        if batch.ids_hash != ids_hash:
            raise DeliveryError(
                f"[rank {self._world.rank}] {'step' if batch.trains else 'refresh step'} "
                f"{batch.step}: the sample ids of its batch hash to {batch.ids_hash:#018x}, those "
                f"that rank {self._scorer} scored to {ids_hash:#018x}; losses would go to other "
                "rows than they are of: remove the caches of both ranks' nodes and start again "
                'from the last checkpoint, or give mesh.targets="send"'
            )
        if scored != UNSCORED:
            self._take(batch, _unpack(buffer[HEADER_BYTES:], judged=scored == OUTCOMES))


def _begin(batch: _Unscored, scores: Scores) -> _Computing:
    if scores.loss.device.type != "cuda":
        # Packed now: the caller may change its tensors before they are sent.
        message = _pack(batch, scores)
        return _Computing(lambda: message, None)
    given = (scores.loss, scores.correct, scores.confidence)
    on_host = Scores(*[_to_host(value.detach()) for value in given if value is not None])
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(scores.loss.device))
    return _Computing(partial(_pack, batch, on_host), done)


def _to_host(value: Tensor) -> Tensor:
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)


def _pack(batch: _Unscored, scores: Scores | None) -> Bytes:
    """Make a batch's message of scores on the host; None: it was not scored."""
    num_rows = len(batch.slot)
    message = np.zeros(HEADER_BYTES + num_rows * ROW_BYTES, np.uint8)
    scored = UNSCORED if scores is None else LOSSES if scores.correct is None else OUTCOMES
    message[:HEADER_BYTES].view(np.int64)[:] = batch.number, scored, batch.ids_hash
    if scores is not None:
        of_rows = _unpack(message[HEADER_BYTES:], judged=scored == OUTCOMES)
        for name, place in vars(of_rows).items():
            value = getattr(scores, name)
            if value is not None:
                place.copy_(value.detach())
    return message


def _unpack(data: Bytes, *, judged: bool) -> Scores:
    """See the scores in a message's bytes behind its header; only losses unless ``judged``."""
    num_rows = len(data) // ROW_BYTES
    loss, confidence = data[: 8 * num_rows], data[8 * num_rows : 12 * num_rows]
    if not judged:
        return Scores(torch.from_numpy(loss.view(np.float64)))
    return Scores(
        torch.from_numpy(loss.view(np.float64)),
        torch.from_numpy(data[12 * num_rows :].view(np.bool_)),
        torch.from_numpy(confidence.view(np.float32)),
    )
