"""Composer fed by Tonari: a callback reports losses and turns to the next epoch.

    python examples/blobs.py blobs
    python examples/composer_fit.py blobs
    composer -n 2 examples/composer_fit.py blobs

Each epoch is one loop of Composer over the loader.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from composer import Callback, ComposerModel, DataSpec, Logger, State, Trainer
from composer.utils import dist
from torch import nn
from torch.nn.functional import cross_entropy

import dataio
import shuffle


class Classifier(ComposerModel):
    """Weighs padding with 0, as every loop over a `dataio.Loader` without drop_last does."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = self.network(batch["point"])
        return logits

    def loss(self, outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        losses = cross_entropy(outputs, batch["label"], reduction="none")
        mean: torch.Tensor = (losses * batch["weight"]).mean()
        return mean


class Saves(Callback):
    """Saves the loader at each epoch's end, beside Composer's checkpoint; prints its order."""

    def __init__(self, loader: dataio.Loader, directory: Path) -> None:
        self.loader, self.directory = loader, directory
        self.orders: list[str] = []

    def epoch_end(self, state: State, logger: Logger) -> None:
        self.orders.append(self.loader.order_hash())
        print(f"[rank {dist.get_global_rank()}] epoch {self.loader.epoch}: {self.orders[-1]}")
        self.loader.save(self.directory / f"ep{state.timestamp.epoch.value}" / "loader")


def make_loader(shards: Path, **options: Any) -> dataio.Loader:
    """Make the loader once torch's process group is there."""
    return dataio.Loader(
        f"{shards}/train-{{000000..000001}}.tar", batch_size=16, seed=0,
        fields={"point": dataio.Array("bin", (8,), "float32"), "label": dataio.Int("cls")},
        shuffle=shuffle.Partial(exchange=0.1), **options,
    )  # fmt: skip


def fit(loader: dataio.Loader, saved: Path, *, epochs: int, resume: str = "") -> Saves:
    """Train from the start, or from one epoch's checkpoint: ``resume`` is its directory."""
    model, saves = Classifier(), Saves(loader, saved)
    if resume:
        loader.restore(f"{resume}/loader")
    trainer = Trainer(
        model=model,
        # What a step counts: Composer would look for a tensor.
        train_dataloader=DataSpec(loader, get_num_samples_in_batch=lambda b: len(b["label"])),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1), max_duration=f"{epochs}ep",
        callbacks=[saves], device="gpu" if torch.cuda.is_available() else "cpu",
        save_folder=str(saved), save_filename="ep{epoch}/rank{rank}.pt", save_interval="1ep",
        save_overwrite=True, load_path=f"{resume}/rank0.pt" if resume else None, seed=0,
        # The loader stands where it was saved: Composer would take a batch for each past epoch.
        spin_dataloaders=False, progress_bar=False,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    return saves


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", type=Path, help="what examples/blobs.py wrote")
    parser.add_argument("--saved", type=Path, default=Path("runs/composer"), help="seen by all")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", default="", help="directory of an epoch to go on from")
    given = parser.parse_args()
    dist.initialize_dist("gpu" if torch.cuda.is_available() else "cpu")
    with make_loader(given.shards) as loader:
        fit(loader, given.saved, epochs=given.epochs, resume=given.resume)


if __name__ == "__main__":
    main()
