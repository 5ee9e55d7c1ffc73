"""Distributed training through one device mesh; this version trains data-parallel."""

from trainer.config import Config, load_config
from trainer.errors import ConfigError
from trainer.launch import Job, join
from trainer.loop import Summary, train
from trainer.mesh import axis_sizes, make_mesh
from trainer.models import ResNet, SmallCNN, seeded
from trainer.parallelize import average_buffers, parallelize
from trainer.schedule import learning_rate
from trainer.step import evaluate, rescore, train_step

__all__ = [
    "Config", "ConfigError", "Job", "ResNet", "SmallCNN", "Summary", "average_buffers",
    "axis_sizes", "evaluate", "join", "learning_rate", "load_config", "make_mesh", "parallelize",
    "rescore", "seeded", "train", "train_step",
]  # fmt: skip
