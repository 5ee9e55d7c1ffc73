"""Hugging Face's Trainer fed by Tonari: the loader says which epoch it is and when the run ends.

python examples/blobs.py blobs
python examples/hf_trainer.py blobs
torchrun --nproc-per-node 2 examples/hf_trainer.py blobs
python examples/hf_trainer.py blobs --resume runs/checkpoint-20
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

import dataio
import importance
import shuffle


class Epochs:
    """The loader's epochs as the Trainer iterates: `set_epoch`, then all batches.

    The Trainer finds its epoch by dividing steps, wrongly once rows are hidden; the loader knows.
    """

    def __init__(self, loader: dataio.Loader, num_epochs: int, rescore: Any) -> None:
        self.loader, self.num_epochs, self.rescore = loader, num_epochs, rescore
        self.turns = loader.epochs(num_epochs)
        self.begun = False

    def set_epoch(self, epoch: int) -> None:
        """Go to the next epoch with batches left; the Trainer calls this on every rank."""
        if self.begun:
            self.rescore(self.loader.refresh())
        self.begun = next(self.turns, None) is not None
        if self.begun and self.loader.is_used_up():  # saved after an epoch's last step
            self.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.loader if self.begun else ())

    def __len__(self) -> int:
        # Always the same: the Trainer asks once, and shorter epochs may end early.
        return self.loader.max_steps(1)


class Marked:
    """Evaluation batches, labels of padding replaced by what losses and metrics pass over."""

    def __init__(self, evaluation: Any) -> None:
        self.evaluation = evaluation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.evaluation:
            yield batch | {"labels": batch["labels"].masked_fill(~batch["valid"], -100)}

    def __len__(self) -> int:
        return len(self.evaluation)


class Conduct(transformers.TrainerCallback):
    """Learning rate, saving and the end of the run."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs, self.loader = epochs, epochs.loader

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # Not compounded: the scheduler sets it anew after each step.
        for group in given["optimizer"].param_groups:
            group["lr"] *= self.loader.lr_factor

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.loader.save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / "loader")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        state.epoch = self.loader.epoch + 1.0
        if self.loader.epoch + 1 >= self.epochs.num_epochs:
            control.should_training_stop = True


class FedTrainer(transformers.Trainer):
    """A Trainer that takes its batches from a loader, and tells it what each row cost."""

    def __init__(self, model: nn.Module, args: Any, loader: dataio.Loader, val: str) -> None:
        # As eval_dataset the evaluation only says that there is one.
        evaluation = loader.evaluation(val)
        super().__init__(model, args, eval_dataset=evaluation, compute_metrics=accuracy)
        self.loader, self.evaluation = loader, evaluation
        self.epochs = Epochs(loader, int(args.num_train_epochs), self.rescore)
        self.add_callback(Conduct(self.epochs))

    def get_train_dataloader(self) -> Any:
        return self.epochs

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return Marked(self.evaluation)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        logits = model(inputs["point"])
        loss = cross_entropy(logits, inputs["labels"], reduction="none")
        if "valid" in inputs:
            mean = loss.sum() / inputs["valid"].sum().clamp(min=1)
        else:
            self.loader.report(inputs, loss, *importance.outcome(logits, inputs["labels"]))
            mean = (loss * inputs["weight"]).mean()
        return (mean, {"logits": logits}) if return_outputs else mean

    @torch.no_grad()
    def rescore(self, batches: Iterator[dict[str, Any]]) -> None:
        self.model.eval()
        for batch in batches:
            self.compute_loss(self.model, batch)
        self.model.train()


def accuracy(prediction: Any) -> dict[str, float]:
    valid = prediction.label_ids != -100
    right = prediction.predictions.argmax(1) == prediction.label_ids
    return {"accuracy": float(right[valid].mean()), "rows": float(valid.sum())}


def make_trainer(shards: Path, saved: Path, epochs: int, **options: Any) -> FedTrainer:
    args = transformers.TrainingArguments(
        str(saved), num_train_epochs=epochs, per_device_train_batch_size=16, learning_rate=0.3,
        optim="sgd", use_cpu=True, report_to="none", label_names=["labels"], disable_tqdm=True,
        ignore_data_skip=True,  # the loader goes on by itself
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
    return FedTrainer(network, args, loader, f"{shards}/val/val-{{000000..000000}}.tar")


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
        if given.resume:
            trainer.loader.restore(given.resume / "loader")
        trainer.train(resume_from_checkpoint=str(given.resume) if given.resume else None)


if __name__ == "__main__":
    main()
