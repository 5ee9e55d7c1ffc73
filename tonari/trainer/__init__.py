"""Distributed training over one mesh of pipeline, data, context and tensor parallel ranks."""

# First, for one clear message before anything fails on another torch.
from tonari.trainer.torch_range import TorchVersionError  # isort: split

from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import Progress
from tonari.trainer.checkpoint.restore import find, restore
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.errors import CheckpointError, ConfigError, DeliveryError
from tonari.trainer.mesh.branches import Branches, clip_grad_norm, gather_rows
from tonari.trainer.mesh.mesh import axis_sizes, make_mesh
from tonari.trainer.mesh.parallelize import average_buffers, parallelize
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.mesh.place import Place, place_of
from tonari.trainer.models import GPT, Adapted, ResNet, SmallCNN, StagedModel, ViT, seeded
from tonari.trainer.models.given import Inputs
from tonari.trainer.run.loop import train
from tonari.trainer.run.schedule import learning_rate
from tonari.trainer.run.step import evaluate, rescore, train_step
from tonari.trainer.run.tasks import Classify, Columns, CountsTargets, NextToken, Task
from tonari.trainer.run.verify.checking import Verdict, verify
from tonari.trainer.run.words import Summary
from tonari.trainer.watch.metrics import MetricsLog

__all__ = [
    "GPT", "Adapted", "Branches", "CheckpointError", "Checkpoints", "Classify", "Columns", "Config",
    "ConfigError", "CountsTargets", "DeliveryError", "Inputs", "MetricsLog", "NextToken",
    "Pipeline", "Place", "Progress", "ReplicaLoader", "ResNet", "SmallCNN", "StagedModel",
    "Summary", "Task", "TorchVersionError", "Verdict", "ViT", "average_buffers",
    "axis_sizes", "clip_grad_norm", "evaluate", "find", "gather_rows", "learning_rate",
    "load_config", "make_mesh", "parallelize", "place_of", "rescore", "restore",
    "seeded", "train", "train_step", "verify",
]  # fmt: skip
