"""Carry rows from store to store while training runs: read, pack, send; receive, check, write.

Two drivers of one engine. Where the transport may be called from several threads, a thread of the
transfer's own advances the `Carrier`: the loader's thread writes ``due_step``, the clock and two
flags, and reads the figures when that thread has ended. Elsewhere the loader's thread does all of
it, between steps.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dataio.exchange.carrier import MAX_IN_FLIGHT, Carrier, Clock
from dataio.plan.history import Scores
from dataio.plan.policies import AtHand, RowStore
from dataio.rows.parcel import Parcel, ParcelBuffers
from dataio.rows.rows import Fetch
from dataio.world import Request, World

__all__ = ["MAX_IN_FLIGHT", "Parcel", "Transfer"]

FIRST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 2e-3
"""Between two looks at messages under way, beside training."""
FINISH_PAUSE_S = 2e-4
"""The same when the loader waits for them."""
IDLE_PAUSE_S = 0.25
"""With nothing under way; a step that has something to send cuts it short."""


class Transfer:
    """Parcels of one rank, out and in, in the order in which they are posted; an `Exchange`.

    Args:
        world: All ranks.
        store: This node's rows.
        sends: What leaves; the receiver has a parcel of the same rows, in the same order.
        receives: What comes in.
        fetch: Reads samples from the source, whose rows came damaged.
        buffers: Memory for parcels, to use again for the next transfer.
        at_hand: What need not be sent; the partners know it too.
        threaded: Whether a thread of its own drives it; None: where the world lets it.
        compress: See `shuffle.Partial`; the same on all ranks.
    """

    def __init__(
        self,
        world: World,
        store: RowStore,
        *,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        fetch: Fetch | None = None,
        buffers: ParcelBuffers | None = None,
        at_hand: AtHand | None = None,
        threaded: bool | None = None,
        compress: Literal["none", "auto", "zstd"] = "none",
    ) -> None:
        self._world = world
        self._sends, self._receives = sends, receives
        # Those at which parcels are posted, last first.
        self._steps = sorted({parcel.step for parcel in [*sends, *receives]}, reverse=True)
        self._last_step = self._steps[0] if self._steps else 0
        self._clock = Clock()
        buffers, compressor = buffers or ParcelBuffers(), None
        if compress != "none":
            from dataio.exchange.compress import Compressor

            compressor = Compressor(compress, buffers)
        self._carrier = Carrier(
            world, store, sends=sends, receives=receives, clock=self._clock, fetch=fetch,
            buffers=buffers, at_hand=at_hand or AtHand(), compressor=compressor,
        )  # fmt: skip
        self._threaded = world.threaded if threaded is None else threaded
        self._thread: threading.Thread | None = None
        self._owner = threading.current_thread()
        self._wake = threading.Event()
        self._hurried = self._stopped = False
        self._error: Exception | None = None
        self._cpu_s = 0.0
        self._pause_s = FIRST_PAUSE_S

    def progress(self, step: int) -> None:
        """Post what is due by this step, take in what has come. Never blocks.

        Raises:
            StallError, ExchangeError: If a partner was silent for too long, or failed; see
                `Carrier.advance`.
        """
        self._clock.tick()
        self._carrier.due_step = step
        if self._threaded:
            if self._begins_any(step):
                self._start()
                self._wake.set()
        else:
            self._drive(lambda: False)
        self._raise()

    def _begins_any(self, step: int) -> bool:
        before = len(self._steps)
        while self._steps and self._steps[-1] <= step:
            self._steps.pop()
        return len(self._steps) < before

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._drive, args=(self._pause,), name="tonari-exchange"
            )
            self._thread.start()

    def _drive(self, pause: Callable[[], bool]) -> None:
        """Advance until all is done, or ``pause``, asked while others must go on, is false."""
        carrier, started = self._carrier, time.thread_time()
        try:
            while not carrier.done and not self._stopped:
                self._wake.clear()
                if carrier.advance():
                    self._pause_s = FIRST_PAUSE_S
                elif not pause():
                    break
        except Exception as error:
            # Raised by `_raise`, on the loader's thread.
            self._error = error
            self._world.keep(carrier)
        self._cpu_s += time.thread_time() - started

    def _pause(self) -> bool:
        longest_s = FINISH_PAUSE_S if self._hurried else LONGEST_PAUSE_S
        pause_s = self._pause_s = min(2 * self._pause_s, longest_s)
        self._wake.wait(pause_s if self._carrier.busy else IDLE_PAUSE_S)
        # A loader's thread that has ended waits for nothing; nobody may be left behind.
        return self._owner.is_alive()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def finish(self, scores: Scores | None) -> dict[str, float]:
        """Complete the exchange; then the scores of the rows that moved follow, if any are kept."""
        carrier, before = self._carrier, self._carrier.received_bytes
        started = time.perf_counter()
        self._clock.tick(longest_gap_s=float("inf"))
        self._hurried = True
        carrier.due_step = self._last_step
        if self._thread is not None:
            self._wake.set()
            # Not for ever: the carrier's own limit ends the thread.
            self._thread.join()
            self._raise()
        # All of it, or what a thread has left whose owner has ended.
        self._owner = threading.current_thread()
        self._drive(self._pause)
        self._raise()
        messages = carrier.messages
        if scores is not None:
            messages += self._move_scores(scores)
        return {
            "rows": carrier.received_rows,
            "sent_bytes": carrier.sent_bytes,
            "raw_bytes": carrier.sent_bytes + carrier.saved_bytes,
            "messages": messages,
            "blocked_s": time.perf_counter() - started,
            "overlap_fraction": before / max(carrier.received_bytes, 1),
            "cpu_s": self._cpu_s,
        }

    def stop(self) -> None:
        """Let go after an error, without the other ranks: nothing is read or written any more."""
        self._stopped = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join()
        if self._carrier.busy:
            self._world.keep(self._carrier)

    def _move_scores(self, scores: Scores) -> int:
        """Send every partner the scores of the rows that went to it, in one message."""
        world = self._world
        requests: list[Request] = []
        peers: list[int] = []
        arriving: list[tuple[NDArray[np.int64], NDArray[np.uint8]]] = []
        for peer, (slots, tag) in _by_peer(self._receives).items():
            arriving.append((slots, np.empty(len(slots) * scores.dtype.itemsize, np.uint8)))
            requests.append(world.irecv(arriving[-1][1], source=peer, tag=tag))
            peers.append(peer)
        leaving = _by_peer(self._sends)
        for peer, (slots, tag) in leaving.items():
            data = np.frombuffer(scores[slots].tobytes(), np.uint8)
            requests.append(world.isend(data, dest=peer, tag=tag))
            peers.append(peer)
        world.wait(requests, peers=peers, doing="exchange scores")
        for slots, arrived in arriving:
            scores[slots] = arrived.view(scores.dtype)
        return len(leaving)


def _by_peer(parcels: Sequence[Parcel]) -> dict[int, tuple[NDArray[np.int64], int]]:
    """Join the slots of each peer's parcels, with the tag of its first."""
    groups: defaultdict[int, list[Parcel]] = defaultdict(list)
    for parcel in parcels:
        groups[parcel.peer].append(parcel)
    return {
        peer: (np.concatenate([parcel.slots for parcel in group]), group[0].tag)
        for peer, group in groups.items()
    }
