"""Distributed training over one mesh of pipeline, data, context and tensor parallel ranks."""

from trainer.config import Config, load_config
from trainer.deliver import ReplicaLoader
from trainer.errors import CheckpointError, ConfigError, DeliveryError
from trainer.launch import Job, join
from trainer.loop import Summary, train
from trainer.mesh import axis_sizes, make_mesh
from trainer.models import GPT, ResNet, SmallCNN, StagedModel, ViT, seeded
from trainer.parallelize import average_buffers, parallelize
from trainer.pipeline import Pipeline
from trainer.place import Place, place_of
from trainer.schedule import learning_rate
from trainer.step import evaluate, rescore, train_step
from trainer.tasks import Classify, NextToken, Task

__all__ = [
    "GPT", "CheckpointError", "Classify", "Config", "ConfigError", "DeliveryError", "Job",
    "NextToken", "Pipeline", "Place", "ReplicaLoader", "ResNet", "SmallCNN", "StagedModel",
    "Summary", "Task", "ViT", "average_buffers", "axis_sizes", "evaluate", "join",
    "learning_rate", "load_config", "make_mesh", "parallelize", "place_of", "rescore", "seeded",
    "train", "train_step",
]  # fmt: skip
