"""Train a forecast on a dataset of ECMWF's anemoi with Lightning, each node on its own dates.

python examples/anemoi_data.py weather.zarr
python examples/anemoi_fit.py weather.zarr
torchrun --nproc-per-node 2 examples/anemoi_fit.py weather.zarr --devices 2
python examples/anemoi_fit.py weather.zarr --resume runs/last.ckpt
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import dataio
import shuffle
from tonari.frameworks.lightning import DataModule

MULTISTEP, ROLLOUT = 2, 2
TRAINING = {"end": "2020-01-12"}
VALIDATION = {"start": "2020-01-13"}


def open_dates(store: Path, **period: Any) -> dataio.Anemoi:
    return dataio.Anemoi(store, offsets=range(MULTISTEP + ROLLOUT), **period)


def make_data(store: Path, saved: Path) -> DataModule:
    train = open_dates(store, **TRAINING)
    return DataModule(
        train, fields=train.fields, batch_size=2, saved=saved, seed=0,
        shuffle=shuffle.Partial(exchange=0.2), val=open_dates(store, **VALIDATION),
    )  # fmt: skip


class Forecaster(lightning.LightningModule):
    """Predicts each date from the two before it, and goes on from what it predicted."""

    def __init__(self, data: dataio.Anemoi) -> None:
        super().__init__()
        num_variables = len(data.columns)
        self.network = nn.Linear(MULTISTEP * num_variables, num_variables)
        for name in ("mean", "stdev"):
            self.register_buffer(name, torch.tensor(data.statistics[name], dtype=torch.float32))

    def losses(self, batch: dict[str, Any]) -> torch.Tensor:
        # float32[batch, time, ensemble, grid, variable]
        values: torch.Tensor = (batch["data"] - self.mean) / self.stdev
        past = values[:, :MULTISTEP]
        loss = torch.zeros(len(values), device=self.device)
        for step in range(MULTISTEP, MULTISTEP + ROLLOUT):
            made = past[:, -1] + self.network(past.movedim(1, -2).flatten(-2))
            loss = loss + (made - values[:, step]).square().mean(dim=(1, 2, 3)) / ROLLOUT
            past = torch.cat([past[:, 1:], made[:, None]], dim=1)
        return loss

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.losses(batch) * batch["weight"]).mean()
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        valid = int(batch["valid"].sum())
        error = self.losses(batch)[batch["valid"]].sum() / max(valid, 1)
        self.log("error", error, batch_size=valid, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}: {self.trainer.callback_metrics}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def make_trainer(
    saved: Path, epochs: int, save_steps: int = 5, **options: Any
) -> lightning.Trainer:
    keep = ModelCheckpoint(saved, save_last=True, every_n_train_steps=save_steps, save_top_k=-1)
    return lightning.Trainer(
        max_epochs=epochs, reload_dataloaders_every_n_epochs=1, use_distributed_sampler=False,
        callbacks=[keep], logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
        accelerator="cpu", **options,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path, help="what examples/anemoi_data.py wrote")
    parser.add_argument("--saved", type=Path, default=Path("runs"), help="seen by all nodes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    given = parser.parse_args()
    lightning.seed_everything(0)
    trainer = make_trainer(
        given.saved, given.epochs, devices=given.devices,
        strategy="ddp" if given.devices > 1 else "auto",
    )  # fmt: skip
    trainer.fit(
        Forecaster(open_dates(given.store)), datamodule=make_data(given.store, given.saved),
        ckpt_path=given.resume,
    )  # fmt: skip


if __name__ == "__main__":
    main()
