"""Runs that start from weights that were trained before."""

from pathlib import Path

import torch

from tonari.trainer.checkpoint.agree import file_group, together
from tonari.trainer.checkpoint.weights import WeightFiles
from tonari.trainer.config.config import Config
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.run.build import make_model
from tonari.trainer.run.own import Own


def start_from_weights(config: Config, pipeline: Pipeline, own: Own) -> None:
    """Fill this rank's parts with ``model.weights``, if these are given. Collective.

    Args:
        config: The settings.
        pipeline: Its parts may lie on any mesh.
        own: What the caller of `trainer.train` brings.

    Raises:
        ConfigError: If the weights are not those of this model.
        CheckpointError: If another rank could not read them.
    """
    if not config.model.weights:
        return
    with torch.device("meta"):
        whole = make_model(config, own)

    def read() -> None:
        files = WeightFiles(Path(config.model.weights))
        files.check(whole)
        files.read_into(pipeline.parts)

    together(read, file_group())
