"""The network between nodes: one rank of each, in pairs, all pairs of a round at once."""

import statistics
import time
from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from dataio.world import Request, World
from tonari.bench.storage.results.results import MeasuredLink

MESSAGE_BYTES = 4 << 20
NUM_MESSAGES = 4
"""Of one repeat, each way."""
NUM_PINGS = 20
MOST_ROUNDS = 7
"""Eight nodes meet all others; of more, each meets this many."""
NO_DATA = -1.0
SPIN_S = 0.1
DOING = "measuring the network"


def pairs_of_round(round_number: int, num_nodes: int) -> list[tuple[int, int]]:
    """Pair nodes so that over ``num_nodes - 1`` rounds (of an even number) each meets all others.

    With an odd number one node sits out each round, and there is a round more.
    """
    num_seats = num_nodes + num_nodes % 2
    turning = num_seats - 1
    pairs = []
    for seat in range(num_seats // 2):
        one = (round_number + seat) % turning
        other = (round_number - seat) % turning if seat else num_seats - 1
        if max(one, other) < num_nodes:
            pairs.append((min(one, other), max(one, other)))
    return sorted(pairs)


def measure_links(world: World, names: Sequence[str], *, repeats: int) -> list[MeasuredLink]:
    """Measure bandwidth and round trips between nodes. Collective.

    Args:
        world: All ranks.
        names: Of the nodes.
        repeats: Of each pair's bandwidth.

    Returns:
        The links that were measured, on rank 0; elsewhere none. None on one node.
    """
    if world.num_nodes < 2:
        return []
    tag, first = world.open_channel(), [ranks[0] for ranks in world.topology.ranks_of_node]
    links = []
    for number in range(min(world.num_nodes - 1 + world.num_nodes % 2, MOST_ROUNDS)):
        pairs = pairs_of_round(number, world.num_nodes)
        found = np.full(repeats + 1, NO_DATA)
        for one, other in pairs:
            if world.rank in (first[one], first[other]):
                peer = first[other] if world.rank == first[one] else first[one]
                found = _measure(world, peer, tag, repeats)
        gathered = world.allgather_array(found, doing=DOING)
        for one, other in pairs:
            # Either way is timed where it ends; the slower one counts.
            both = gathered[[first[one], first[other]]]
            rates = both[:, 1:].min(axis=0).tolist()
            links.append(
                MeasuredLink(
                    nodes=(names[one], names[other]), bytes_per_s=statistics.median(rates),
                    round_trip_s=float(both[0, 0]), repeats=rates,
                )
            )  # fmt: skip
    return [] if world.rank else links


def _measure(world: World, peer: int, tag: int, repeats: int) -> NDArray[np.float64]:
    """Find the median round trip in seconds, then bytes/s of each repeat."""
    sent = np.ones(MESSAGE_BYTES, np.uint8)
    into = np.zeros((NUM_MESSAGES, MESSAGE_BYTES), np.uint8)

    def swap() -> float:
        started = perf_counter()
        requests = [world.irecv(row, source=peer, tag=tag) for row in into]
        requests += [world.isend(sent, dest=peer, tag=tag) for _ in into]
        world.wait(requests, peers=[peer] * len(requests), doing=DOING)
        return perf_counter() - started

    # The first makes the connection.
    swap()
    round_trip_s = statistics.median(_ping(world, peer, tag) for _ in range(NUM_PINGS))
    return np.array([round_trip_s, *(into.size / swap() for _ in range(repeats))])


def _ping(world: World, peer: int, tag: int) -> float:
    # A byte that way and one back: no message can be empty.
    here, there = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    started = perf_counter()
    if world.rank < peer:
        _spin(world, world.isend(here, dest=peer, tag=tag), peer)
        _spin(world, world.irecv(there, source=peer, tag=tag), peer)
    else:
        _spin(world, world.irecv(there, source=peer, tag=tag), peer)
        _spin(world, world.isend(here, dest=peer, tag=tag), peer)
    return perf_counter() - started


def _spin(world: World, request: Request, peer: int) -> None:
    # The world's own waits sleep between looks, for longer than a message takes.
    until = perf_counter() + SPIN_S
    while not request.test():
        if perf_counter() > until:
            world.wait([request], peers=[peer], doing=DOING)
            return
        time.sleep(0)
