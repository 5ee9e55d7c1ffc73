"""How fast pairs of nodes exchange bytes, and how far their clocks differ: a second or two."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataio.world import World
from tonari.checks import Finding

PAIR_BYTES = 4 << 20
PINGS = 20
REPEATS = 5
ALL_PAIRS_OF = 8
"""Up to so many places every pair is measured; beyond, log2 of them for each."""
SLOW_PAIR = 1 / 3
CLOCK_S = 1.0
_DATA, _ANSWER = 1, 2


@dataclass(frozen=True)
class Pair:
    """Two places that exchanged bytes alone.

    Attributes:
        names: Of both.
        bytes_per_s: One way.
        latency_s: Half a round trip of one byte.
    """

    names: tuple[str, str]
    bytes_per_s: float
    latency_s: float


def rounds(num_places: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs: each pair once, up to ALL_PAIRS_OF places, else a sample."""
    full = 1 << max(num_places - 1, 0).bit_length()
    masks = (
        range(1, full) if num_places <= ALL_PAIRS_OF else [1 << n for n in range(full.bit_length())]
    )
    for mask in masks:
        pairs = [(place, place ^ mask) for place in range(num_places)]
        met = [(one, other) for one, other in pairs if one < other < num_places]
        if met:
            yield met


def measure_pairs(world: World, places: list[int], names: list[str]) -> list[Pair]:
    """Let pairs of ranks exchange bytes, disjoint pairs at a time. Collective.

    Args:
        world: All ranks.
        places: One rank of each node, or all ranks of one node; the others wait.
        names: Of the places, for reports.

    Returns:
        All pairs, on every rank.
    """
    mine = []
    for met in rounds(len(places)):
        for one, other in met:
            if world.rank in (places[one], places[other]):
                first = world.rank == places[one]
                peer = places[other] if first else places[one]
                latency_s, bytes_per_s = _exchange(world, peer, first=first)
                if first:
                    mine.append((one, other, bytes_per_s, latency_s))
        world.barrier(doing="measuring pairs (doctor)")
    data = np.array(mine, np.float64).tobytes()
    gathered = world.allgather(data, doing="gathering what pairs measured (doctor)")
    rows = [
        row for text in gathered for row in np.frombuffer(text, np.float64).reshape(-1, 4).tolist()
    ]
    return [
        Pair((names[int(one)], names[int(other)]), bytes_per_s, latency_s)
        for one, other, bytes_per_s, latency_s in rows
    ]


def clock_offsets(world: World, places: list[int]) -> list[float]:
    """Ask one rank of each node for its clock. Collective.

    Returns:
        On rank ``places[0]``: how far each is ahead of its own, in seconds. Elsewhere nothing.
    """
    found = [0.0]
    for place in places[1:]:
        if world.rank == places[0]:
            found.append(min((_ask_clock(world, place) for _ in range(3)), key=lambda a: a[1])[0])
        elif world.rank == place:
            for _ in range(3):
                _receive(world, np.empty(1, np.uint8), places[0], _DATA)
                _send(world, np.array([time.time()]).view(np.uint8), places[0], _ANSWER)
    return found if world.rank == places[0] else []


def judge_pairs(pairs: list[Pair], *, across_nodes: bool) -> Finding:
    """Compare the slowest pair with the others."""
    check = "pairs of nodes" if across_nodes else "pairs of ranks"
    if not pairs:
        return Finding(check, "fine", "only one")
    rates = sorted(pair.bytes_per_s for pair in pairs)
    median = rates[len(rates) // 2]
    slow = min(pairs, key=lambda pair: pair.bytes_per_s)
    late = max(pairs, key=lambda pair: pair.latency_s)
    found = (
        f"{len(pairs)} measured, median {median / 1e6:,.0f} MB/s; slowest {_words(slow)} "
        f"{slow.bytes_per_s / 1e6:,.0f} MB/s; latest {_words(late)} {late.latency_s * 1e6:,.0f} us"
    )
    if across_nodes and slow.bytes_per_s < SLOW_PAIR * median:
        cure = (
            f"{_words(slow)} is far slower than the others: leave one of them out "
            "(sbatch --exclude) and report it; see that all take the same interface"
        )
        return Finding(check, "look", found, cure)
    return Finding(check, "fine", found)


def judge_clocks(offsets: list[float], names: list[str]) -> Finding:
    """Compare the nodes' clocks with that of the first."""
    worst = max(range(len(offsets)), key=lambda place: abs(offsets[place]))
    found = f"at most {abs(offsets[worst]) * 1e3:,.1f} ms apart"
    if abs(offsets[worst]) < CLOCK_S:
        return Finding("clocks", "fine", found)
    cure = (
        f"{names[worst]} is {offsets[worst]:+,.1f} s from {names[0]}: ages of files and the order "
        "of log lines are wrong; ask the administrator for a time service (chrony) there"
    )
    return Finding("clocks", "look", found, cure)


def _exchange(world: World, peer: int, *, first: bool) -> tuple[float, float]:
    """Be one of a pair: latency and rate, on the first of them."""
    ping, data = np.zeros(1, np.uint8), np.zeros(PAIR_BYTES, np.uint8)
    times = []
    for buffer, repeats in ((ping, PINGS), (data, REPEATS)):
        spent = []
        for _ in range(repeats):
            started = time.perf_counter()
            if first:
                _send(world, buffer, peer, _DATA)
                _receive(world, ping, peer, _ANSWER)
            else:
                _receive(world, buffer, peer, _DATA)
                _send(world, ping, peer, _ANSWER)
            spent.append(time.perf_counter() - started)
        # The best: a busy processor makes some late, a slow link all.
        times.append(min(spent))
    latency_s = times[0] / 2
    return latency_s, PAIR_BYTES / max(times[1] - latency_s, 1e-9)


def _ask_clock(world: World, place: int) -> tuple[float, float]:
    answer = np.empty(1, np.float64)
    asked, started = time.time(), time.perf_counter()
    _send(world, np.zeros(1, np.uint8), place, _DATA)
    _receive(world, answer.view(np.uint8), place, _ANSWER)
    trip_s = time.perf_counter() - started
    return float(answer[0]) - asked - trip_s / 2, trip_s


def _send(world: World, data: NDArray[np.uint8], peer: int, tag: int) -> None:
    world.wait([world.isend(data, dest=peer, tag=tag)], peers=[peer], doing="sending (doctor)")


def _receive(world: World, into: NDArray[np.uint8], peer: int, tag: int) -> None:
    world.wait([world.irecv(into, source=peer, tag=tag)], peers=[peer], doing="receiving (doctor)")


def _words(pair: Pair) -> str:
    return " - ".join(pair.names)
