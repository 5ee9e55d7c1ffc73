"""What a run would be on a world that is not there: who holds what, in how much memory, fed how.

Parameters are counted on the real parts, cut, split and sharded by the code that trains them, but
without data and with messages that go nowhere. Activations are an estimate: see ``Memory``.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.config.config import Config
from trainer.errors import ConfigError
from trainer.mesh.mesh import AXES, make_mesh
from trainer.mesh.parallelize import parallelize, recompute, stage_blocks
from trainer.mesh.place import FOLDED, LOOPED, Place, Schedule, feed_of
from trainer.models import StagedModel
from trainer.run.build import Layout, build_place, lay_out, make_model

FLOAT_BYTES = {"float32": 4, "bfloat16": 4, "float64": 8}
"""Of a parameter as it is kept; bfloat16 is that of the computation."""

COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest rank of a pipeline rank.

    Attributes:
        parameters_bytes: Its own, after splitting and sharding.
        gathered_bytes: Whole parameters while they are used: of the largest block, or of the part
            where a pipeline keeps them gathered; none where nothing is sharded or cast.
        gradients_bytes: As its own parameters.
        optimizer_bytes: SGD with momentum keeps one number a parameter, AdamW two, and another
            optimizer is taken to; an average of the weights is one more.
        activations_bytes: What autograd keeps of the microbatches under way, an estimate: counted
            on the stage as one process runs it; what selective recomputation saves is left in. Of a
            transformer tp divides it by its size with sequence_parallel, else 24 parts of 34 of it.

    Source: of the shares, Korthikanti et al., Reducing activation recomputation in large
    transformer models, MLSys 2023.
    """

    parameters_bytes: int
    gathered_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(vars(self).values())


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
class Delivery:
    """How a replica's batches reach its ranks.

    Attributes:
        replica: Its number.
        reader: The rank that reads and decodes them.
        target_reader: The rank that reads the last stage's columns; None: the reader does.
        maps: Ranks on the node of who reads for them that take their columns from shared memory.
        receives: Ranks elsewhere that take them in messages.
        nothing: Ranks of middle stages: they hold no batch.
        scorer: The rank whose losses go back to the reader.
    """

    replica: int
    reader: int
    target_reader: int | None
    maps: tuple[int, ...]
    receives: tuple[int, ...]
    nothing: tuple[int, ...]
    scorer: int


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
        deliveries: By replica.
    """

    axes: dict[str, int]
    num_nodes: int
    microbatches: int
    global_batch_size: int
    parameters: int
    flops_per_row: int
    pipeline_ranks: tuple[PipelineRank, ...]
    deliveries: tuple[Delivery, ...]


def dry_run(config: Config, *, world_size: int, num_nodes: int) -> DryRun:
    """Work out a run in this process; starts and stages nothing, leaves no process group.

    Args:
        config: The settings.
        world_size: Ranks that it would have.
        num_nodes: Nodes that they would be on, as many ranks on each.

    Raises:
        ConfigError: If the settings do not fit such a world.
    """
    if world_size % num_nodes:
        raise ConfigError(
            f"--nodes is {num_nodes}, which does not divide --world {world_size}; give a number of "
            "nodes that each have as many ranks"
        )
    layout = lay_out(config, world_size)
    with torch.device("meta"):
        model = make_model(config)
    replica_ranks = math.prod(layout.sizes) // layout.sizes[0]
    held = tuple(
        _held(config, layout, model, build_place(config, layout, pp_rank * replica_ranks), pp_rank)
        for pp_rank in range(layout.sizes[0])
    )
    num_replicas = layout.sizes[1] * layout.sizes[2]
    first_ranks = [replica * layout.sizes[3] * layout.sizes[4] for replica in range(num_replicas)]
    nodes = [rank // (world_size // num_nodes) for rank in range(world_size)]
    return DryRun(
        axes=dict(zip(AXES, layout.sizes, strict=True)),
        num_nodes=num_nodes,
        microbatches=layout.microbatches,
        global_batch_size=config.data.batch_size * num_replicas * config.optimizer.accumulate,
        parameters=_count(model),
        flops_per_row=model.flops_per_row(),
        pipeline_ranks=held,
        deliveries=tuple(_delivery(config, layout, rank, nodes) for rank in first_ranks),
    )


def _delivery(config: Config, layout: Layout, reader: int, nodes: Sequence[int]) -> Delivery:
    place = build_place(config, layout, reader)
    feeds = {
        rank: feed_of(build_place(config, layout, rank), nodes, config.mesh.targets)
        for rank in place.ranks
    }
    others = [rank for rank, feed in feeds.items() if rank != feed.reader]
    fed = [rank for rank in others if rank in (*place.input_ranks, *place.target_ranks)]
    near = [rank for rank in fed if nodes[rank] == nodes[feeds[rank].reader]]
    target_reader = feeds[place.scorer].reader
    return Delivery(
        replica=place.replica,
        reader=place.reader,
        target_reader=target_reader if target_reader != place.reader else None,
        maps=tuple(near),
        receives=tuple(rank for rank in fed if rank not in near),
        nothing=tuple(rank for rank in others if rank not in fed),
        scorer=place.scorer,
    )


def _held(
    config: Config, layout: Layout, model: StagedModel, place: Place, pp_rank: int
) -> PipelineRank:
    cuts = [
        stage_blocks(stage, layout.num_stages, num_blocks=model.num_blocks)
        for stage in place.stages
    ]
    wholes = [
        _kept(model, blocks, stage=stage, num_stages=layout.num_stages)
        for stage, blocks in zip(place.stages, cuts, strict=True)
    ]
    with _imagined(place, math.prod(layout.sizes)):
        mesh = make_mesh(layout.sizes, device_type="cpu")
        parts = _parallelized(config, model, mesh, place)
        own = sum(_count_local(part) for part in parts)
        blocks = [_count_local(block) for part in parts for block in part.blocks.values()]
    return PipelineRank(
        pp_rank=pp_rank,
        stages=place.stages,
        blocks=tuple(number for cut in cuts for number in cut),
        has_stem=place.has_input,
        has_head=place.has_target,
        parameters=sum(map(_count, wholes)),
        rank_parameters=own,
        memory=_memory(config, layout, own, max(blocks, default=own), pp_rank, place),
    )


def _parallelized(
    config: Config, model: StagedModel, mesh: DeviceMesh, place: Place
) -> list[StagedModel]:
    settings = config.mesh
    return parallelize(
        copy.deepcopy(model), mesh, place, sequence_parallel=settings.sequence_parallel,
        loss_parallel=settings.loss_parallel,
    )  # fmt: skip


def _memory(
    config: Config, layout: Layout, own: int, largest_block: int, pp_rank: int, place: Place
) -> Memory:
    settings, optimizer = config.mesh, config.optimizer
    pp, _, dp_shard, cp, tp = layout.sizes
    kept_bytes = FLOAT_BYTES[settings.dtype]
    shards = dp_shard * cp
    gathered = (own if pp > 1 else largest_block) * shards * COMPUTE_BYTES[settings.dtype]
    states = int(optimizer.momentum > 0) if optimizer.kind == "sgd" else 2
    states += optimizer.ema > 0
    saved = sum(
        _activations_bytes(config, layout, stage)
        * _under_way(settings.schedule, pp, pp_rank, layout)
        for stage in place.stages
    )
    return Memory(
        parameters_bytes=own * kept_bytes,
        gathered_bytes=gathered if shards > 1 or settings.dtype == "bfloat16" else 0,
        gradients_bytes=own * kept_bytes,
        optimizer_bytes=own * kept_bytes * states,
        activations_bytes=int(saved * _share_of_tp(config, tp)),
    )


def _share_of_tp(config: Config, tp: int) -> float:
    if config.model.kind not in ("vit", "gpt"):
        return 1.0
    return 1 / tp if config.mesh.sequence_parallel else (10 + 24 / tp) / 34


def _under_way(schedule: Schedule, pp: int, pp_rank: int, layout: Layout) -> int:
    """Count the microbatches of a stage that wait for their backward pass at a time."""
    if pp == 1 and schedule not in (*LOOPED, *FOLDED):
        return 1
    if schedule == "1f1b":
        return min(layout.microbatches, pp - pp_rank)
    return (
        layout.microbatches if schedule == "gpipe" else min(layout.microbatches, layout.num_stages)
    )


def _activations_bytes(config: Config, layout: Layout, stage: int) -> int:
    """Count the bytes that autograd keeps of one microbatch of a stage."""
    rows = config.data.batch_size // layout.microbatches
    # Tensors without data: attention chooses its kernel as on the device.
    with FakeTensorMode(allow_non_fake_inputs=True), _default_dtype(config.mesh.dtype):
        model = make_model(config)
        model.num_sequence_parts = layout.sizes[3]
        blocks = stage_blocks(stage, layout.num_stages, num_blocks=model.num_blocks)
        model.keep(blocks, first=stage == 0, last=stage == layout.num_stages - 1)
        if config.mesh.checkpointing == "full":
            for block in model.blocks.values():
                recompute(block, selective=False)
        shape = model.input_shape(rows)
        values = torch.empty(shape.shape, dtype=shape.dtype, requires_grad=shape.requires_grad)
        return _saved_bytes(model, values)


def _saved_bytes(model: nn.Module, values: Tensor) -> int:
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # Kept until all is counted: a storage that was freed may come again under its address.
        result = model(values)
    del result
    return sum(saved.values())


def _kept(model: StagedModel, blocks: range, *, stage: int, num_stages: int) -> StagedModel:
    part = copy.deepcopy(model)
    part.keep(blocks, first=stage == 0, last=stage == num_stages - 1)
    return part


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count_local(module: nn.Module) -> int:
    own = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return sum(tensor.numel() for tensor in own)


@contextmanager
def _default_dtype(name: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _imagined(place: Place, world_size: int) -> Iterator[None]:
    """Be a rank of a world whose messages go nowhere."""
    if dist.is_initialized():
        raise ConfigError(
            "--dry-run: this process is part of a job already; start it alone, without mpiexec or "
            "torchrun"
        )
    dist.init_process_group("fake", rank=place.rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
