"""Hugging Face's Trainer: the loader says which epoch it is and when the run ends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

import dataio
import importance
from dataio.rows.samples import Batch

COLUMNS = ("weight", "sample_id", "slot", "valid")
"""What a batch holds beside its fields, which no model takes."""

RowLosses = Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor]]


class _EpochFeed:
    """The loader's epochs as the Trainer iterates: `set_epoch`, then all batches.

    The Trainer finds its epoch by dividing steps, wrongly once rows are hidden; the loader knows.
    """

    def __init__(
        self, loader: dataio.Loader, num_epochs: int, rescore: Callable[[Iterator[Batch]], None]
    ) -> None:
        self.loader, self.num_epochs, self._rescore = loader, num_epochs, rescore
        self._epochs = loader.epochs(num_epochs)
        self._begun = False

    def set_epoch(self, epoch: int) -> None:
        """Go to the next epoch with batches left; the Trainer calls this on every rank."""
        if self._begun:
            self._rescore(self.loader.refresh())
        self._begun = next(self._epochs, None) is not None
        if self._begun and self.loader.is_used_up():  # saved after an epoch's last step
            self.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader if self._begun else ())

    def __len__(self) -> int:
        # Of a whole epoch: the Trainer asks once, and shorter epochs may end early.
        return self.loader.max_steps(1)


class _Marked:
    """Evaluation batches, labels of padding replaced by what losses and metrics pass over."""

    def __init__(self, evaluation: Any, labels: str) -> None:
        self._evaluation, self._labels = evaluation, labels

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._evaluation:
            labels = batch[self._labels].clone()
            labels[~batch["valid"]] = -100
            yield batch | {self._labels: labels}

    def __len__(self) -> int:
        return len(self._evaluation)


class _Conduct(transformers.TrainerCallback):
    """Learning rate, saving and the end of the run."""

    def __init__(self, epochs: _EpochFeed) -> None:
        self._epochs, self._loader = epochs, epochs.loader

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # Not compounded: the scheduler sets it anew after each step.
        for group in given["optimizer"].param_groups:
            group["lr"] *= self._loader.lr_factor

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._loader.save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / "loader")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        state.epoch = self._loader.epoch + 1.0
        if self._loader.epoch + 1 >= self._epochs.num_epochs:
            control.should_training_stop = True


class Trainer(transformers.Trainer):
    """A Trainer that takes its batches from a `Loader`, and saves and restores it as well.

    Make the loader after the arguments, whose device makes the process group.

    Args:
        model: The model.
        args: The Trainer's; ``ignore_data_skip`` is set, as the loader goes on by itself.
        loader: The training set. Its fields have the names of the model's arguments.
        evaluation: What `Loader.evaluation` returned; None: there is none.
        row_losses: ``(model, batch) -> (loss, logits)``: float[batch] of a whole batch, which an
            importance policy needs, and float[batch, classes]. None: the model's own mean.
        options: What else the Trainer takes.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        *,
        loader: dataio.Loader,
        evaluation: Any = None,
        row_losses: RowLosses | None = None,
        **options: Any,
    ) -> None:
        args.ignore_data_skip = True
        # As eval_dataset the evaluation only says that there is one.
        super().__init__(model, args, eval_dataset=evaluation, **options)
        self.loader, self._evaluation, self._row_losses = loader, evaluation, row_losses
        self._epochs = _EpochFeed(loader, int(args.num_train_epochs), self._rescore)
        self.add_callback(_Conduct(self._epochs))

    def get_train_dataloader(self) -> Any:
        """Give the loader's epochs."""
        return self._epochs

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Give the evaluation's batches."""
        return _Marked(self._evaluation, self.label_names[0])

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """Train; the loader goes on from the checkpoint too. Collective."""
        found = resume_from_checkpoint
        if found is True:
            found = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(found, (str, Path)):
            self.loader.restore(Path(found) / "loader")
            found = str(found)
        return super().train(resume_from_checkpoint=found, **options)

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, **given: Any
    ) -> Any:
        """Compute a batch's mean loss, and report each row's."""
        if self._row_losses is None:
            columns = {name: inputs[name] for name in inputs if name not in COLUMNS}
            return super().compute_loss(model, columns, return_outputs, **given)
        loss, logits = self._row_losses(model, inputs)
        if "valid" in inputs:
            mean = loss.sum() / inputs["valid"].sum().clamp(min=1)
        else:
            labels = inputs[self.label_names[0]]
            outcome = importance.outcome(logits, labels) if self.loader.needs_outcome else ()
            self.loader.report(inputs, loss, *outcome)
            mean = (loss * inputs["weight"]).mean()
        return (mean, {"logits": logits}) if return_outputs else mean

    @torch.no_grad()
    def _rescore(self, batches: Iterator[Batch]) -> None:
        self.model.eval()
        for batch in batches:
            self.compute_loss(self.model, batch)
        self.model.train()
