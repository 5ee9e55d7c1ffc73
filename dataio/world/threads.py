"""Ranks as threads of one process: worlds of any size in milliseconds, for tests and notebooks.

Every rank's thread writes mail and posts receives; ``_Post.lock`` guards both. Bytes are copied
when sent.
"""

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import numpy as np

from dataio.base.errors import WorldError
from dataio.world.base import Bytes, Request
from dataio.world.topology import Topology
from dataio.world.world import World

Result = TypeVar("Result")
Route = tuple[int, int, int]


class _Post:
    """What all ranks share: mail and receives by (source, dest, tag), and why the job ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.mail: defaultdict[Route, deque[bytes]] = defaultdict(deque)
        self.posted: defaultdict[Route, deque[_Receive]] = defaultdict(deque)
        self.ended: str | None = None

    def check(self) -> None:
        if self.ended is not None:
            raise WorldError(self.ended)


class _Sent:
    def __init__(self, post: _Post) -> None:
        self._post = post

    def test(self) -> bool:
        self._post.check()
        return True


class _Receive:
    def __init__(self, post: _Post, route: Route, into: Bytes) -> None:
        self._post, self._route, self._into, self._done = post, route, into, False

    def test(self) -> bool:
        self._post.check()
        with self._post.lock:
            mail, posted = self._post.mail[self._route], self._post.posted[self._route]
            # The oldest receive takes the oldest mail, whichever receive is being tested.
            while mail and posted:
                posted.popleft()._take(mail.popleft())
        return self._done

    def _take(self, data: bytes) -> None:
        source, dest, tag = self._route
        if len(data) != len(self._into):
            raise WorldError(
                f"rank {dest}: received {len(data)} bytes from rank {source} with tag {tag}, "
                f"expected {len(self._into)}; both ranks must agree on sizes beforehand"
            )
        self._into[:] = np.frombuffer(data, np.uint8)
        self._done = True


class ThreadTransport:
    """One rank among threads of this process."""

    def __init__(self, post: _Post, *, rank: int, world_size: int) -> None:
        self._post, self._rank, self._world_size = post, rank, world_size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def threaded(self) -> bool:
        return True

    def isend(self, data: Bytes, *, dest: int, tag: int) -> Request:
        self._post.check()
        with self._post.lock:
            self._post.mail[self._rank, dest, tag].append(data.tobytes())
        return _Sent(self._post)

    def irecv(self, into: Bytes, *, source: int, tag: int) -> Request:
        self._post.check()
        route = (source, self._rank, tag)
        request = _Receive(self._post, route, into)
        with self._post.lock:
            self._post.posted[route].append(request)
        return request

    def abort(self, message: str) -> NoReturn:
        with self._post.lock:
            self._post.ended = self._post.ended or message
        raise WorldError(message)

    def close(self) -> None:
        return None


def thread_worlds(nodes: Sequence[int], timeout_s: float = 30.0) -> list[World]:
    """Make the worlds of all ranks, one for each thread to come.

    Args:
        nodes: Replicas on each node, such as (2, 2); ranks are numbered node by node.
        timeout_s: Longest wait for another rank, > 0.
    """
    topology, post = Topology.from_layout(nodes), _Post()
    size = topology.world_size
    transports = [ThreadTransport(post, rank=rank, world_size=size) for rank in range(size)]
    return [World(transport, topology, timeout_s=timeout_s) for transport in transports]


def run_threads(worlds: Sequence[World], function: Callable[[World], Result]) -> list[Result]:
    """Run a function on every rank, a thread each. Blocks until all have ended.

    Returns:
        The results, in rank order.

    Raises:
        BaseException: The first that any rank raised; the other ranks were aborted.
    """
    results: dict[int, Result] = {}
    errors: deque[BaseException] = deque()

    def run(world: World) -> None:
        try:
            results[world.rank] = function(world)
        except BaseException as error:
            errors.append(error)
            # Aborting ends the others and raises here too, where the error is already on its way
            # out.
            with contextlib.suppress(WorldError):
                world.abort(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(world,), daemon=True) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[world.rank] for world in worlds]
