"""Run an example's parts under its framework; write down its batches and what is reported."""

import importlib
import os
import signal
from collections import defaultdict
from contextlib import contextmanager
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import dataio
from dataio import Reports, Workers
from dataio.loader import Loader
from tests import torchvision_v2

if importlib.util.find_spec("torchvision"):
    torchvision_v2.import_or_skip()  # which Lightning imports, and timm

EXAMPLES = {
    "lightning": "examples.lightning_fit",
    "accelerate": "examples.accelerate_loop",
    "transformers": "examples.hf_trainer",
    "timm": "examples.timm_train",
    "anemoi": "examples.anemoi_fit",
}
EPOCHS = 5


class Heard(Loader):
    """A loader that remembers.

    ``given`` holds [epoch, sample ids] of each training batch; ``reported`` [epoch, sample ids,
    losses] of each report, refresh included; ``saves`` how many reports came before each save, by
    the number of training batches before it; ``factors`` each epoch's ``lr_factor``.
    In the batch after ``killed_after`` its process is killed.
    """

    made: ClassVar[list[Loader]] = []
    killed_after: ClassVar[int | None] = None

    def __init__(self, *args, **options):
        super().__init__(
            *args, reports=Reports(progress=False), workers=Workers(threads=0), **options
        )
        self.given, self.reported, self.saves, self.factors = [], [], {}, {}
        self.made.append(self)

    def __iter__(self):
        for batch in super().__iter__():
            if len(self.given) == self.killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
            self.given.append([self.epoch, batch["sample_id"][batch["slot"] >= 0].tolist()])
            self.factors[self.epoch] = self.lr_factor
            yield batch

    def report(self, batch, loss, *outcome):
        valid = batch["slot"] >= 0
        self.reported.append(
            [self.epoch, batch["sample_id"][valid].tolist(), loss.detach()[valid].tolist()]
        )
        super().report(batch, loss, *outcome)

    def save(self, path):
        self.saves.setdefault(len(self.given), len(self.reported))
        super().save(path)

    def by_epoch(self, events):
        ids: dict[int, list[int]] = defaultdict(list)
        for epoch, some, *_ in events:
            ids[epoch] += some
        return dict(ids)


def run(framework, shards, saved, *, resume=None, ranks=1):
    """Train with a save after every step, from the start or from a checkpoint.

    Returns:
        The loader, closed; what the framework measured on the evaluation set; the model; and the
        learning rate of each optimizer step.
    """
    example = importlib.import_module(EXAMPLES[framework])
    torch.manual_seed(0)
    rates: list[float] = []
    with patch.object(dataio, "Loader", Heard), stepping(rates):
        figure, model = RUNS[framework](example, shards, saved, resume, ranks)
    return Heard.made.pop(), figure, model, rates


@contextmanager
def stepping(rates):
    """Note the learning rate of each optimizer step."""
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    try:
        yield
    finally:
        handle.remove()


def find_steps(loader):
    """Numbers of optimizer steps after which something is worth a resume."""
    epochs = np.array([epoch for epoch, _ in loader.given])
    ends = np.flatnonzero(np.diff(epochs)) + 1
    steps = np.bincount(epochs)
    # Without a policy that hides rows all epochs have as many steps.
    hidden = int(next(iter(np.flatnonzero(steps < steps[0])), 1))
    return {
        "first steps": 4,
        "end of an epoch": int(ends[0]),
        "hidden rows": int(ends[hidden - 1]) + 3,
        "before refresh": int(ends[hidden]),
    }


def run_lightning(example, shards, saved, resume, ranks):
    trainer = example.make_trainer(
        saved, EPOCHS, save_steps=1, accelerator="cpu", devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
    )  # fmt: skip
    model = example.Classifier()
    trainer.fit(model, datamodule=example.make_data(shards, saved), ckpt_path=resume)
    return float(trainer.callback_metrics["accuracy"]), model.network


def run_anemoi(example, store, saved, resume, ranks):
    trainer = example.make_trainer(
        saved, EPOCHS, save_steps=1, devices=ranks, strategy="ddp" if ranks > 1 else "auto"
    )
    model = example.Forecaster(example.open_dates(store))
    trainer.fit(model, datamodule=example.make_data(store, saved), ckpt_path=resume)
    return float(trainer.callback_metrics["error"]), model.network


def run_accelerate(example, shards, saved, resume, ranks):
    accelerator = example.Accelerator(cpu=True)
    with example.make_loader(shards, accelerator) as loader:
        evaluation = loader.evaluation(f"{shards}/val/val-{{000000..000000}}.tar")
        training = example.Training(accelerator, loader, saved)
        if resume:
            training.restore(resume)
        for _ in loader.epochs(EPOCHS):
            training.epoch(save_every=1)
        return training.accuracy(evaluation), accelerator.unwrap_model(training.network)


def run_transformers(example, shards, saved, resume, ranks):
    trainer = example.make_trainer(
        shards, saved, EPOCHS, save_strategy="steps", save_steps=1, lr_scheduler_type="constant"
    )
    with trainer.loader:
        trainer.train(resume_from_checkpoint=resume)
        measured = trainer.evaluate()
    assert measured["eval_rows"] == 50
    return measured["eval_accuracy"], trainer.model


def run_timm(example, pictures, saved, resume, ranks):
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(32, 4),
    )  # fmt: skip
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    losses, right = example.fit(
        pictures, saved, network, torch.device("cpu"), epochs=3, size=64, batch_size=8, classes=4,
        erasing=0.0, resume=resume,  # timm erases by a generator that it does not save
    )  # fmt: skip
    (loader,) = Heard.made
    assert isinstance(loader, Heard)
    loader.reported = losses
    return right.avg, network


RUNS = {
    "lightning": run_lightning, "accelerate": run_accelerate, "transformers": run_transformers,
    "timm": run_timm, "anemoi": run_anemoi,
}  # fmt: skip


def checkpoint(saved, steps):
    """Find what a framework saved after so many steps."""
    names = (f"*-step={steps}.ckpt", f"{steps}", f"checkpoint-{steps}")
    return next(path for name in names for path in saved.glob(name))
