"""Who is where in the mesh: which replica, which stages, who reads its rows and who scores them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from dataio.world import Topology
from tonari.trainer.errors import ConfigError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
LOOPED: tuple[Schedule, ...] = ("interleaved", "zero_bubble")
"""A rank's stages lie a whole round of ranks apart."""

FOLDED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""The stages go down the ranks and up again: the first rank owns the last stage too."""

Targets = Literal["send", "read"]
"""How the last stage gets its columns where no node has it and the first: the reader sends them, or
the scorer reads them."""


SPLIT: tuple[Schedule, ...] = ("zero_bubble", *FOLDED)
"""Their backward pass goes twice over a stage: for its input, and later for its weights."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one rank is to the job.

    Attributes:
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``.
        rank: Of the job.
        replica: Data-parallel coordinate; all ranks of a replica train the same rows.
        num_replicas: Replicas of the job.
        ranks: All ranks of this replica, ascending.
        reader: The one of them that reads the rows.
        scorer: The one of them whose losses count.
        input_ranks: Those of them that own the first stage.
        target_ranks: Those that own the last.
        readers: Of all replicas, ascending; the j-th reads replica j's rows.
        scorers: Of all replicas, ascending.
        stages: Numbers of the stages that this rank owns.
        tiles: Whether each rank of cp has a tile of every sample.
    """

    sizes: tuple[int, ...]
    rank: int
    replica: int
    num_replicas: int
    ranks: tuple[int, ...]
    reader: int
    scorer: int
    input_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    readers: range
    scorers: range
    stages: tuple[int, ...]
    tiles: bool = False

    @property
    def tile(self) -> int:
        """Number of this rank's tile; 0 where samples are whole."""
        *_, cp, tp = self.sizes
        return self.rank // tp % cp if self.tiles else 0

    @property
    def reads(self) -> bool:
        """Whether this rank reads its replica's rows."""
        return self.rank == self.reader

    @property
    def is_lone(self) -> bool:
        """Whether its replica, or its tile of one, has no other rank."""
        pp, _, _, cp, tp = self.sizes
        return pp * cp * tp == 1

    @property
    def has_input(self) -> bool:
        """Whether this rank owns the first stage."""
        return self.rank in self.input_ranks

    @property
    def has_target(self) -> bool:
        """Whether this rank owns the last stage."""
        return self.rank in self.target_ranks


def num_stages(pp: int, schedule: Schedule, virtual: int) -> int:
    """Count the stages that a model is cut into.

    Args:
        pp: Ranks of a pipeline.
        schedule: The order of their work.
        virtual: Stages a rank, where the schedule is looped.
    """
    if schedule in LOOPED:
        return pp * virtual
    return 2 * pp if schedule in FOLDED else pp


def stages_of(pp_rank: int, pp: int, schedule: Schedule, virtual: int) -> tuple[int, ...]:
    """Say which stages a rank of a pipeline owns, ascending.

    Args:
        pp_rank: In [0, pp).
        pp: Ranks of the pipeline.
        schedule: The order of their work.
        virtual: Stages a rank, where the schedule is looped.
    """
    if schedule in FOLDED:
        return (pp_rank, 2 * pp - 1 - pp_rank)
    return tuple(range(pp_rank, num_stages(pp, schedule, virtual), pp))


def place_of(
    rank: int, sizes: Sequence[int], *, schedule: Schedule, virtual: int, tiles: bool = False
) -> Place:
    """Find what a rank is to the job; any rank can compute any other's.

    Args:
        rank: In [0, product of the sizes).
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``; the last varies fastest.
        schedule: The order of a pipeline's work.
        virtual: Stages a rank, where the schedule is looped.
        tiles: As of `Place`.
    """
    pp, dp_replicate, dp_shard, cp, tp = sizes
    num_replicas, inner = dp_replicate * dp_shard, cp * tp
    pp_rank, replica = divmod(rank // inner, num_replicas)
    last = num_stages(pp, schedule, virtual) - 1
    # One tuple a pipeline rank: this replica's ranks there, tp and cp peers side by side.
    starts = [(row * num_replicas + replica) * inner for row in range(pp)]
    peers = [tuple(range(start, start + inner)) for start in starts]
    owned = [stages_of(row, pp, schedule, virtual) for row in range(pp)]
    last_row = next(row for row in range(pp) if last in owned[row])
    target_ranks, first_scorer = peers[last_row], last_row * num_replicas * inner
    return Place(
        sizes=tuple(sizes),
        rank=rank,
        replica=replica,
        num_replicas=num_replicas,
        ranks=tuple(chain.from_iterable(peers)),
        reader=peers[0][0],
        scorer=target_ranks[0],
        input_ranks=peers[0],
        target_ranks=target_ranks,
        readers=range(0, num_replicas * inner, inner),
        scorers=range(first_scorer, first_scorer + num_replicas * inner, inner),
        stages=owned[pp_rank],
        tiles=tiles,
    )


def tile_of(place: Place) -> Place:
    """Find a rank's place among those of its replica that have its tile, as if these were all."""
    *outer, cp, tp = place.sizes
    first, tile = place.tile * tp, place.tile

    def own(ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank // tp % cp == tile)

    def moved(ranks: range) -> range:
        return range(ranks.start + first, ranks.stop + first, ranks.step)

    return replace(
        place, sizes=(*outer, 1, tp), ranks=own(place.ranks),
        reader=place.reader + first, scorer=place.scorer + first,
        input_ranks=own(place.input_ranks), target_ranks=own(place.target_ranks),
        readers=moved(place.readers), scorers=moved(place.scorers),
    )  # fmt: skip


def last_stage_reads(place: Place, node_of_rank: Sequence[int], targets: Targets) -> bool:
    """Decide for the whole job whether the scorers read the last stage's columns.

    They do where targets are read, and some replica has its first and its last stage on different
    nodes.

    Args:
        place: Any rank's.
        node_of_rank: Of all ranks of the job.
        targets: How the last stage gets its columns.

    Raises:
        ConfigError: If the scorers lie on their nodes otherwise than the readers on theirs, so that
            their loaders would not deal the same rows.
    """
    if targets == "send":
        return False
    ends = [tuple(node_of_rank[rank] for rank in ranks) for ranks in (place.readers, place.scorers)]
    if ends[0] == ends[1]:
        return False
    layouts = [Topology.from_names([str(node) for node in nodes]).node_of_rank for nodes in ends]
    if layouts[0] != layouts[1]:
        raise ConfigError(
            f'mesh.targets is "read", but the first stages of the replicas are on nodes {ends[0]} '
            f"and the last stages on {ends[1]}, expected as many replicas to share a node here as "
            'there; give each stage whole nodes, or mesh.targets="send"'
        )
    return True


def feed_of(place: Place, *, last_stage_reads: bool) -> Place:
    """Find a rank's feed: its place among those ranks of its replica that one of them reads for.

    Args:
        place: The rank's, in the replica.
        last_stage_reads: Whether the last stage's ranks are a feed, whose reader is the scorer, and
            the others are one; if not, the replica is one. The function of that name decides it.
    """
    if not last_stage_reads:
        return place
    if place.has_target:
        return replace(
            place, ranks=place.target_ranks, reader=place.scorer, readers=place.scorers,
            input_ranks=(),
        )  # fmt: skip
    others = tuple(rank for rank in place.ranks if rank not in place.target_ranks)
    return replace(place, ranks=others, target_ranks=())
