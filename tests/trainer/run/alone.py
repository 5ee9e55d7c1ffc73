"""A model of one stage as a pipeline, and a step that says its loss."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dataio.rows.samples import Batch
from tests.trainer.deliver.fake_loader import FakeLoader
from tonari.trainer.mesh.mesh import AXES, make_mesh
from tonari.trainer.mesh.pipeline import Judge, Pipeline
from tonari.trainer.mesh.place import place_of
from tonari.trainer.run.step import train_step
from tonari.trainer.run.tasks import Classify


def one_stage(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    batch_size: int,
    microbatches: int = 1,
    task: Judge | None = None,
) -> Pipeline:
    """Make a pipeline of a model that is spread already, or, without a mesh, of one process."""
    mesh = mesh or make_mesh((1,) * len(AXES), device_type="cpu")
    place = place_of(mesh.get_rank(), mesh.shape, schedule="1f1b", virtual=1)
    return Pipeline(
        [model], place, mesh, task or Classify(), schedule="1f1b", microbatches=microbatches,
        batch_size=batch_size, device=torch.device("cpu"),
    )  # fmt: skip


class Told(FakeLoader):
    """A loader that keeps what it was told of each batch."""

    def __init__(self, *, batch_size: int, steps: int = 1) -> None:
        super().__init__(replica=0, num_replicas=1, global_batch_size=batch_size, steps=steps)
        self.told: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def report(
        self, batch: Batch, loss: Tensor, correct: Tensor | None, confidence: Tensor | None
    ) -> None:
        """Keep it."""
        super().report(batch, loss, correct, confidence)
        self.told.append((loss, correct, confidence))


class _WithLoss:
    """Notes the weighted loss on the way to a loader."""

    needs_outcome = True

    def __init__(self, loader: FakeLoader) -> None:
        self.refresh = loader.refresh
        self._loader, self.loss = loader, torch.zeros(())

    def report(
        self, batch: Batch, loss: Tensor, correct: Tensor | None, confidence: Tensor | None
    ) -> None:
        self.loss = (loss * batch["weight"]).mean()
        self._loader.report(batch, loss, correct, confidence)


def step_loss(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, loader: FakeLoader, batch: Batch
) -> Tensor:
    """Take a step; return its weighted loss on this replica."""
    noted = _WithLoss(loader)
    train_step(pipeline, optimizer, noted, [batch])
    return noted.loss
