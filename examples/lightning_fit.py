"""Lightning fed by Tonari: `tonari.frameworks.lightning` drives epochs, refresh and checkpoints.

python examples/blobs.py blobs
python examples/lightning_fit.py blobs
python examples/lightning_fit.py blobs --devices 2
torchrun --nproc-per-node 2 examples/lightning_fit.py blobs --devices 2
python examples/lightning_fit.py blobs --resume runs/last.ckpt --epochs 8
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy

import dataio
import importance
import shuffle
from tonari.frameworks.lightning import DataModule


def make_data(shards: Path, saved: Path, batch_size: int = 16) -> DataModule:
    return DataModule(
        f"{shards}/train-{{000000..000001}}.tar", saved=saved, batch_size=batch_size, seed=0,
        fields={"point": dataio.Array("bin", (8,), "float32"), "label": dataio.Int("cls")},
        shuffle=shuffle.Partial(exchange=0.1), importance=importance.Kakurenbo(0.3),
        val=f"{shards}/val/val-{{000000..000000}}.tar",
    )  # fmt: skip


class Classifier(lightning.LightningModule):
    """A small network that tells the loader what each row cost."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def measure(self, batch: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = self.network(batch["point"])
        loss = cross_entropy(logits, batch["label"], reduction="none")
        outcome = importance.outcome(logits, batch["label"])
        self.trainer.datamodule.loader.report(batch, loss, *outcome)
        return loss

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        # Each step, not at the epoch's start: Lightning leaves that hook out when it resumes.
        for group in self.optimizers().param_groups:
            group["lr"] = self.lr * self.trainer.datamodule.loader.lr_factor

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.measure(batch) * batch["weight"]).mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    @torch.no_grad()
    def rescore(self, batches: Iterator[dict[str, Any]]) -> None:
        self.eval()
        for batch in batches:
            self.measure(batch)
        self.train()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        right = (self.network(batch["point"]).argmax(1) == batch["label"]) & batch["valid"]
        valid = int(batch["valid"].sum())
        # Weighed by what is valid: the mean over all ranks counts every sample once.
        self.log("accuracy", right.sum() / max(valid, 1), batch_size=valid, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        figures = {name: round(float(v), 3) for name, v in self.trainer.callback_metrics.items()}
        loader = self.trainer.datamodule.loader
        self.print(f"epoch {loader.epoch}: {len(loader)} steps, {figures}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def make_trainer(
    saved: Path, epochs: int, *, save_steps: int = 5, **options: Any
) -> lightning.Trainer:
    keep = ModelCheckpoint(saved, save_last=True, every_n_train_steps=save_steps, save_top_k=-1)
    return lightning.Trainer(
        max_epochs=epochs,
        reload_dataloaders_every_n_epochs=1,  # calls train_dataloader each epoch
        use_distributed_sampler=False,  # the loader has dealt the rows out already
        callbacks=[keep],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", type=Path, help="what examples/blobs.py wrote")
    parser.add_argument("--saved", type=Path, default=Path("runs"), help="seen by all nodes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    given = parser.parse_args()
    lightning.seed_everything(0)
    trainer = make_trainer(
        given.saved, given.epochs, accelerator="cpu", devices=given.devices,
        strategy="ddp" if given.devices > 1 else "auto",
    )  # fmt: skip
    data = make_data(given.shards, given.saved)
    trainer.fit(Classifier(), datamodule=data, ckpt_path=given.resume)


if __name__ == "__main__":
    main()
