"""Who holds which sample: a directory of which every rank keeps the part of a range of ids.

Rank i * world_size // N keeps the entry of sample i of N: no rank's part grows with the dataset
faster than its pool does. Ranks report to it what they hold, then ask it who holds what they lack.
All messages are arrays, sent between known ranks; their sizes are sent first.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataio.world import Request, World

MESSAGE_BYTES = 64 << 20
NOWHERE = -1
"""Holder of a sample that no rank holds."""

Element = TypeVar("Element", bound=np.generic)


def all_to_all(
    world: World, parts: Sequence[NDArray[Element]], *, tag: int, doing: str
) -> list[NDArray[Element]]:
    """Send every rank its part and hand back what every rank sent here. Collective.

    Args:
        world: All ranks.
        parts: For each rank dtype[n], of any lengths and one dtype.
        tag: One for all messages: they arrive in the order of the calls.
        doing: For the message, should a rank not answer.

    Returns:
        For each rank dtype[n]: In rank order.

    Raises:
        StallError: If a rank does not answer within the world's time limit.
    """
    rank, size = world.rank, world.world_size
    others = [(rank + shift) % size for shift in range(1, size)]
    sizes = {peer: np.array([len(parts[peer])]) for peer in others}
    counts = {peer: np.zeros(1, np.int64) for peer in others}
    _carry(world, sizes, counts, tag=tag, doing=doing)
    received = [np.empty(int(counts[peer][0]) if peer != rank else 0, parts[0].dtype)
                for peer in range(size)]  # fmt: skip
    leaving = {peer: np.ascontiguousarray(parts[peer]) for peer in others}
    _carry(world, leaving, {peer: received[peer] for peer in others}, tag=tag, doing=doing)
    received[rank] = parts[rank]
    return received


def _carry(
    world: World,
    leaving: dict[int, NDArray[Element]],
    arriving: dict[int, NDArray[Element]],
    *,
    tag: int,
    doing: str,
) -> None:
    requests: list[Request] = []
    peers: list[int] = []
    for peer, data in arriving.items():
        for piece in _pieces(data):
            requests.append(world.irecv(piece, source=peer, tag=tag))
            peers.append(peer)
    for peer, data in leaving.items():
        for piece in _pieces(data):
            requests.append(world.isend(piece, dest=peer, tag=tag))
            peers.append(peer)
    world.wait(requests, peers=peers, doing=doing)


def _pieces(data: NDArray[Element]) -> list[NDArray[np.uint8]]:
    raw = data.view(np.uint8)
    return [raw[first : first + MESSAGE_BYTES] for first in range(0, len(raw), MESSAGE_BYTES)]


def keeping_ranks(
    world: World, sample_ids: NDArray[np.int64], num_samples: int
) -> NDArray[np.int64]:
    """int64[n]: The rank that keeps a sample's entry; ascending with the ids."""
    return sample_ids * world.world_size // num_samples


def find_holders(
    world: World,
    *,
    held: NDArray[np.int64],
    stays: NDArray[np.bool_],
    missing: NDArray[np.int64],
    num_samples: int,
    tag: int,
) -> NDArray[np.int64]:
    """Find one rank that holds each missing sample. Collective.

    Where several do, one whose row stays is chosen, so that the others may let go of theirs at
    once. Between ranks that are alike the sample's number decides.

    Args:
        world: All ranks.
        held: int64[n]: Samples that this rank can give; local ranks name each row once.
        stays: bool[n]: Whether the row belongs where it lies.
        missing: int64[m]: Samples that this rank lacks.
        num_samples: Of the dataset.
        tag: Of the messages.

    Returns:
        int64[m]: A rank, or NOWHERE.
    """
    order = np.argsort(held, kind="stable")
    # The lowest bit: whether the row leaves.
    parts = by_keeper(world, held[order], num_samples, 2 * held[order] + ~stays[order])
    announced = all_to_all(world, parts, tag=tag, doing="report which rows are held")
    order = np.argsort(missing, kind="stable")
    parts = by_keeper(world, missing[order], num_samples, missing[order])
    asked = all_to_all(world, parts, tag=tag, doing="ask for missing rows")
    answers = all_to_all(world, _choose(announced, asked), tag=tag, doing="answer who holds rows")
    holders = np.empty(len(missing), np.int64)
    holders[order] = np.concatenate(answers)
    return holders


def by_keeper(
    world: World, sorted_ids: NDArray[np.int64], num_samples: int, values: NDArray[Element]
) -> list[NDArray[Element]]:
    """Cut values that are sorted by sample into a part for each rank that keeps their entries."""
    keepers = keeping_ranks(world, sorted_ids, num_samples)
    return np.split(values, np.searchsorted(keepers, np.arange(1, world.world_size)))


def _choose(
    announced: Sequence[NDArray[np.int64]], asked: Sequence[NDArray[np.int64]]
) -> list[NDArray[np.int64]]:
    """Answer every rank's questions from what was announced."""
    reports = np.concatenate(announced)
    ids, leaves = reports >> 1, reports & 1
    ranks = np.repeat(np.arange(len(announced)), [len(part) for part in announced])
    priority = (ranks - ids) % len(announced)
    order = np.lexsort((priority, leaves, ids))
    known, first = np.unique(ids[order], return_index=True)
    if not len(known):
        return [np.full(len(part), NOWHERE, np.int64) for part in asked]
    holders = ranks[order[first]]
    places = [np.minimum(np.searchsorted(known, part), len(known) - 1) for part in asked]
    return [
        np.where(known[place] == part, holders[place], NOWHERE)
        for place, part in zip(places, asked, strict=True)
    ]
