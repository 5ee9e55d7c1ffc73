"""From settings to the things a run is made of."""

from collections.abc import Callable

import torch
from torch import nn

import dataio
import importance
import shuffle
from dataio.evaluation import Evaluation
from dataio.policies import Importance, Shuffle
from trainer.config import Config, DataConfig, ModelConfig, OptimizerConfig, ShuffleConfig
from trainer.errors import ConfigError
from trainer.launch import Job
from trainer.mesh import axis_sizes, make_mesh
from trainer.models import ResNet, SmallCNN, StagedModel, seeded
from trainer.parallelize import parallelize
from trainer.schedule import learning_rate


def build_loader(config: Config, job: Job) -> dataio.Loader:
    """Open the training data. Collective; blocks until it is staged.

    Raises:
        ConfigError: If a setting does not fit the data, such as the size of a batch.
        DataioError: If the data or the cache cannot be used.
    """
    data = config.data
    policy = _importance(config)
    try:
        return dataio.Loader(
            _patterns(data.train),
            batch_size=data.batch_size,
            fields=_fields(data),
            cache=data.cache,
            shuffle=_shuffle(config.shuffle),
            importance=policy,
            device=job.device,
            seed=config.run.seed,
            world=job.world,
            num_threads=data.num_threads,
            num_processes=data.num_processes,
            prefetch=data.prefetch,
            drop_last=data.drop_last,
            stage=data.stage,
            staging_readers=data.staging_readers,
            staging_bandwidth=data.staging_bandwidth,
            quota=data.quota or None,
        )
    except ValueError as error:
        raise ConfigError(f"[data]: {error}") from error


def build_evaluation(config: Config, loader: dataio.Loader) -> Evaluation | None:
    """Open the test data, if there is any. Collective; blocks until it is staged."""
    return loader.evaluation(_patterns(config.data.test)) if config.data.test else None


def build_model(config: Config, job: Job) -> nn.Module:
    """Make the model, the same on every rank, and spread it over the mesh. Collective."""
    axes = config.mesh
    sizes = axis_sizes(
        job.world.world_size, pp=axes.pp, dp_replicate=axes.dp_replicate, dp_shard=axes.dp_shard,
        cp=axes.cp, tp=axes.tp,
    )  # fmt: skip
    mesh = make_mesh(sizes, device_type=job.device.type)
    model = seeded(lambda: _model(config.model, config.data.channels), seed=config.run.seed)
    return parallelize(model, mesh)[0]


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of a parallelized model."""
    return torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=config.momentum,
        weight_decay=config.weight_decay,
    )  # fmt: skip


def build_schedule(config: OptimizerConfig, *, num_epochs: int) -> Callable[[float], float]:
    """Make epoch -> learning rate of a run, before the importance policy's factor."""
    return lambda epoch: learning_rate(
        epoch, num_epochs=num_epochs, lr=config.lr, schedule=config.schedule,
        warmup_epochs=config.warmup_epochs, milestones=config.milestones, decay=config.decay,
    )  # fmt: skip


def _patterns(patterns: str | tuple[str, ...]) -> str | list[str]:
    return patterns if isinstance(patterns, str) else list(patterns)


def _fields(data: DataConfig) -> dict[str, dataio.Field]:
    image = dataio.Image(data.image, size=data.image_size, channels=data.channels)
    return {"image": image, "label": dataio.Int(data.label)}


def _shuffle(config: ShuffleConfig) -> Shuffle:
    if config.kind == "partial":
        return shuffle.Partial(config.exchange, rows=config.rows, partners=config.partners)
    return shuffle.Local() if config.kind == "local" else shuffle.Global(moves=config.moves)


def _importance(config: Config) -> Importance | None:
    kind, settings = config.importance.kind, config.importance.settings
    if kind == "full" and not settings:
        # No policy at all: full data needs no agreement between ranks.
        return None
    if settings.get("refresh_every") == 0:
        settings["refresh_every"] = None
    if kind == "kakurenbo":
        settings["warmup_epochs"] = config.optimizer.warmup_epochs
    if settings.get("drops") == "lr":
        schedule = build_schedule(config.optimizer, num_epochs=config.run.epochs)
        drops = importance.lr_drops(schedule, config.run.epochs)
        alphas = config.importance.alphas or importance.Kakurenbo.alphas
        # A rate that halves less often than there are alphas leaves the last ones out.
        settings |= {"drops": drops, "alphas": alphas[: len(drops) + 1]}
    try:
        return importance.make_policy(kind, **settings)
    except ValueError as error:
        raise ConfigError(f"[importance]: {error}") from error


def _model(config: ModelConfig, channels: int) -> StagedModel:
    if config.kind == "resnet":
        return ResNet(config.num_classes, channels, depth=config.depth, norm=config.norm)
    return SmallCNN(config.num_classes, channels, config.image_size)
