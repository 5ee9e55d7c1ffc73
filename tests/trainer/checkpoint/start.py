"""One start of a run, small enough to be made many times."""

from pathlib import Path

import torch
from torch import Tensor

from tests.trainer.deliver.fake_loader import NUM_CLASSES, FakeLoader
from tests.trainer.run.alone import one_stage, step_loss
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import Progress
from tonari.trainer.checkpoint.restore import restore
from tonari.trainer.mesh.mesh import axis_sizes, make_mesh
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.models import SmallCNN, seeded


class Start:
    """One start of a run: what a process holds."""

    def __init__(self, *, image_size: int = 8, adam: bool = False) -> None:
        mesh = make_mesh(axis_sizes(1), device_type="cpu")
        made = seeded(lambda: SmallCNN(NUM_CLASSES, 3, image_size), seed=0)
        (self.model,) = parallelize(made, mesh)
        self.pipeline = one_stage(self.model, mesh, batch_size=8)
        self.optimizer: torch.optim.Optimizer
        if adam:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = FakeLoader(replica=0, num_replicas=1, global_batch_size=8, steps=6)
        self.progress = Progress()

    def train(self, steps: int) -> list[Tensor]:
        """Take some steps; return their losses."""
        batches = iter(self.loader)
        losses = []
        for _ in range(steps):
            batch = next(batches)
            losses.append(step_loss(self.pipeline, self.optimizer, self.loader, batch))
        self.progress = Progress(0, self.progress.steps + steps)
        return losses

    def save(self, directory: Path, *, keep: int = 2) -> Path:
        with Checkpoints(directory, keep=keep) as checkpoints:
            return self.save_by(checkpoints)

    def save_by(self, checkpoints: Checkpoints) -> Path:
        return checkpoints.save([self.model], self.optimizer, self.loader, self.progress)

    def restore(self, path: Path) -> None:
        self.progress = restore(path, [self.model], self.optimizer, self.loader)
