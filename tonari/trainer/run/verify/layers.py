"""How many layers of a model are verified, where one process and a machine cannot hold all."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from dataio.base.cgroup import memory_room
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.place import num_stages
from tonari.trainer.models import Adapted, StagedModel, deferred
from tonari.trainer.run.build import make_model
from tonari.trainer.run.own import Own, import_model

COPIES, REPLICA_COPIES = 4, 22
"""Of all weights in double precision: weights, gradients and what the optimizer remembers in one
process; the same on each replica, and what is kept of three states of it, on disk and read."""

ROOM = 0.5
"""Of the memory that is free."""

MOST_PARAMETERS = 25_000_000
"""That are written down and compared within a minute or so."""

MOST_FLOPS = 2e11
"""Of a short run: a minute or so in double precision on a core or two."""


@dataclass(frozen=True)
class Layers:
    """What of a model is verified.

    Attributes:
        kept: Layers; 0: all.
        note: Why, in words; empty where all are.
    """

    kept: int = 0
    note: str = ""


def choose_layers(config: Config, own: Own, *, replicas: int, rows: int) -> Layers:
    """Choose as many layers as fit memory, and a minute or two.

    Args:
        config: The settings of the run.
        own: What its caller brings.
        replicas: Of the mesh.
        rows: That all of them train together in the short run.

    Raises:
        ConfigError: If even one layer a stage does not fit.
    """
    model = deferred(partial(make_model, config, own), seed=config.run.seed, draws=False)
    number = sum(each.numel() for each in model.parameters())
    room = memory_room() or 1 << 62
    most = ROOM * room / (8 * (COPIES + REPLICA_COPIES * replicas))
    # Forward and backward, on the mesh and in one process
    flops = 2 * 3 * model.flops_per_row() * rows
    quick = min(most, MOST_PARAMETERS)
    if number <= quick and flops <= MOST_FLOPS:
        return Layers()
    blocks = list(model.blocks.values())
    in_blocks = sum(each.numel() for block in blocks for each in block.parameters())
    mesh = config.mesh
    least = max(num_stages(mesh.pp, mesh.schedule, mesh.virtual), 2)
    can_cut = len(blocks) > least and (_is_listed(model) or "depth" in config.model.settings)
    kept = len(blocks)
    if can_cut:
        each = in_blocks / len(blocks)
        fits = int((quick - (number - in_blocks)) // each)
        kept = max(min(fits, int(len(blocks) * MOST_FLOPS // max(flops, 1)), len(blocks)), least)
    left = number - in_blocks + in_blocks * kept / max(len(blocks), 1)
    if left > most:
        raise ConfigError(
            f"the model has {number:,} parameters, {left:,.0f} of them with {kept} of its "
            f"{len(blocks)} layers, but the memory that is free ({room:,} bytes) holds {most:,.0f} "
            "in double precision several times over; give a smaller width or vocabulary in "
            "[model.args], which says as much of how it is spread, or a machine with more memory"
        )
    if kept == len(blocks):
        return Layers()
    return Layers(
        kept, f"verified with {kept} of its {len(blocks)} layers: all of its {number:,} parameters "
        "would take too much memory or time",
    )  # fmt: skip


def with_layers(config: Config, own: Own, kept: int) -> tuple[Config, Own]:
    """Make settings and a caller's model of so many layers; 0: of all."""
    if not kept:
        return config, own
    if not config.model.is_own:
        return replace(config, model=config.model.with_settings(depth=kept)), own
    build = own.model or partial(import_model(config.model.kind), **config.model.args)
    # Of files nobody has so few layers.
    config = replace(config, model=replace(config.model, weights=""))
    return config, replace(own, model=partial(_cut, build, config.model.layers, kept))


def _cut(
    build: Callable[[], nn.Module], layers: tuple[str, ...] | str | None, kept: int
) -> nn.Module:
    made = build()
    adapted = made if isinstance(made, Adapted) else Adapted(made, layers=layers)
    (blocks,) = {id(owner): owner for owner, _ in adapted._owners}.values()
    assert isinstance(blocks, (nn.ModuleList, nn.Sequential)), "asked before"
    del blocks[kept:]
    adapted._owners = adapted._owners[:kept]
    adapted.num_blocks, adapted._own = kept, range(kept)
    return adapted


def _is_listed(model: StagedModel) -> bool:
    """Say whether the blocks are those of one list, which may be shorter."""
    if not isinstance(model, Adapted):
        return False
    owners = {id(owner): owner for owner, _ in model._owners}
    lists = [each for each in owners.values() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    return len(owners) == len(lists) == 1
