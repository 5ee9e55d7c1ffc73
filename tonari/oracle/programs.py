"""What every rank of a job does in a step, from what one rank of each kind did. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from tonari.oracle.record import Message, Wait
from tonari.oracle.stopwatch import Timed
from tonari.oracle.traffic import axes_of
from tonari.trainer.mesh.mesh import AXES


def programs(of_stages: Sequence[Timed], world_size: int, sizes: Sequence[int]) -> list[Timed]:
    """Hand out what each rank of a job does, in the order of the ranks.

    Args:
        of_stages: What the first rank of each kind does; see `first_ranks`.
        world_size: Ranks of the job.
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``.
    """
    kinds = [timed.rank for timed in of_stages]
    return [
        moved(of_stages[kinds.index(first_like(rank, kinds, world_size, sizes))], rank, sizes)
        for rank in range(world_size)
    ]


def first_ranks(world_size: int, sizes: Sequence[int], *, num_tiles: int) -> list[int]:
    """List the first rank of each kind, which compute where nobody else does.

    By coordinate of pp; and where samples are cut, by tile: those at an end have fewer neighbours.
    """
    return [
        coordinate * (world_size // sizes[0]) + tile
        for coordinate in range(sizes[0])
        for tile in range(num_tiles)
    ]


def first_like(rank: int, firsts: Sequence[int], world_size: int, sizes: Sequence[int]) -> int:
    """Find which of `first_ranks` computes as a rank does."""
    num_tiles = len(firsts) // sizes[0]
    return firsts[rank * sizes[0] // world_size * num_tiles + rank % num_tiles]


def moved(timed: Timed, rank: int, sizes: Sequence[int]) -> Timed:
    """Let another rank at the same coordinate of pp do what a rank does.

    Its groups are those along the same axes, its peers those as far along pp.

    Args:
        timed: What the first one does.
        rank: The other rank.
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``.
    """
    if timed.rank == rank:
        return timed

    def of_rank(event: Message | Wait) -> Message | Wait:
        if isinstance(event, Wait):
            return event
        peer = None if event.peer is None else event.peer + rank - timed.rank
        axes = axes_of(event.ranks, sizes)
        return Message(event.kind, group_of(rank, axes, sizes), event.num_bytes, peer)

    return replace(timed, rank=rank, events=tuple(map(of_rank, timed.events)))


def group_of(rank: int, axes: Sequence[str], sizes: Sequence[int]) -> tuple[int, ...]:
    """List the ranks, ascending, that differ from one along some axes only."""
    ranks, stride = [rank], 1
    for axis, size in zip(reversed(AXES), reversed(sizes), strict=True):
        if axis in axes:
            ranks = [
                each + (place - each // stride % size) * stride
                for each in ranks
                for place in range(size)
            ]
        stride *= size
    return tuple(sorted(ranks))
