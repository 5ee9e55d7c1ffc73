"""Accelerate fed by Tonari: model and optimizer are prepared, the loader is used as it is.

python examples/blobs.py blobs
python examples/accelerate_loop.py blobs
torchrun --nproc-per-node 2 examples/accelerate_loop.py blobs
accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py blobs
python examples/accelerate_loop.py blobs --resume runs/20 --epochs 8

`accelerate launch` starts several processes on GPUs only.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy

import dataio
import importance
import shuffle
from tonari.frameworks.accelerate import save_with


def make_loader(shards: Path, accelerator: Accelerator, batch_size: int = 16) -> dataio.Loader:
    """Make the loader after the Accelerator, whose process group says who is who."""
    return dataio.Loader(
        f"{shards}/train-{{000000..000001}}.tar", batch_size=batch_size, seed=0,
        fields={"point": dataio.Array("bin", (8,), "float32"), "label": dataio.Int("cls")},
        shuffle=shuffle.Partial(exchange=0.1), importance=importance.Kakurenbo(0.3),
        device=accelerator.device,
    )  # fmt: skip


class Training:
    """Model, optimizer and loader, saved and restored together."""

    def __init__(self, accelerator: Accelerator, loader: dataio.Loader, saved: Path) -> None:
        network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        # Without the loader: it has dealt the rows out to the ranks already.
        self.network, self.optimizer = accelerator.prepare(network, optimizer)
        save_with(accelerator, loader)
        self.accelerator, self.loader, self.saved = accelerator, loader, saved
        self.steps = 0

    def measure(self, batch: dict[str, Any]) -> torch.Tensor:
        logits = self.network(batch["point"])
        loss = cross_entropy(logits, batch["label"], reduction="none")
        self.loader.report(batch, loss, *importance.outcome(logits, batch["label"]))
        return loss

    def step(self, batch: dict[str, Any]) -> None:
        self.accelerator.backward((self.measure(batch) * batch["weight"]).mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def epoch(self, save_every: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * self.loader.lr_factor
        for batch in self.loader:
            self.step(batch)
            if save_every and self.steps % save_every == 0:
                self.save()
        self.network.eval()
        with torch.no_grad():
            for batch in self.loader.refresh():
                self.measure(batch)
        self.network.train()

    @torch.no_grad()
    def accuracy(self, evaluation: Any) -> float:
        self.network.eval()
        counts = torch.zeros(2, device=self.accelerator.device)
        for batch in evaluation:
            right = self.network(batch["point"]).argmax(1) == batch["label"]
            counts += torch.stack([(right & batch["valid"]).sum(), batch["valid"].sum()])
        self.network.train()
        right, rows = self.accelerator.reduce(counts, "sum").tolist()
        return float(right / rows)

    def save(self) -> None:
        self.accelerator.save_state(str(self.saved / str(self.steps)))

    def restore(self, path: Path) -> None:
        self.accelerator.load_state(str(path))
        self.steps = int(path.name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", type=Path, help="what examples/blobs.py wrote")
    parser.add_argument("--saved", type=Path, default=Path("runs"), help="seen by all nodes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", type=Path, help="directory to go on from")
    given = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    with make_loader(given.shards, accelerator) as loader:
        evaluation = loader.evaluation(f"{given.shards}/val/val-{{000000..000000}}.tar")
        training = Training(accelerator, loader, given.saved)
        if given.resume:
            training.restore(given.resume)
        for epoch in loader.epochs(given.epochs):
            training.epoch(save_every=5)
            accuracy = training.accuracy(evaluation)
            accelerator.print(f"epoch {epoch}: {len(loader)} steps, accuracy {accuracy:.2f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
