"""What a batch's rows cost, from the rank that scores them back to the one that reads them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataio.world import Request, World

Bytes = NDArray[np.uint8]
HEADER_BYTES, ROW_BYTES = 16, 13
"""int64 number of the batch and whether it was scored; loss, confidence and correct of a row."""


@dataclass(frozen=True)
class Scores:
    """Of one batch: float64[batch], bool[batch], float32[batch]."""

    loss: Tensor
    correct: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class _Computing:
    """Scores on their way from the device."""

    number: int
    scores: Scores
    done: torch.cuda.Event | None


class ScoreSender:
    """The scorer's end. Never waits for the device until it settles.

    Args:
        world: All ranks.
        reader: Who gets the scores.
        tag: Of the messages.
    """

    def __init__(self, world: World, *, reader: int, tag: int) -> None:
        self._world, self._reader, self._tag = world, reader, tag
        # Delivered and not scored yet: a tensor that names the batch, and its number.
        self._open: dict[int, Tensor] = {}
        self._computing: deque[_Computing] = deque()
        self._sending: list[Request] = []

    def expect(self, number: int, slot: Tensor) -> None:
        """A batch was delivered, which may be scored."""
        self._open[number] = slot

    def send(self, slot: Tensor, scores: Scores) -> None:
        """Send a batch's scores as soon as the device has them.

        Raises:
            ValueError: If it is no batch that was delivered and not yet scored.
        """
        number = next((number for number, its in self._open.items() if its is slot), None)
        if number is None:
            raise ValueError(
                "report: found a batch that was reported before, or not delivered in this epoch; "
                "report each batch that the loader yields once"
            )
        del self._open[number]
        self._computing.append(_begin(number, scores))
        self._advance()

    def settle(self) -> None:
        """Send all that is left; batches that nobody scored are said to be so. Blocks."""
        while self._computing:
            computing = self._computing.popleft()
            if computing.done is not None:
                computing.done.synchronize()
            self._post(computing.number, computing.scores)
        for number, slot in self._open.items():
            self._post(number, None, num_rows=len(slot))
        self._open.clear()
        peers = [self._reader] * len(self._sending)
        self._world.wait(self._sending, peers=peers, doing="sending losses to the reader")
        self._sending = []

    def _advance(self) -> None:
        while self._computing:
            computing = self._computing[0]
            if computing.done is not None and not computing.done.query():  # type: ignore[no-untyped-call]
                break
            self._post(computing.number, self._computing.popleft().scores)
        self._sending = [request for request in self._sending if not request.test()]

    def _post(self, number: int, scores: Scores | None, *, num_rows: int = 0) -> None:
        header = np.array([number, scores is not None], np.int64).view(np.uint8)
        body = _pack(scores) if scores is not None else np.zeros(num_rows * ROW_BYTES, np.uint8)
        data = np.concatenate([header, body])
        self._sending.append(self._world.isend(data, dest=self._reader, tag=self._tag))


class ScoreReceiver:
    """The reader's end: receives are posted ahead, and taken in when somebody looks.

    Args:
        world: All ranks.
        scorer: Who sends.
        tag: Of the messages.
        take: Given the batch's slots and weights, and its scores.
    """

    def __init__(
        self, world: World, *, scorer: int, tag: int,
        take: Callable[[Tensor, Tensor, Scores, bool], None],
    ) -> None:  # fmt: skip
        self._world, self._scorer, self._tag, self._take = world, scorer, tag, take
        self._open: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self._coming: deque[tuple[Request, Bytes]] = deque()

    def expect(self, number: int, slot: Tensor, weight: Tensor, *, trains: bool) -> None:
        """A batch was delivered, which may be scored; take in what has come of those before."""
        self._open[number] = (slot, weight, trains)
        buffer = np.empty(HEADER_BYTES + ROW_BYTES * len(slot), np.uint8)
        request = self._world.irecv(buffer, source=self._scorer, tag=self._tag)
        self._coming.append((request, buffer))
        while self._coming[0][0].test():
            self._take_in(self._coming.popleft()[1])
            if not self._coming:
                break

    def settle(self) -> None:
        """Take in all scores of the batches delivered. Blocks for the scorer."""
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
        number, scored = buffer[:HEADER_BYTES].view(np.int64).tolist()
        slot, weight, trains = self._open.pop(number)
        if scored:
            self._take(slot, weight, _unpack(buffer[HEADER_BYTES:]), trains)


def _begin(number: int, scores: Scores) -> _Computing:
    loss = scores.loss.detach().to(torch.float64)
    told = Scores(loss, scores.correct.detach(), scores.confidence.detach().float())
    if loss.device.type != "cuda":
        # Copied: the caller may change its tensors before they are sent.
        return _Computing(number, _each(told, torch.Tensor.clone), None)
    told = _each(told, _to_host)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(loss.device))
    return _Computing(number, told, done)


def _each(scores: Scores, change: Callable[[Tensor], Tensor]) -> Scores:
    return Scores(change(scores.loss), change(scores.correct), change(scores.confidence))


def _to_host(value: Tensor) -> Tensor:
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)


def _pack(scores: Scores) -> Bytes:
    arrays = (scores.loss.numpy(), scores.confidence.numpy(), scores.correct.numpy())
    return np.concatenate([array.view(np.uint8) for array in arrays])


def _unpack(data: Bytes) -> Scores:
    num_rows = len(data) // ROW_BYTES
    loss, confidence = data[: 8 * num_rows], data[8 * num_rows : 12 * num_rows]
    return Scores(
        torch.from_numpy(loss.view(np.float64)),
        torch.from_numpy(data[12 * num_rows :].view(np.bool_)),
        torch.from_numpy(confidence.view(np.float32)),
    )
