"""Hugging Face's Trainer fed by Tonari: the loader says which epoch it is and when the run ends.

python examples/blobs.py blobs
python examples/hf_trainer.py blobs
torchrun --nproc-per-node 2 examples/hf_trainer.py blobs
python examples/hf_trainer.py blobs --resume runs/checkpoint-20
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

import dataio
import importance
import shuffle
from tonari.frameworks.transformers import Trainer


def row_losses(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss of each row, which the policy goes by, and the logits."""
    logits = model(batch["point"])
    return cross_entropy(logits, batch["labels"], reduction="none"), logits


def accuracy(prediction: Any) -> dict[str, float]:
    valid = prediction.label_ids != -100
    right = prediction.predictions.argmax(1) == prediction.label_ids
    return {"accuracy": float(right[valid].mean()), "rows": float(valid.sum())}


def make_trainer(shards: Path, saved: Path, epochs: int, **options: Any) -> Trainer:
    args = transformers.TrainingArguments(
        str(saved), num_train_epochs=epochs, per_device_train_batch_size=16, learning_rate=0.3,
        optim="sgd", use_cpu=True, report_to="none", label_names=["labels"], disable_tqdm=True,
        **options,
    )  # fmt: skip
    # After the arguments, whose device makes the process group that says who is who.
    loader = dataio.Loader(
        f"{shards}/train-{{000000..000001}}.tar", batch_size=args.train_batch_size, seed=0,
        fields={"point": dataio.Array("bin", (8,), "float32"), "labels": dataio.Int("cls")},
        shuffle=shuffle.Partial(exchange=0.1), importance=importance.Kakurenbo(0.3),
        device=args.device,
    )  # fmt: skip
    transformers.set_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    return Trainer(
        network, args, loader=loader, row_losses=row_losses, compute_metrics=accuracy,
        evaluation=loader.evaluation(f"{shards}/val/val-{{000000..000000}}.tar"),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", type=Path, help="what examples/blobs.py wrote")
    parser.add_argument("--saved", type=Path, default=Path("runs"), help="seen by all nodes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    given = parser.parse_args()
    trainer = make_trainer(
        given.shards, given.saved, given.epochs,
        save_strategy="steps", save_steps=5, eval_strategy="epoch", logging_strategy="epoch",
    )  # fmt: skip
    with trainer.loader:
        trainer.train(resume_from_checkpoint=given.resume)


if __name__ == "__main__":
    main()
