"""The device mesh: every axis is there, of size 1 where unused, so that one path serves all."""

import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def axis_sizes(
    world_size: int,
    *,
    pp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
) -> tuple[int, ...]:
    """Decide the ranks along each of ``AXES``; their product is ``world_size``.

    Args:
        world_size: Ranks of the job.
        pp: Pipeline stages.
        dp_replicate: Copies of the (sharded) model; None takes the ranks that remain.
        dp_shard: Ranks that share one copy's parameters.
        cp: Ranks that share a sequence.
        tp: Ranks that share a layer.

    Raises:
        ConfigError: If the ranks do not divide so, or an axis is not trained over yet.
    """
    for name, ranks in (("pp", pp), ("cp", cp), ("tp", tp)):
        if ranks > 1:
            raise ConfigError(
                f"mesh.{name} is {ranks}, expected 1: this version trains data-parallel only; "
                f"leave mesh.{name} out and use mesh.dp_replicate and mesh.dp_shard"
            )
    others = pp * dp_shard * cp * tp
    copies = max(world_size // others, 1) if dp_replicate is None else dp_replicate
    sizes = (pp, copies, dp_shard, cp, tp)
    if math.prod(sizes) != world_size:
        found = " x ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
        raise ConfigError(
            f"mesh: {found} is {math.prod(sizes)} ranks, but the job has {world_size}; start that "
            f"many, or leave mesh.dp_replicate out and choose a mesh.dp_shard that divides "
            f"{world_size}"
        )
    return sizes


def make_mesh(sizes: tuple[int, ...], *, device_type: str) -> DeviceMesh:
    """Lay the ranks out along ``AXES``, in rank order. Collective."""
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
