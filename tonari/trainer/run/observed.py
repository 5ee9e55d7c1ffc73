"""What may look at a run under way: its batches, losses, gradients and state; changes nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dataio.job.launch import Job
from dataio.rows.samples import Batch
from tonari.trainer.checkpoint.directory import Progress
from tonari.trainer.config.config import Config
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import EvaluationMeans, Step, TakesReports


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A run that is about to train.

    Attributes:
        config: Its settings.
        own: What its caller brings.
        job: This rank.
        pipeline: The model.
        optimizer: Of its parameters.
        average: Of its weights, as `WeightAverage.state`; None: the run keeps none.
        progress: What is done: more than nothing where it goes on.
        checkpoint: What it goes on from; None: it starts anew.
    """

    config: Config
    own: Own
    job: Job
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    average: Mapping[str, Tensor] | None
    progress: Progress
    checkpoint: Path | None


class Observer:
    """Looks at nothing; others override what they look at. Every rank has one, of the same kind."""

    def begin(self, run: Begun) -> None:
        """See the run before its first step."""

    @property
    def wants_norm(self) -> bool:
        """Whether the next step measures the norm of the gradients though nothing clips them."""
        return False

    def reports(self, loader: TakesReports) -> TakesReports:
        """Stand before the loader, for the losses of the next step's rows."""
        return loader

    def stepping(self, batches: Sequence[Batch]) -> None:
        """See the batches of the next step, before a model changes them in place."""

    def step(self, batches: Sequence[Batch], step: Step, *, number: int, lr: float) -> None:
        """See a step that is done; ``number`` counts from 0."""

    def buffers_averaged(self) -> None:
        """See that all replicas were given the mean of their batch statistics."""

    def evaluating(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Stand between an evaluation and its batches."""
        return batches

    def evaluated(self, found: EvaluationMeans) -> None:
        """See what an evaluation gave."""

    def average_evaluated(self, found: EvaluationMeans) -> None:
        """See what the same evaluation of the averaged weights gave."""
