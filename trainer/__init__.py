"""Distributed training over one mesh of pipeline, data, context and tensor parallel ranks."""

# First, for one clear message before anything fails on another torch.
from trainer.torch_range import TorchVersionError  # isort: split

from trainer.checkpoint.checkpoint import Checkpoints
from trainer.checkpoint.directory import Progress
from trainer.checkpoint.restore import find, restore
from trainer.config.config import Config, load_config
from trainer.deliver.deliver import ReplicaLoader
from trainer.errors import CheckpointError, ConfigError, DeliveryError
from trainer.mesh.mesh import axis_sizes, make_mesh
from trainer.mesh.parallelize import average_buffers, parallelize
from trainer.mesh.pipeline import Pipeline
from trainer.mesh.place import Place, place_of
from trainer.models import GPT, Adapted, ResNet, SmallCNN, StagedModel, ViT, seeded
from trainer.models.trace import Inputs
from trainer.run.loop import Summary, train
from trainer.run.schedule import learning_rate
from trainer.run.step import evaluate, rescore, train_step
from trainer.run.tasks import Classify, Columns, CountsTargets, NextToken, Task
from trainer.run.verify.checking import Verdict, verify
from trainer.watch.launch import Job, join
from trainer.watch.metrics import MetricsLog
from trainer.watch.watchdog import Watchdog

__all__ = [
    "GPT", "Adapted", "CheckpointError", "Checkpoints", "Classify", "Columns", "Config",
    "ConfigError", "CountsTargets", "DeliveryError", "Inputs", "Job", "MetricsLog", "NextToken",
    "Pipeline", "Place", "Progress", "ReplicaLoader", "ResNet", "SmallCNN", "StagedModel",
    "Summary", "Task", "TorchVersionError", "Verdict", "ViT", "Watchdog", "average_buffers",
    "axis_sizes", "evaluate", "find", "join", "learning_rate", "load_config", "make_mesh",
    "parallelize", "place_of", "rescore", "restore", "seeded", "train", "train_step", "verify",
]  # fmt: skip
