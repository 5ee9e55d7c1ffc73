"""Two ranks hand one another equally many bytes, in messages that are polled, not waited for."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dataio.world import Request, World

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_IN_FLIGHT = 4
"""Messages that may be under way in each direction."""

Header = NDArray[np.uint64]


class Handover:
    """One state out and one in, between two ranks that both make a ``Handover``.

    A header goes first: bytes follow only when both ranks agree on what they are, as a medium may
    cut, or end the process, where they do not.

    Args:
        world: All ranks.
        peer: The other rank.
        tag: Of all messages, the same at both.
        mine: uint8[num_bytes]: Must stay unchanged until all is done.
        theirs: uint8[num_bytes]: Written until all is done.
        header: uint64[n]: What mine is.
        check: Called with the other rank's header; raises if the two do not go together.
        doing: For the message of a stall.
        max_message_bytes: Bytes of a message, at most.
    """

    def __init__(
        self,
        world: World,
        *,
        peer: int,
        tag: int,
        mine: NDArray[np.uint8],
        theirs: NDArray[np.uint8],
        header: Header,
        check: Callable[[Header], None],
        doing: str,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._world, self._peer, self._tag, self._doing = world, peer, tag, doing
        self._mine, self._theirs = mine, theirs
        self._header, self._check = header, check
        self._max_message_bytes = max_message_bytes
        self._their_header = np.empty_like(header)
        self._agreed = False
        self._posted = 0
        self._under_way: list[tuple[Request, Request, int]] = []
        self.arrived_bytes = 0
        self.messages = 0

    def poll(self) -> bool:
        """Post what may be posted, and return whether all is done. Never blocks."""
        if self.messages == 0:
            self._post(self._header.view(np.uint8), self._their_header.view(np.uint8))
        self._under_way = [pair for pair in self._under_way if not self._arrived(pair)]
        if not self._agreed:
            if self._under_way:
                return False
            self._check(self._their_header)
            self._agreed = True
            self.arrived_bytes = 0
        while self._posted < len(self._mine) and len(self._under_way) < MAX_IN_FLIGHT:
            part = slice(self._posted, self._posted + self._max_message_bytes)
            self._post(self._mine[part], self._theirs[part])
            self._posted = min(part.stop, len(self._mine))
        return not self._under_way

    def wait(self) -> None:
        """Do all that is left. Blocks for the other rank, ``world.timeout_s`` a message at most.

        Raises:
            StallError: Names the other rank.
        """
        while not self.poll():
            requests = [request for pair in self._under_way for request in pair[:2]]
            peers = [self._peer] * len(requests)
            self._world.wait(requests, peers=peers, doing=self._doing)

    def _post(self, out: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
        receive = self._world.irecv(into, source=self._peer, tag=self._tag)
        send = self._world.isend(out, dest=self._peer, tag=self._tag)
        self._under_way.append((receive, send, len(into)))
        self.messages += 1

    def _arrived(self, pair: tuple[Request, Request, int]) -> bool:
        done = all([pair[0].test(), pair[1].test()])
        self.arrived_bytes += pair[2] if done else 0
        return done
