"""What a rank holds in memory: parameters, gradients, the optimizer's state, activations."""

import math
from dataclasses import dataclass

from tonari.trainer.config.config import MeshConfig
from tonari.trainer.config.model import TEXT_MODELS
from tonari.trainer.config.optimizer import OptimizerConfig
from tonari.trainer.mesh.place import FOLDED, LOOPED, Schedule
from tonari.trainer.run.build import RunLayout

FLOAT_BYTES = {"float32": 4, "bfloat16": 4, "float64": 8}
"""Of a parameter as it is kept; bfloat16 is that of the computation."""

COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}

TRANSFORMERS = ("vit", *TEXT_MODELS)
"""Kinds of model whose blocks tp splits alike, with sequence_parallel or without."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest rank of a pipeline rank.

    Attributes:
        parameters_bytes: Its own, after splitting and sharding.
        gathered_bytes: Whole parameters while they are used: of the largest block, or of the part
            where a pipeline keeps them gathered; none where nothing is sharded or cast.
        gradients_bytes: As its own parameters.
        optimizer_bytes: SGD with momentum keeps one number a parameter, AdamW two, and another
            optimizer is taken to; an average of the weights is one more, and what PowerSGD has
            not sent yet.
        activations_bytes: What autograd keeps of the microbatches under way, an estimate: counted
            on the stage as one process runs it; what selective recomputation saves is left in. Of a
            transformer tp divides it by its size with sequence_parallel, else 24 parts of 34 of it.
        copies_bytes: Of the weights of another rank and of what its optimizer keeps, and of the
            gradients on their way, where ``run.live`` keeps copies of one replica's pieces.

    Source: of the shares, Korthikanti et al., Reducing activation recomputation in large
    transformer models, MLSys 2023.
    """

    parameters_bytes: int
    gathered_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    copies_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Numbers of parameters of a pipeline rank.

    Attributes:
        whole: Of its parts, whole.
        own: Of what the fullest rank has of them.
        largest_block: Of what it has of its largest block.
    """

    whole: int
    own: int
    largest_block: int


def memory_of(
    counted: Counted, stage_bytes: int, passing_bytes: int = 0, *, mesh: MeshConfig,
    layout: RunLayout, optimizer: OptimizerConfig, model_kind: str, pp_rank: int,
    has_copies: bool = False,
) -> Memory:  # fmt: skip
    """Add up what the fullest rank at a coordinate of pp holds.

    Args:
        counted: Its parameters.
        stage_bytes: That autograd keeps of one microbatch of all of its stages, on one process,
            beside that of blocks that swap.
        passing_bytes: Of blocks that swap, that are on the device at a time, of one microbatch.
        mesh: Of it the precision, the schedule and sequence_parallel.
        layout: The sizes of the mesh, the stages and the microbatches.
        optimizer: What it keeps.
        model_kind: Of it, how tp divides activations.
        pp_rank: The coordinate.
        has_copies: Whether a rank has a copy of another one's piece.
    """
    pp, _, dp_shard, cp, tp = layout.sizes
    own, kept_bytes = counted.own, FLOAT_BYTES[mesh.dtype]
    shards = dp_shard * cp
    used = own if pp > 1 else counted.largest_block
    gathered = used * shards * COMPUTE_BYTES[mesh.dtype]
    states = int(optimizer.momentum > 0) if optimizer.kind == "sgd" else 2
    states += (optimizer.ema > 0) + (optimizer.compress_gradients == "powersgd")
    kept = stage_bytes * under_way(mesh.schedule, pp, pp_rank, layout) + passing_bytes
    return Memory(
        parameters_bytes=own * kept_bytes,
        gathered_bytes=gathered if shards > 1 or mesh.dtype == "bfloat16" else 0,
        gradients_bytes=own * kept_bytes,
        optimizer_bytes=own * kept_bytes * states,
        # Of tiles each rank keeps one
        activations_bytes=int(
            kept
            * share_of_tp(model_kind, tp, sequence_parallel=mesh.sequence_parallel)
            / math.prod(mesh.tiles)
        ),
        copies_bytes=own * kept_bytes * (3 + states) * has_copies,
    )


def share_of_tp(model_kind: str, tp: int, *, sequence_parallel: bool) -> float:
    """Say which part of activations a rank of tp has; see `Memory`."""
    if model_kind not in TRANSFORMERS:
        return 1.0
    return 1 / tp if sequence_parallel else (10 + 24 / tp) / 34


def under_way(schedule: Schedule, pp: int, pp_rank: int, layout: RunLayout) -> float:
    """Count the microbatches that wait for their backward pass on a rank at a time, at the most.

    Each counts as the part of the rank's stages that it has been past.
    """
    microbatches, own_stages = layout.microbatches, layout.num_stages // pp
    if schedule == "interleaved":
        # It goes past all stages but the last in rounds, and past that one as in 1F1B
        most = 2 * (pp - 1 - pp_rank) + (own_stages - 1) * pp + 1
    elif schedule == "dualpipev":
        most = 2 * pp + 1
    else:
        of_all = {"gpipe": microbatches, "1f1b": pp - pp_rank}.get(schedule, pp)
        most = of_all * own_stages
    if pp == 1 and schedule not in (*LOOPED, *FOLDED):
        return 1
    return min(microbatches, most / own_stages)
