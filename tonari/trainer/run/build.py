"""From settings to the things a run is made of."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dataio
import importance
from dataio.arguments import find_device
from dataio.job.launch import Job
from dataio.plan.policies import ByFields, Importance, refresh_every
from dataio.rowlog.reading import ROWS
from dataio.world import World
from tonari.trainer.config.augment import check_rescoring
from tonari.trainer.config.config import NO_SWAP, Config
from tonari.trainer.config.kinds import check_args
from tonari.trainer.config.model import GIVEN, MODELS
from tonari.trainer.config.optimizer import Compressed
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.compress import Compression
from tonari.trainer.mesh.mesh import axis_sizes, check_context, make_mesh, num_microbatches
from tonari.trainer.mesh.parallelize import Tile, parallelize
from tonari.trainer.mesh.pipeline import Pipeline, check_microbatches
from tonari.trainer.mesh.place import Place, num_stages, place_of
from tonari.trainer.mesh.swap import Swap
from tonari.trainer.models import Adapted, StagedModel, deferred, seeded
from tonari.trainer.models.staged import without_data
from tonari.trainer.private.norms import BatchNorm
from tonari.trainer.run.contracts import check_columns, check_rows_apart, check_settings
from tonari.trainer.run.data import text_sources, token_field
from tonari.trainer.run.images import evaluation_fields, image_fields, image_task, normalise
from tonari.trainer.run.language import make_language_model
from tonari.trainer.run.own import Own, OwnLoss, adapt, check_loss, import_model, own_of
from tonari.trainer.run.pace import Pace, build_schedule, find_max_steps, tokens_per_step
from tonari.trainer.run.packed import (
    NextTokenInDocument,
    NextTokenOfAll,
    check_documents_apart,
    check_tokenizer,
    check_vocabulary,
    packed_fields,
    packed_sources,
)
from tonari.trainer.run.tasks import NextToken, Task
from tonari.trainer.run.tiled import TiledTask, are_tiled, of_tile, sample_shape
from tonari.trainer.tiles import Grid, tile_stages
from tonari.trainer.watch.peak import peak_flops_per_s

log = logging.getLogger(__name__)

Data = dataio.Source | dataio.Shards | list[str]
"""What a loader opens."""


@dataclass(frozen=True, kw_only=True)
class RunLayout:
    """How a run is spread over its ranks.

    Attributes:
        sizes: Ranks along each of ``tonari.trainer.mesh.mesh.AXES``.
        num_stages: Stages of the model.
        microbatches: Parts of a batch.
    """

    sizes: tuple[int, ...]
    num_stages: int
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A model spread over the mesh.

    Attributes:
        pipeline: Trains and scores.
        task: What it learns.
        flops_per_row: Of one sample's forward pass.
        peak_flops_per_s: Of this rank's device; 0 where nobody knows.
    """

    pipeline: Pipeline
    task: Task
    flops_per_row: int
    peak_flops_per_s: float


def lay_out(config: Config, world_size: int) -> RunLayout:
    """Decide the sizes of the mesh, and check that all that is divided by them can be.

    Raises:
        ConfigError: If the settings do not fit each other, or this many ranks.
    """
    mesh, data = config.mesh, config.data
    sizes = axis_sizes(
        world_size, pp=mesh.pp, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard,
        cp=mesh.sharing, tp=mesh.tp, tiles=bool(mesh.tiles),
    )  # fmt: skip
    is_text = data.kind == "text"
    check_context(mesh.cp, sequence_length=data.sequence_length if is_text else None)
    microbatches = num_microbatches(
        mesh.microbatches, pp=mesh.pp, schedule=mesh.schedule, virtual=mesh.virtual
    )
    check_microbatches(
        batch_size=data.batch_size, microbatches=microbatches, pp=mesh.pp, schedule=mesh.schedule,
        virtual=mesh.virtual,
    )  # fmt: skip
    stages = num_stages(mesh.pp, mesh.schedule, mesh.virtual)
    check_tokenizer(config)
    if not config.model.is_own:
        # A model of one's own is made once, and checked where it is spread.
        with torch.device("meta"):
            make_model(config).check_mesh(num_stages=stages, tp=mesh.tp)
    return RunLayout(sizes=sizes, num_stages=stages, microbatches=microbatches)


def build_place(config: Config, layout: RunLayout, rank: int) -> Place:
    """Find what a rank is to the run."""
    mesh = config.mesh
    return place_of(
        rank, layout.sizes, schedule=mesh.schedule, virtual=mesh.virtual, tiles=bool(mesh.tiles)
    )


def make_model(config: Config, own: Own | None = None) -> StagedModel:
    """Make the whole model, on torch's default device; weights follow from torch's generator.

    Args:
        config: The settings.
        own: What the caller of `trainer.train` brings.

    Raises:
        ConfigError: If there is no such model.
    """
    model, data = config.model, config.data
    if model.is_own:
        return _make_own(config, own_of(config, own))
    if own is not None and own.model is not None:
        raise ConfigError(
            f'model.kind is "{model.kind}", a model of this package, and trainer.train is given '
            "model=, expected one of both; leave [model] out, but for weights, layers and args, or "
            "model= of the call"
        )
    try:
        if data.kind == "text":
            return make_language_model(config)
        size = config.augment.size or data.image_size or 32
        sized = {"in_channels": data.channels, "image_size": size} | model.settings
        return normalise(MODELS[model.kind](**sized), config.augment)
    except ValueError as error:
        raise ConfigError(f"[model]: {error}") from error


def _make_own(config: Config, own: Own) -> StagedModel:
    model, augment = config.model, config.augment
    build = own.model
    if build is None:
        if model.kind == GIVEN:
            raise ConfigError(
                "model.kind is missing; set it in the file, give model.kind=VALUE, or call "
                "trainer.train(config, model=...)"
            )
        made_by = import_model(model.kind)
        check_args("model", made_by, model.args)
        build = partial(made_by, **model.args)
    adapted = adapt(
        build(), layers=model.layers, task=make_task(config, own),
        fields=make_fields(config, own), mean=augment.mean, std=augment.std,
    )  # fmt: skip
    check_vocabulary(config, adapted)
    return adapted


def make_task(
    config: Config, own: Own, *, mesh: DeviceMesh | None = None, replica: int = 0
) -> Task:
    """Make what the run learns: the caller's task and loss, or those of the data.

    Args:
        config: The settings.
        own: What the caller of `trainer.train` brings.
        mesh: The run's; None: the task describes shapes only.
        replica: The rank's.
    """
    by_tokens = config.text.mean == "tokens"
    if by_tokens and (own.task is not None or own.loss is not None):
        raise ConfigError(
            'text.mean is "tokens", but train was given a task or a loss of its own, which gives '
            "one loss a row; leave it out, and give the task num_targets(batch) -> int64[batch]"
        )
    check_settings(config.augment, own)
    if own.task is not None:
        task = own.task
    elif config.text.is_packed:
        kind = NextTokenOfAll if by_tokens else NextTokenInDocument
        task = kind(named=config.model.is_own)
    elif config.data.kind == "text":
        task = NextToken(cp=None if mesh is None else mesh["cp"])
    else:
        task = image_task(config.augment, seed=config.run.seed, replica=replica)
    return task if own.loss is None else OwnLoss(task, own.loss)


def make_fields(config: Config, own: Own) -> Mapping[str, dataio.Field]:
    """Describe a training sample: by the caller's fields, or those of the data."""
    return own.fields or _fields(config)


def make_evaluation_fields(
    config: Config, own: Own, *, tile: int = 0
) -> Mapping[str, dataio.Field] | None:
    """Describe a sample that is evaluated on; None: as one of training.

    Args:
        config: The settings.
        own: What the caller of `trainer.train` brings.
        tile: The rank's, of fields that are cut.

    Raises:
        ConfigError: If the caller's fields would crop or flip it by chance.
    """
    if own.evaluation_fields is not None:
        are_tiled(config, own.evaluation_fields)
        return of_tile(own.evaluation_fields, tile)
    if not own.fields:
        return evaluation_fields(config.data, config.augment)
    for name, its in own.fields.items():
        if isinstance(its, dataio.Image | dataio.Mask) and its.draws:
            raise ConfigError(
                f"fields: {name!r} is cropped or flipped by chance, expected none where a model is "
                "measured; give train(evaluation_fields=...), such as Image(..., "
                "crop=CenterCrop(224)), or leave data.test out"
            )
    return None


def make_without_data(config: Config, layout: RunLayout, own: Own) -> StagedModel:
    """Make the whole model without data, for a dry run, and refuse what does not fit it.

    Raises:
        ConfigError: If it cannot be divided so, or the shapes of its inputs are not known.
    """
    if not config.model.is_own:
        with torch.device("meta"):
            return make_model(config)
    model = deferred(partial(make_model, config, own), seed=config.run.seed, draws=False)
    model.recording = None
    # A constructor that cannot be recorded has made the model in memory.
    model = without_data(model)
    model = model.double() if config.mesh.dtype == "float64" else model
    model.check_mesh(num_stages=layout.num_stages, tp=layout.sizes[4])
    check_loss(model, make_task(config, own), make_fields(config, own))
    if isinstance(model, Adapted) and not model.knows_inputs:
        raise ConfigError(
            f"--dry-run: the shapes of the inputs of {config.model.kind} are not known, by which "
            "activations are counted; give data.image_size, or Adapted.describe_inputs for inputs "
            "of your own"
        )
    return model


def build_parallel(config: Config, job: Job, own: Own | None = None) -> Parallel:
    """Make the model, the same on every rank, and spread it over the mesh. Collective.

    Args:
        config: The settings.
        job: This rank.
        own: What the caller of `trainer.train` brings.

    Raises:
        ConfigError: If it cannot be divided so, its loss is not one a row, or of packed documents
            one sees another.
    """
    world = job.world
    return build_rank(
        config,
        rank=world.rank,
        world_size=world.world_size,
        device=job.device,
        own=own_of(config, own),
    )


def build_rank(
    config: Config, *, rank: int, world_size: int, device: torch.device, own: Own
) -> Parallel:
    """Make what `build_parallel` does, as a rank of torch's default process group. Collective."""
    layout, settings = lay_out(config, world_size), config.mesh
    mesh = make_mesh(layout.sizes, device_type=device.type)
    place = build_place(config, layout, rank)
    # A caller's module stays as its constructor made it where no rank has a part of a weight.
    _, _, *splits = layout.sizes
    whole = config.model.is_own and layout.sizes[0] * math.prod(splits) == 1
    build = seeded if whole else deferred
    model = build(partial(make_model, config, own), seed=config.run.seed)
    task = make_task(config, own, mesh=mesh, replica=place.replica)
    fields = make_fields(config, own)
    check_columns(task, fields, own)
    check_loss(model, task, fields)
    if own.task is not None or own.loss is not None:
        cut_by = _what_parts_a_step(config, place, layout.microbatches)
        check_rows_apart(model, task, fields, cut_by=cut_by)
    if not any(each.requires_grad for each in model.parameters()):
        kind = type(model.wrapped if isinstance(model, Adapted) else model).__name__
        raise ConfigError(
            f"{kind} has no weights that are trained, expected one at least; leave requires_grad "
            "of some as it is"
        )
    flops = model.flops_per_row()
    # Parameters of that precision; bfloat16 is that of the computation only.
    model = model.double() if settings.dtype == "float64" else model
    tile = None
    if place.tiles:
        task, tile = take_tiles(config, own, task, mesh=mesh)
    parts = spread(config, model, mesh, place, swap=make_swap(config, device), tile=tile)
    if settings.channels_last:
        lay_channels_last(parts, num_ranks=mesh.size())
    pipeline = make_pipeline(
        config, layout, parts, place=place, mesh=mesh, task=task, device=device
    )
    if config.text.is_packed and config.model.is_own and own.task is None:
        check_documents_apart(pipeline, config)
    peak = peak_flops_per_s(device, dtype=settings.dtype, stated_tflops=config.run.peak_tflops)
    return Parallel(pipeline=pipeline, task=task, flops_per_row=flops, peak_flops_per_s=peak)


def _what_parts_a_step(config: Config, place: Place, microbatches: int) -> str:
    """Name the setting by which the rows of a step are not one batch; empty: they are."""
    parts = {
        f"mesh.microbatches = {microbatches}": microbatches,
        f"having {place.num_replicas} replicas": place.num_replicas,
        f"optimizer.accumulate = {config.optimizer.accumulate}": config.optimizer.accumulate,
    }
    return next((name for name, number in parts.items() if number > 1), "")


def lay_channels_last(parts: Sequence[nn.Module], *, num_ranks: int) -> None:
    """Lay weights of convolutions channels last, in place.

    Raises:
        ConfigError: If there are several ranks: what is sharded or sent lies in rows.
    """
    if num_ranks > 1:
        raise ConfigError(
            f"mesh.channels_last is true on {num_ranks} ranks, expected one, as weights that ranks "
            "share lie in rows; leave it out"
        )
    for part in parts:
        part.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def make_swap(config: Config, device: torch.device) -> Swap | None:
    """Make what swaps blocks' activations; None: no block's are.

    Raises:
        ConfigError: If the device's memory is the host's.
    """
    count = config.mesh.swap_blocks
    if count and device.type == "cpu":
        raise ConfigError(NO_SWAP.format(count, "the run is on the CPU"))
    return Swap(count, device) if count else None


def take_tiles(
    config: Config, own: Own, task: Task, *, mesh: DeviceMesh
) -> tuple[Task, Tile]:  # fmt: skip
    """Have a task, and what `spread` makes, take a rank's tile of samples."""
    fields = make_fields(config, own)
    grid, sample = Grid(config.mesh.tiles, mesh.get_group("cp")), sample_shape(config, task, fields)
    return TiledTask(task, grid, sample, fields), partial(
        tile_stages, grid=grid, sample_shape=sample
    )


def spread(
    config: Config, model: StagedModel, mesh: DeviceMesh, place: Place, *,
    swap: Swap | None = None, tile: Tile | None = None,
) -> list[StagedModel]:  # fmt: skip
    """Cut out a rank's stages and spread them as the settings say, by `parallelize`. Collective."""
    settings = config.mesh
    return parallelize(
        model, mesh, place,
        sequence_parallel=settings.sequence_parallel,
        loss_parallel=settings.loss_parallel,
        checkpointing=settings.checkpointing,
        checkpointing_blocks=settings.checkpointing_blocks,
        dtype="bfloat16" if settings.dtype == "bfloat16" else "float32",
        compile=settings.compile,
        offload=settings.offload,
        swap=swap,
        tile=tile,
        compresses=_compression(config, mesh) != "none",
    )  # fmt: skip


def _compression(config: Config, mesh: DeviceMesh) -> Compressed:
    return config.optimizer.compress_gradients if mesh["dp_replicate"].size() > 1 else "none"


def make_pipeline(
    config: Config, layout: RunLayout, parts: Sequence[StagedModel], *, place: Place,
    mesh: DeviceMesh, task: Task, device: torch.device,
) -> Pipeline:  # fmt: skip
    """Make what trains a rank's stages. Collective."""
    settings, optimizer = config.mesh, config.optimizer
    compression, kind = None, _compression(config, mesh)
    if kind != "none":
        compression = Compression(
            parts, mesh, kind=kind, rank=optimizer.compress_rank,
            warmup_steps=optimizer.compress_warmup_steps, seed=config.run.seed,
        )  # fmt: skip
    elif optimizer.compress_gradients != "none" and mesh.size() > 1 and not place.rank:
        log.warning(
            '[rank 0] optimizer.compress_gradients is "%s", but mesh.dp_replicate is 1, over which '
            "gradients are compressed: all go as they are; give a smaller mesh.dp_shard, such as "
            "the ranks of a node", optimizer.compress_gradients,
        )  # fmt: skip
    return Pipeline(
        parts, place, mesh, task, schedule=settings.schedule, microbatches=layout.microbatches,
        batch_size=config.data.batch_size, device=device, seed=config.run.seed,
        sequence_parallel=settings.sequence_parallel, is_own=config.model.is_own,
        compression=compression,
    )  # fmt: skip


def build_loader(
    config: Config, job: Job, *, place: Place, task: Task, own: Own | None = None,
    logs_rows: bool = False,
) -> tuple[ReplicaLoader, Data | None]:  # fmt: skip
    """Open the training data, and find what to evaluate on. Collective; blocks until it is staged.

    Args:
        config: The settings.
        job: This rank.
        place: The rank's place in the mesh.
        task: What is learnt.
        own: What the caller of `trainer.train` brings.
        logs_rows: Whether which rows are trained is logged in the run's directory.

    Raises:
        ConfigError: If a setting does not fit the data, such as the size of a batch.
        DataioError: If the data or the cache cannot be used.
    """
    data, own = config.data, own_of(config, own)
    fields = make_fields(config, own)
    train, test = own.sources or open_data(config)
    if test is not None:
        make_evaluation_fields(config, own)
    policy = make_importance(config)
    goes_by = policy.by_fields if isinstance(policy, ByFields) else ()
    by_tile = are_tiled(config, fields)
    fields = of_tile(fields, place.tile)

    def open_loader(
        world: World, device: torch.device | None, columns: Collection[str]
    ) -> dataio.Loader:
        return dataio.Loader(
            train,
            batch_size=data.batch_size,
            fields={
                name: field for name, field in fields.items() if name in columns or name in goes_by
            },
            cache=data.cache,
            shuffle=config.shuffle.make(),
            importance=policy,
            transform=own.transform,
            device=device,
            seed=config.run.seed,
            world=world,
            drop_last=data.drop_last,
            exclude=data.exclude or None,
            staging=data.staging,
            workers=data.workers,
            # Of those that read the inputs and those that read the targets, one reports.
            reports=dataio.Reports(
                progress=job.world.rank == 0,
                rows=Path(config.run.directory) / ROWS if logs_rows and place.reads else None,
                accumulate=config.optimizer.accumulate,
            ),
        )

    try:
        loader = ReplicaLoader(
            open_loader, world=job.world, place=place, inputs=task.columns.input,
            targets=task.columns.target, targets_by=config.mesh.targets, by_tile=by_tile,
            device=job.device,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"[data]: {error}") from error
    return loader, test


def check_device(device: str) -> None:
    """Refuse a device that torch does not see."""
    try:
        find_device(None if device == "auto" else device, name="run.device")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def warn_of_padding(config: Config, pipeline: Pipeline, loader: ReplicaLoader) -> None:
    """Say that rows which fill up an epoch's last batch count in batch statistics, if they may."""
    rows = config.data.batch_size * pipeline.place.num_replicas
    fills_up = loader.num_samples % rows or config.importance.kind != "full"
    modules = (each for part in pipeline.parts for each in part.modules())
    norms = (each for each in modules if isinstance(each, BatchNorm))
    if fills_up and not config.data.drop_last and any(each.training for each in norms):
        log.warning(
            "the model has batch norm, and rows of weight 0 fill up the last batch of an epoch: "
            "they count in its statistics; give data.drop_last=true where that matters"
        )


def build_pace(config: Config, *, num_replicas: int, epoch_batches: int) -> Pace:
    """Decide the length of a run, and its learning rate.

    Args:
        config: The settings.
        num_replicas: Replicas that train.
        epoch_batches: Batches of a replica's first epoch.

    Raises:
        ConfigError: If the epochs are too few for the steps.
    """
    run, accumulate = config.run, config.optimizer.accumulate
    step_tokens = tokens_per_step(config, num_replicas=num_replicas)
    return Pace(
        config.optimizer,
        epochs=run.epochs,
        max_steps=find_max_steps(run.max_steps, run.max_tokens, step_tokens=step_tokens),
        epoch_steps=math.ceil(epoch_batches / accumulate),
    )


def training_source(config: Config, *, index_cache: Path | None = None) -> dataio.Source:
    """Open the training data in this process alone, as a loader would.

    Args:
        config: The settings.
        index_cache: See `dataio.open_source`.

    Raises:
        ConfigError: If a text cannot be read.
        DataioError: If the data cannot.
    """
    data, _ = open_data(config)
    return open_alone(data, index_cache=index_cache)


def open_alone(data: Data, *, index_cache: Path | None = None) -> dataio.Source:
    """Open data in this process alone, as a loader would.

    Raises:
        DataioError: If it cannot be read.
    """
    if isinstance(data, dataio.Shards):
        return dataio.open_source(
            data.names, sequences=data.sequences, joined=data.joined, index_cache=index_cache
        )
    return dataio.open_source(data, index_cache=index_cache) if isinstance(data, list) else data


def _listed(patterns: str | tuple[str, ...]) -> list[str]:
    if isinstance(patterns, str):
        return [patterns] if patterns else []
    return list(patterns)


def _fields(config: Config) -> dict[str, dataio.Field]:
    if config.text.is_packed:
        return packed_fields(config)
    if config.data.kind == "text":
        return {"tokens": token_field(config.data.sequence_length)}
    return image_fields(config.data, config.augment, training=True)


def make_importance(config: Config) -> Importance | None:
    """Make the policy, which may depend on the optimizer's schedule; None: all rows are trained."""
    chosen, optimizer = config.importance, config.optimizer
    if chosen.kind == "full" and not chosen.settings:
        # No policy at all: full data needs no agreement between ranks.
        return None
    drops: tuple[int, ...] = ()
    if chosen.drops_by_rate:
        schedule = build_schedule(optimizer, length=config.run.epochs)
        drops = importance.lr_drops(schedule, config.run.epochs)
    warmup_epochs = math.ceil(optimizer.warmup_epochs or optimizer.warms_up_by_step)
    policy = chosen.make(warmup_epochs=warmup_epochs, drops=drops)
    check_rescoring(config.augment, rescores=refresh_every(policy) is not None)
    return policy


def open_data(config: Config) -> tuple[Data, Data | None]:
    """Find what is trained on, and what to evaluate on, if there is any."""
    data = config.data
    if config.text.is_packed:
        return packed_sources(config)
    train, test = _listed(data.train), _listed(data.test)
    if data.kind == "images" and data.joined:
        shards = partial(dataio.Shards, joined=True)
        return shards(train), shards(test) if test else None
    if data.kind == "images":
        return train, test or None
    return text_sources(
        train, test, sequence_length=data.sequence_length, test_fraction=data.test_fraction
    )
