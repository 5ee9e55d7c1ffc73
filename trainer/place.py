"""Who is where in the mesh: which replica, which stages, who reads its rows and who scores them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
LOOPED: tuple[Schedule, ...] = ("interleaved", "zero_bubble")
"""A rank's stages lie a whole round of ranks apart."""

FOLDED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""The stages go down the ranks and up again: the first rank owns the last stage too."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one rank is to the job.

    Attributes:
        sizes: Ranks along each of ``trainer.mesh.AXES``.
        rank: Of the job.
        replica: Data-parallel coordinate; all ranks of a replica train the same rows.
        num_replicas: Replicas of the job.
        ranks: All ranks of this replica, ascending.
        reader: The one of them that reads the rows.
        scorer: The one of them whose losses count.
        input_ranks: Those of them that own the first stage.
        target_ranks: Those that own the last.
        readers: Of all replicas, ascending; the j-th reads replica j's rows.
        stages: Numbers of the stages that this rank owns.
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
    readers: tuple[int, ...]
    stages: tuple[int, ...]

    @property
    def reads(self) -> bool:
        """Whether this rank reads its replica's rows."""
        return self.rank == self.reader

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


def place_of(rank: int, sizes: Sequence[int], *, schedule: Schedule, virtual: int) -> Place:
    """Find what a rank is to the job; any rank can compute any other's.

    Args:
        rank: In [0, product of the sizes).
        sizes: Ranks along each of ``trainer.mesh.AXES``; the last varies fastest.
        schedule: The order of a pipeline's work.
        virtual: Stages a rank, where the schedule is looped.
    """
    pp, dp_replicate, dp_shard, cp, tp = sizes
    num_replicas, inner = dp_replicate * dp_shard, cp * tp
    pp_rank, replica = divmod(rank // inner, num_replicas)
    last = num_stages(pp, schedule, virtual) - 1
    # One tuple a pipeline rank: this replica's ranks there, tp and cp peers side by side.
    starts = [(row * num_replicas + replica) * inner for row in range(pp)]
    peers = [tuple(range(start, start + inner)) for start in starts]
    owned = [stages_of(row, pp, schedule, virtual) for row in range(pp)]
    target_ranks = next(peers[row] for row in range(pp) if last in owned[row])
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
        readers=tuple(range(0, num_replicas * inner, inner)),
        stages=owned[pp_rank],
    )
