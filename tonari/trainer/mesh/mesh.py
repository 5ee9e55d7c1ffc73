"""The device mesh: every axis is there, of size 1 where unused, so that one path serves all."""

import math

import numpy as np
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.place import Schedule, num_stages
from tonari.trainer.private.placements import forget_placements

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def axis_sizes(
    world_size: int,
    *,
    pp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
    tiles: bool = False,
) -> tuple[int, ...]:
    """Decide the ranks along each of ``AXES``; their product is ``world_size``.

    Args:
        world_size: Ranks of the job.
        pp: Pipeline stages.
        dp_replicate: Copies of the (sharded) model; None takes the ranks that remain.
        dp_shard: Ranks that share one copy's parameters.
        cp: Ranks that share a sequence.
        tp: Ranks that share a layer.
        tiles: Whether those of cp have tiles, for the message.

    Raises:
        ConfigError: If the ranks do not divide so.
    """
    others = pp * dp_shard * cp * tp
    copies = max(world_size // others, 1) if dp_replicate is None else dp_replicate
    sizes = (pp, copies, dp_shard, cp, tp)
    if math.prod(sizes) != world_size:
        named = zip(name_axes(tiles=tiles), sizes, strict=True)
        found = " x ".join(f"{name} {size}" for name, size in named)
        raise ConfigError(
            f"mesh: {found} is {math.prod(sizes)} ranks, but the job has {world_size}; start that "
            f"many (--dry-run --world {math.prod(sizes)}), or leave mesh.dp_replicate out and "
            f"choose other sizes whose product divides {world_size}"
        )
    return sizes


def name_axes(*, tiles: bool) -> tuple[str, ...]:
    """Name ``AXES`` for a reader, to whom the ranks of cp may be those of tiles."""
    return tuple("tiles" if tiles and axis == "cp" else axis for axis in AXES)


def name_roles(sizes: tuple[int, ...], *, tiles: bool = False) -> list[str]:
    """Describe where each rank stands along the axes that have several ranks: ``pp 1, tp 0``."""
    axes = name_axes(tiles=tiles)
    return [
        ", ".join(f"{axis} {at[k]}" for k, axis in enumerate(axes) if sizes[k] > 1)
        for at in np.ndindex(sizes)
    ]


def num_microbatches(wanted: int | None, *, pp: int, schedule: Schedule, virtual: int) -> int:
    """Decide into how many parts a pipeline cuts a batch.

    Args:
        wanted: None: one a stage.
        pp: Ranks of the pipeline.
        schedule: The order of the pipeline's work.
        virtual: Stages a rank, where the schedule is looped.
    """
    return num_stages(pp, schedule, virtual) if wanted is None else wanted


def check_context(cp: int, *, sequence_length: int | None) -> None:
    """Refuse context parallelism where there is no sequence that it divides.

    Args:
        cp: Ranks that share a sequence.
        sequence_length: Tokens of a sample; None for images.

    Raises:
        ConfigError: If it does not divide.
    """
    if cp > 1 and (sequence_length is None or sequence_length % cp):
        found = "images" if sequence_length is None else f"sequences of {sequence_length}"
        raise ConfigError(
            f"mesh.cp is {cp}, which does not divide {found}; leave mesh.cp out, or give text and "
            f"a data.sequence_length that is a multiple of {cp}"
        )


def make_mesh(sizes: tuple[int, ...], *, device_type: str) -> DeviceMesh:
    """Lay the ranks out along ``AXES``, in rank order. Collective."""
    # torch remembers meshes by their shape, and with them groups of a job that this process has
    # left, or of another rank that it was traced as.
    forget_placements()
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
