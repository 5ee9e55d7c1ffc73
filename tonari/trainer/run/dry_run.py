"""What a run would be on a world that is not there: who holds what, in how much memory, fed how.

Parameters are counted on the real parts, cut, split and sharded by the code that trains them, but
without data and with messages that go nowhere. Activations are an estimate: see
`tonari.trainer.run.memory.Memory`. Pipeline ranks whose stages are alike are counted once, on a
mesh that has no more ranks than it takes to shard as the whole one does: the time does not follow
the number of ranks.
"""

import copy
import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tonari.trainer.checkpoint.weights import WeightFiles
from tonari.trainer.config.config import Config
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.mesh import make_mesh, name_axes
from tonari.trainer.mesh.parallelize import parallelize, stage_blocks
from tonari.trainer.mesh.place import stages_of
from tonari.trainer.mesh.recompute import choose_blocks, module_kind, recompute, worths
from tonari.trainer.mesh.swap import device_bytes, swapped_blocks
from tonari.trainer.models import StagedModel
from tonari.trainer.models.fake import fake_tensors
from tonari.trainer.models.trace import leaves
from tonari.trainer.private.fakes import FakeStore
from tonari.trainer.private.placements import local_shape
from tonari.trainer.run.build import RunLayout, lay_out, make_without_data
from tonari.trainer.run.crossings import Crossing, crossings
from tonari.trainer.run.deliveries import Delivery, deliveries
from tonari.trainer.run.live import is_one_over_shards
from tonari.trainer.run.memory import Counted, Memory, memory_of
from tonari.trainer.run.own import Own, own_of


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """What the ranks at one coordinate of pp hold.

    Attributes:
        pp_rank: The coordinate.
        stages: Numbers of their stages.
        blocks: Numbers of their blocks.
        has_stem: Whether they own the input layers.
        has_head: Whether they own the output layers.
        parameters: Of these parts, whole.
        rank_parameters: On the fullest of the ranks.
        memory: Of that one.
    """

    pp_rank: int
    stages: tuple[int, ...]
    blocks: tuple[int, ...]
    has_stem: bool
    has_head: bool
    parameters: int
    rank_parameters: int
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A run as it would be.

    Attributes:
        axes: Ranks along each axis of the mesh.
        num_nodes: Nodes, each with as many ranks.
        microbatches: Parts of a batch.
        global_batch_size: Rows of an optimizer step.
        parameters: Of the whole model.
        flops_per_row: Of one sample's forward pass.
        pipeline_ranks: By their coordinate.
        deliveries: One for all replicas that are fed alike, by the first of them.
        crossings: Axes whose groups reach over nodes and need not, the innermost first.
    """

    axes: dict[str, int]
    num_nodes: int
    microbatches: int
    global_batch_size: int
    parameters: int
    flops_per_row: int
    pipeline_ranks: tuple[PipelineRank, ...]
    deliveries: tuple[Delivery, ...]
    crossings: tuple[Crossing, ...]


def dry_run(config: Config, *, world_size: int, num_nodes: int, own: Own | None = None) -> DryRun:
    """Work out a run in this process; starts and stages nothing, leaves no process group.

    Args:
        config: The settings.
        world_size: Ranks that it would have.
        num_nodes: Nodes that they would be on, as many ranks on each.
        own: What the caller of `trainer.train` would bring.

    Raises:
        ConfigError: If the settings do not fit such a world.
    """
    if world_size % num_nodes:
        raise ConfigError(
            f"--nodes is {num_nodes}, which does not divide --world {world_size}; give a number of "
            "nodes that each have as many ranks"
        )
    layout = lay_out(config, world_size)
    model = make_without_data(config, layout, own_of(config, own))
    if config.model.weights:
        WeightFiles(Path(config.model.weights)).check(model)
    num_replicas = layout.sizes[1] * layout.sizes[2]
    return DryRun(
        axes=dict(zip(name_axes(tiles=bool(config.mesh.tiles)), layout.sizes, strict=True)),
        num_nodes=num_nodes,
        microbatches=layout.microbatches,
        global_batch_size=config.data.batch_size * num_replicas * config.optimizer.accumulate,
        parameters=_count(model),
        flops_per_row=model.flops_per_row(),
        pipeline_ranks=_pipeline_ranks(config, layout, model),
        deliveries=deliveries(config, layout, num_nodes=num_nodes),
        crossings=crossings(layout.sizes, num_nodes=num_nodes),
    )


def _pipeline_ranks(
    config: Config, layout: RunLayout, model: StagedModel
) -> tuple[PipelineRank, ...]:
    counted: dict[Hashable, Counted] = {}
    saved: dict[Hashable, tuple[int, int]] = {}
    kinds = _stage_kinds(config, layout, model)
    most = config.mesh.checkpointing_blocks
    block_worths = worths(model) if most else ()
    found = []
    with _imagined_mesh(layout.sizes) as mesh:
        for pp_rank in range(layout.sizes[0]):
            stages = _stages(config, layout, pp_rank)
            kind = tuple(kinds[stage] for stage in stages)
            if kind not in counted:
                counted[kind] = _count_parts(config, layout, model, mesh, stages)
            for stage in stages:
                if kinds[stage] not in saved:
                    blocks = stage_blocks(stage, layout.num_stages, num_blocks=model.num_blocks)
                    swapped = swapped_blocks(blocks, config.mesh.swap_blocks)
                    others = [number for number in blocks if number not in swapped]
                    again = choose_blocks(others, block_worths, most)
                    saved[kinds[stage]] = _activations_bytes(
                        config, layout, model, stage, again, swapped
                    )
            cuts = [
                stage_blocks(stage, layout.num_stages, num_blocks=model.num_blocks)
                for stage in stages
            ]
            stage_bytes = sum(saved[kinds[stage]][0] for stage in stages)
            passing_bytes = max(saved[kinds[stage]][1] for stage in stages)
            found.append(
                PipelineRank(
                    pp_rank=pp_rank,
                    stages=stages,
                    blocks=tuple(number for cut in cuts for number in cut),
                    has_stem=0 in stages,
                    has_head=layout.num_stages - 1 in stages,
                    parameters=counted[kind].whole,
                    rank_parameters=counted[kind].own,
                    memory=memory_of(
                        counted[kind],
                        stage_bytes,
                        passing_bytes,
                        mesh=config.mesh,
                        layout=layout,
                        optimizer=config.optimizer,
                        model_kind=config.model.kind,
                        pp_rank=pp_rank,
                        has_copies=config.run.live and is_one_over_shards(layout.sizes),
                    ),
                )
            )
    return tuple(found)


def _stages(config: Config, layout: RunLayout, pp_rank: int) -> tuple[int, ...]:
    return stages_of(pp_rank, layout.sizes[0], config.mesh.schedule, config.mesh.virtual)


def _stage_kinds(config: Config, layout: RunLayout, model: StagedModel) -> list[Hashable]:
    """List what the memory of each stage follows from: stages of one kind are counted once."""
    rows = config.data.batch_size // layout.microbatches
    blocks = {
        int(number): module_kind(block, int(number)) for number, block in model.blocks.items()
    }
    kinds: list[Hashable] = []
    for stage in range(layout.num_stages):
        cut = stage_blocks(stage, layout.num_stages, num_blocks=model.num_blocks)
        ends = (stage == 0, stage == layout.num_stages - 1)
        taken = model.hidden_shape_before(cut.start, rows) if stage else None
        kinds.append((ends, taken, tuple(blocks[number] for number in cut)))
    return kinds


def _count_parts(
    config: Config, layout: RunLayout, model: StagedModel, mesh: DeviceMesh, stages: tuple[int, ...]
) -> Counted:
    settings = config.mesh
    parts = parallelize(
        copy.deepcopy(model), mesh, _Stages(stages), sequence_parallel=settings.sequence_parallel,
        loss_parallel=settings.loss_parallel,
        # Weights are those of whole samples
        tile=(lambda _: lambda part: None) if settings.tiles else None,
    )  # fmt: skip
    own = sum(_count_local(part, layout.sizes) for part in parts)
    blocks = [_count_local(block, layout.sizes) for part in parts for block in part.blocks.values()]
    return Counted(whole=sum(map(_count, parts)), own=own, largest_block=max(blocks, default=own))


@dataclass(frozen=True)
class _Stages:
    stages: tuple[int, ...]


def _activations_bytes(
    config: Config, layout: RunLayout, model: StagedModel, stage: int, again: Collection[int],
    swapped: Sequence[int],
) -> tuple[int, int]:  # fmt: skip
    """Count the bytes that autograd keeps of one microbatch of a stage, and of blocks that swap.

    With full recomputation, of the blocks in ``again`` they keep their inputs. Of those that swap,
    two at a time are on the device.

    Raises:
        ConfigError: If the model cannot be run on tensors without data.
    """
    rows = config.data.batch_size // layout.microbatches
    part = copy.deepcopy(model)
    if config.mesh.dtype != "float32":
        part.to(getattr(torch, config.mesh.dtype))
    if config.mesh.dtype == "bfloat16":
        part.hidden_dtype = torch.bfloat16
    part.num_sequence_parts = config.mesh.cp
    blocks = stage_blocks(stage, layout.num_stages, num_blocks=part.num_blocks)
    part.keep(blocks, first=stage == 0, last=stage == layout.num_stages - 1)
    # Tensors without data: attention chooses its kernel as on the device.
    with fake_tensors():
        part.to_empty(device="cpu")
        if config.mesh.checkpointing == "full":
            for number, block in part.blocks.items():
                if int(number) in again:
                    recompute(block, selective=False)
        values = [
            torch.empty(shape.shape, dtype=shape.dtype, requires_grad=shape.requires_grad)
            for shape in leaves(part.input_shape(rows))
        ]
        try:
            blocks_in_turn = [part.blocks[str(number)] for number in swapped]
            kept, most = device_bytes(part, blocks_in_turn, values)
            return kept, most * min(len(swapped), 2)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"--dry-run: {config.model.kind} cannot be run on tensors without data, by which "
                f"activations are counted: {type(error).__name__}: {error}; let its forward make "
                "tensors on its input's device, register constants as buffers, and not decide by "
                "values"
            ) from error


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_local(module: nn.Module, sizes: tuple[int, ...]) -> int:
    """Count the parameters of the fullest rank, where the axes of the mesh have these sizes."""
    _, dp_replicate, dp_shard, cp, tp = sizes
    named = {
        "dp_replicate": dp_replicate, "dp_shard": dp_shard, "dp_shard_cp": dp_shard * cp, "tp": tp,
    }  # fmt: skip
    num_own = 0
    for parameter in module.parameters():
        shape: tuple[int, ...] = parameter.shape
        if isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ()
            sizes = tuple(named[axis] for axis in axes)
            shape = local_shape(shape, sizes, parameter.placements)
        num_own += math.prod(shape)
    return num_own


@contextmanager
def _imagined_mesh(sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Be rank 0 of a mesh whose messages go nowhere, and that shards as one of these sizes does.

    torch takes time and memory for each rank of a mesh. How a parameter is placed depends on
    whether the axes of data and context have several ranks, not on how many.
    """
    if dist.is_initialized():
        raise ConfigError(
            "--dry-run: this process is part of a job already; start it alone, without mpiexec or "
            "torchrun"
        )
    pp, dp_replicate, dp_shard, cp, tp = sizes
    small = (pp, min(dp_replicate, 2), min(dp_shard, 2), min(cp, 2), tp)
    dist.init_process_group("fake", rank=0, world_size=math.prod(small), store=FakeStore())
    try:
        yield make_mesh(small, device_type="cpu")
    finally:
        dist.destroy_process_group()
