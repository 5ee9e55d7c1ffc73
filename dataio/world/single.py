"""One process alone: no other rank to send to."""

import sys
from typing import NoReturn

from dataio.world.base import Bytes, Request
from dataio.world.topology import Topology
from dataio.world.world import World


class SingleTransport:
    """Rank 0 of 1."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def threaded(self) -> bool:
        return False

    def isend(self, data: Bytes, *, dest: int, tag: int) -> Request:
        raise ValueError(f"world: there is one rank, none numbered {dest} to send to")

    def irecv(self, into: Bytes, *, source: int, tag: int) -> Request:
        raise ValueError(f"world: there is one rank, none numbered {source} to receive from")

    def abort(self, message: str) -> NoReturn:
        sys.exit(message)

    def close(self) -> None:
        return None


def single_world() -> World:
    """Make the world of one process."""
    return World(SingleTransport(), Topology((0,)))
