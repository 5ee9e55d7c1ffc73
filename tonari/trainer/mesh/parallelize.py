"""Spread a model over the mesh, by torch's own means."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.first_weights import check_first_weights
from tonari.trainer.mesh.half import Half
from tonari.trainer.mesh.hooked import carry_hooks, check_hooks, check_memory, hooks_on
from tonari.trainer.mesh.materialize import materialize
from tonari.trainer.mesh.recompute import Checkpointing, choose_blocks, recompute, worths
from tonari.trainer.mesh.swap import Swap, swapped_blocks
from tonari.trainer.mesh.tied import Owners, find_owners, tie_again
from tonari.trainer.mesh.writable import pass_no_views
from tonari.trainer.models.staged import StagedModel, aliases_of, copied, without_data
from tonari.trainer.models.styles import replicate_rest
from tonari.trainer.private.compiling import find_cpp_compiler
from tonari.trainer.private.norms import BatchNorm
from tonari.trainer.private.sharding import flattened, joined

Dtype = Literal["float32", "bfloat16"]
Tile = Callable[[StagedModel], Callable[[StagedModel], None]]

ONE_MESSAGE_BYTES = 1 << 20
"""Gradients of replicas up to this size travel together, on the CPU."""


class Stages(Protocol):
    """What is asked of a rank's place."""

    @property
    def stages(self) -> tuple[int, ...]: ...


def parallelize(
    model: StagedModel,
    mesh: DeviceMesh,
    place: Stages | None = None,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    checkpointing: Checkpointing = "none",
    checkpointing_blocks: int = 0,
    dtype: Dtype = "float32",
    compile: bool = False,
    offload: bool = False,
    swap: Swap | None = None,
    tile: Tile | None = None,
    compresses: bool = False,
) -> list[StagedModel]:
    """Cut out this rank's stages and spread them, for gradients that are means. Collective.

    The mean is over all replicas, and over the ranks of cp too. Each of these has a part of a row's
    loss: multiply it by the size of cp. Or they have tiles, and each has the whole loss. Parts that
    are ``left_whole`` have gradients of their own, which `Pipeline` averages; so has every replica
    where ``compresses``.

    Args:
        model: The same weights on every rank; used up. One of `deferred` gets its weights last, of
            each only what is this rank's.
        mesh: With the axes of ``tonari.trainer.mesh.mesh.AXES``.
        place: Whose ``stages`` this rank owns; None: there is one stage.
        sequence_parallel: Between layers, each tp rank holds its part of the sequence.
        loss_parallel: With tp > 1, logits stay split by class, as a DTensor.
        checkpointing: Compute a block's activations again in the backward pass: all, or all but the
            results of products and of attention.
        checkpointing_blocks: Of each stage, so many blocks only, 0: all; see `choose_blocks`.
        dtype: Of the computation; parameters and the sum of gradients are as they were.
        compile: Compile each block.
        offload: Keep parameters, gradients and the optimizer's state in the host's memory.
        swap: Keeps all activations of some blocks there, between their passes; these compute
            nothing again. Not with ``compile``, nor with a schedule that goes back over a
            stage twice.
        tile: As `tonari.trainer.tiles.tile_stages`, where the ranks of cp have tiles.
        compresses: Whether a `Compression` averages gradients over dp_replicate.

    Returns:
        One part for each stage, on the mesh's device.

    Raises:
        ConfigError: If a size does not divide the model, nothing can compile it, its blocks differ
            and cannot be compared, or its weights differ between ranks.
    """
    if compile and mesh.device_type == "cpu":
        _find_compiler()
    if dtype == "bfloat16" and mesh.device_type == "cpu":
        _check_statistics(model)
    stages = (0,) if place is None else place.stages
    num_stages = len(stages) * mesh["pp"].size()
    tp = mesh["tp"].size()
    model.check_mesh(num_stages=num_stages, tp=tp)
    if mesh.size() > 1:
        check_first_weights(model)
    in_place = num_stages * tp == 1 and dtype == "float32" and not offload
    in_place = in_place and model.recording is None and left_whole(model, mesh, compresses)
    check_hooks(model, mesh, is_whole=in_place)
    if not in_place:
        check_memory(model)
    if mesh.size() > mesh["pp"].size() * tp:
        is_gathered = dtype != "float32" or offload or not left_whole(model, mesh, compresses)
        model.check_replicas(is_gathered=is_gathered)
    hooks = hooks_on(model)
    # Of the model as it is on one process
    block_worths = worths(model) if checkpointing_blocks else ()
    tile_stage = None if tile is None else tile(model)
    if tile is None and mesh["cp"].size() > 1:
        model.use_context_parallel(mesh["cp"])
    if tp > 1 and sequence_parallel:
        model.num_hidden_parts = tp
    if dtype == "bfloat16":
        model.hidden_dtype = torch.bfloat16
    names = aliases_of(model)
    owners = _owners(model, num_stages, names)
    parts = [model, *(copied(model) for _ in stages[1:])]
    for stage, part in zip(stages, parts, strict=True):
        _keep(part, stage, num_stages)
        if tile_stage is not None:
            tile_stage(part)
        part.first_names, part.shared_with = names, owners
        tied = aliases_of(part)
        # Parameters without data stay so: they are made last, or a dry run counts them.
        if not any(parameter.is_meta for parameter in part.parameters()):
            part.to(mesh.device_type)
        if tp > 1:
            split_layers(
                part, mesh, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
            )
            tie_again(part, tied)
        swapped = swapped_blocks(map(int, part.blocks), 0 if swap is None else swap.num_blocks)
        others = [number for number in map(int, part.blocks) if number not in swapped]
        chosen = choose_blocks(others, block_worths, checkpointing_blocks)
        for number, block in part.blocks.items():
            if compile:
                # Without its hooks, which would cut its graph, nor what computes it again.
                block.forward = torch.compile(block.forward)
            if checkpointing != "none" and int(number) in chosen:
                recompute(block, selective=checkpointing == "selective")
        if swap is not None:
            swap.attach([*part.blocks.values()])
        alone = mesh.size() == (mesh["dp_replicate"].size() if compresses else 1)
        if dtype == "bfloat16" and alone and not offload:
            Half(part)
        elif dtype != "float32" or offload or not left_whole(part, mesh, compresses):
            _shard(
                part, mesh, dtype=dtype, offload=offload, by_block=tile is None,
                compresses=compresses,
            )  # fmt: skip
        if part.recording is not None:
            materialize(part, mesh.device_type, offload=offload)
            part.recording = None
        if hooks:
            carry_hooks(hooks, part)
    return parts


def split_layers(
    part: StagedModel, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool
) -> None:
    """Split the layers of a part over tp, in place; see `parallelize`."""
    plan = part.tp_plan(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    parallelize_module(part, mesh["tp"], plan, src_data_rank=None)
    replicate_rest(part, mesh["tp"])


def left_whole(part: nn.Module, mesh: DeviceMesh, compresses: bool = False) -> bool:
    """Say whether a part that is neither offloaded nor computed in bfloat16 is left as it is.

    So are parts that no other rank has a replica or a shard of, and small replicas on the CPU:
    there a message for each block costs more than is won by sending it during the backward pass. A
    GPU computes meanwhile, and large parts are long on their way. And so are replicas of one rank
    whose gradients are compressed.
    """
    if compresses:
        return mesh.size() == mesh["dp_replicate"].size()
    if mesh.size() == mesh["pp"].size() * mesh["tp"].size():
        return True
    replicated = mesh.size() == mesh["pp"].size() * mesh["dp_replicate"].size()
    num_bytes = sum(parameter.nbytes for parameter in part.parameters())
    return replicated and mesh.device_type == "cpu" and num_bytes <= ONE_MESSAGE_BYTES


def _find_compiler() -> None:
    """Refuse to compile without a C++ compiler: torch would say so in the first step."""
    try:
        find_cpp_compiler()
    except FileNotFoundError as error:
        raise ConfigError(
            "mesh.compile is true, but no C++ compiler was found, and torch compiles with one on "
            "the CPU; install g++ or name yours in CXX, or set mesh.compile=false"
        ) from error


def _check_statistics(model: nn.Module) -> None:
    """Refuse batch statistics in bfloat16 where torch does not compute with them."""
    for name, module in model.named_modules():
        counts = isinstance(module, BatchNorm) and module.running_mean is not None
        if counts and module.weight is not None:
            raise ConfigError(
                f"mesh.dtype is bfloat16, expected float32 for {name} of {type(model).__name__}: "
                "on a CPU torch takes no weights in bfloat16 beside the batch statistics, which "
                "stay in float32; give mesh.dtype=float32, or a norm without statistics"
            )


def stage_blocks(stage: int, num_stages: int, *, num_blocks: int) -> range:
    """Say which blocks a stage owns: all as many, or one more."""
    return range(*(number * num_blocks // num_stages for number in (stage, stage + 1)))


def _keep(part: StagedModel, stage: int, num_stages: int) -> None:
    kept = stage_blocks(stage, num_stages, num_blocks=part.num_blocks)
    part.keep(kept, first=stage == 0, last=stage == num_stages - 1)


def _owners(model: StagedModel, num_stages: int, names: Mapping[str, str]) -> Owners:
    """Find the weights that several stages have, by cutting the model as each of them does."""
    if num_stages == 1:
        return {}
    owned: list[list[str]] = []
    for stage in range(num_stages):
        # Without data: copies of tensors would take the memory of the model.
        part = without_data(model)
        _keep(part, stage, num_stages)
        owned.append([names.get(name, name) for name, _ in part.named_parameters()])
    return find_owners(owned)


def average_buffers(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Give every replica the mean of all replicas' batch statistics. Collective.

    Without this, ranks evaluate different models, and a checkpoint would keep one rank's.

    Args:
        model: A part.
        mesh: With the axes of ``tonari.trainer.mesh.mesh.AXES``; None: every rank is a replica.
    """
    replicas = [dist.group.WORLD]
    if mesh is not None:
        replicas = [mesh.get_group(axis) for axis in ("dp_replicate", "dp_shard")]
    for buffer in model.buffers():
        if buffer.is_floating_point():
            # Styles of tp make DTensors of the buffers of a layer too, whole on every rank.
            own = buffer.to_local() if isinstance(buffer, DTensor) else buffer
            for group in replicas:
                with torch.no_grad():
                    dist.all_reduce(own, group=group)
                    own /= dist.get_world_size(group)


def _shard(
    part: StagedModel, mesh: DeviceMesh, *, dtype: Dtype, offload: bool, by_block: bool,
    compresses: bool = False,
) -> None:  # fmt: skip
    # Not DistributedDataParallel: it orders its buckets anew after the first step, so that a
    # resumed run would add gradients in another order than an uninterrupted one.
    data_parallel = mesh["dp_shard"] if compresses else _data_parallel(mesh)
    kind = type(getattr(part, "wrapped", part)).__name__
    for name, parameter in part.named_parameters():
        if not (parameter.dim() and parameter.numel()):
            raise ConfigError(
                f"{name.removeprefix('wrapped.')} of {kind} is a parameter of the shape "
                f"{list(parameter.shape)}, expected a dimension and a number at least: torch's "
                "fully_shard, by which shards, offload, bfloat16 and large replicas are kept, "
                "takes no other; give it the shape (1,), leave it out, or make it a buffer"
            )
        # It takes none that lies otherwise in memory
        parameter.data = parameter.data.contiguous()
    precision = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    on_gpu = mesh.device_type == "cuda"
    shard = partial(
        fully_shard,
        mesh=data_parallel,
        mp_policy=precision,
        ignored_params=_kept_whole(part, mesh, offload=offload),
        offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy(),
        # A pipeline passes the same parameters once a microbatch: gathered once, then kept.
        reshard_after_forward=mesh["pp"].size() == 1,
    )
    blocks = list(part.blocks.values())
    held = [id(parameter) for block in blocks for parameter in dict.fromkeys(block.parameters())]
    # Blocks that share a weight cannot each gather it, and hooks of blocks cannot see tiles: the
    # whole part then gathers at once.
    if by_block and data_parallel.size() > 1 and len(held) == len(set(held)):
        for block in blocks:
            pass_no_views(block)
            shard(block)
    shard(part)
    if not on_gpu:
        # Gathering a block before its turn overlaps with nothing here, and takes its memory.
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([module])


def _kept_whole(part: StagedModel, mesh: DeviceMesh, *, offload: bool) -> set[nn.Parameter]:
    """Choose the weights that stay whole, as torch adds up gradients of one dtype together.

    `Pipeline` averages their gradients. They are those of all dtypes but the one that most trained
    weights have, such as the complex ones of a spectral layer.

    Raises:
        ConfigError: If tp or offloading has a hand in them too.
    """
    trained = {name: its for name, its in part.named_parameters() if its.requires_grad}
    numels: Counter[torch.dtype] = Counter()
    for its in trained.values():
        numels[its.dtype] += its.numel()
    most = max(numels, key=numels.__getitem__, default=None)
    others = {name: its for name, its in trained.items() if its.dtype != most}
    if others and (offload or mesh["tp"].size() > 1):
        name, its = next(iter(others.items()))
        raise ConfigError(
            f"the weight {name.removeprefix('wrapped.')} is {its.dtype}, most that train are "
            f"{most}, expected one dtype with mesh.offload or "
            "mesh.tp; convert it where the model is made, or leave these settings out"
        )
    return set(others.values())


def _data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    replicated = mesh["dp_replicate"].size() > 1
    # One replica is no dimension: torch would keep what it sends to none until the step's end.
    if mesh["cp"].size() == 1:
        return mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    # Ranks of one sequence hold the same parameters, so that these are sharded over them as well.
    sharing = flattened(mesh["dp_shard", "cp"], "dp_shard_cp")
    return joined([mesh["dp_replicate"], sharing]) if replicated else sharing
