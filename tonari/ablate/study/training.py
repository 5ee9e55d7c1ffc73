"""The training of one cell, epoch by epoch, and what it costs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dataio.base.seeding import generator, key
from dataio.plan.layout import Layout
from tonari.ablate.study.config import SettingsConfig
from tonari.ablate.study.corrupt import Found
from tonari.ablate.study.importance import EpochReports, Memory
from tonari.ablate.study.order import (
    EpochBatches,
    class_skew,
    epoch_batches,
    number_samples,
    placed,
)
from tonari.ablate.study.replicas import ManyModels, OneModel, Replicas
from tonari.ablate.study.tasks import Task, row_outcome, task_of
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import seeded
from tonari.trainer.run.schedule import learning_rate

FORWARD_PASSES = 3
"""What training on a row costs, in forward passes: the backward pass is as much as two."""


@dataclass(frozen=True)
class Point:
    """What is known after an epoch.

    Attributes:
        epoch: Which one.
        loss: Mean weighted training loss.
        accuracy: Of the test samples, in [0, 1]: images, or bytes, that are predicted right; None
            where it was not measured.
        train_s: Seconds of training until its end; see `CellResult`, as for the next two.
        rows_trained: Rows until its end.
        flops: FLOPs until its end.
        hidden_fraction: Share of the rows that it left out.
        hidden_wrong: Of these, the ones with a wrong label, or junk.
        hidden_copies: Of these, the near copies of others.
        lr_factor: What the importance policy multiplied the learning rate by.
        moved_back: Rows of low loss that were shown all the same: wrong, or unsure.
        hidden_cap: Share of the rows that the policy would have left out at most.
        class_skew: How far the classes of nodes' rows are from those of all, see
            `tonari.ablate.study.order.class_skew`; 0 where each holds all.
        test_loss: Mean cross entropy on the test samples, in nats, of text a byte; None where it
            was not measured.
        hidden_kinds: Rows that it left out of each of `Found.kinds`.
    """

    epoch: int
    loss: float
    accuracy: float | None
    # Of two trainings that are the same the seconds differ
    train_s: float = field(compare=False)
    rows_trained: int
    flops: float
    hidden_fraction: float
    hidden_wrong: int
    hidden_copies: int
    lr_factor: float
    moved_back: int
    hidden_cap: float
    class_skew: float = 0.0
    test_loss: float | None = None
    hidden_kinds: Mapping[str, int] = field(default_factory=dict)


class Training:
    """All replicas of a cell, and what their training has cost so far.

    Args:
        settings: The arm's.
        train: The seed's samples, and what is wrong with them.
        num_classes: Classes of the dataset.
        seed: Of weights, partition, order and flips.
        device: Where to train.

    Attributes:
        replicas: What is trained.
        train_s: See `CellResult`, as for the others.
        step_s: Of these, in steps.
        rows_trained: Rows passed forward and backward.
        rows_refreshed: Rows passed forward only.

    Raises:
        ConfigError: If a replica has fewer rows than a batch.
    """

    def __init__(
        self,
        settings: SettingsConfig,
        train: Found,
        *,
        num_classes: int,
        seed: int,
        device: str,
    ) -> None:
        data = train.data
        layout = Layout(settings.nodes, len(data.labels))
        if settings.batch_size > layout.share_rows(layout.num_replicas - 1):
            raise ConfigError(
                f"settings.batch_size is {settings.batch_size}, more than the "
                f"{len(data.labels)} training samples over {layout.num_replicas} replicas; lower "
                f"it, or raise data.train_samples"
            )
        self._settings, self._layout, self._seed, self._device = settings, layout, seed, device
        self._rows_of = number_samples(data.labels, settings.partition, seed=seed)
        self._samples, self._labels = (torch.from_numpy(part).to(device) for part in data[:2])
        self._found = train
        self.task = task_of(data, num_classes)
        self.replicas = _replicas(settings, self.task, seed=seed, device=device)
        policy = settings.make_importance()
        told = {"label": data.labels, "is_wrong": train.is_wrong, "is_copy": train.is_copy}
        by_id = {name: values[self._rows_of] for name, values in told.items()}
        self._memory = Memory(policy, layout.num_samples, settings.num_epochs, by_id)
        self._forward_flops = self._count_flops()
        self.train_s, self.step_s, self.rows_trained, self.rows_refreshed = 0.0, 0.0, 0, 0

    @property
    def flops(self) -> float:
        """FLOPs so far, as if every row had cost the same."""
        passes = FORWARD_PASSES * self.rows_trained + self.rows_refreshed
        return float(self._forward_flops * passes)

    @property
    def cost_rows(self) -> float:
        """See `CellResult`."""
        return self.rows_trained * self.train_s / self.step_s

    def train_epoch(self, epoch: int) -> Point:
        """Select, train, and refresh the scores of one epoch."""
        settings, began = self._settings, self._now()
        held = placed(settings.policy, self._layout, seed=self._seed, epoch=epoch)
        batches = epoch_batches(
            settings.policy, self._layout, seed=self._seed, epoch=epoch,
            batch_size=settings.batch_size, memory=self._memory, held=held,
        )  # fmt: skip
        for group in self.replicas.optimizer.param_groups:
            group["lr"] = batches.lr_factor * learning_rate(
                epoch, length=settings.num_epochs, lr=settings.lr,
                warmup=settings.num_warmup_epochs, min_lr=settings.min_lr,
            )  # fmt: skip
        flips = _flips(len(self._labels), seed=self._seed, epoch=epoch, wanted=settings.flip)
        flips, reports = flips.to(self._device), EpochReports()
        steps_began = self._now()
        loss = self._train(batches, flips, reports)
        self.step_s += self._now() - steps_began
        if self._memory.keeps_scores:
            self._refresh(batches.due, flips, reports)
            reports.write(self._memory.scores, epoch=epoch)
        self.rows_trained += int(batches.valid.sum())
        self.rows_refreshed += len(batches.due)
        self.train_s += self._now() - began
        hidden = self._rows_of[batches.hidden]
        return Point(
            epoch=epoch,
            loss=loss,
            accuracy=None,
            train_s=self.train_s,
            rows_trained=self.rows_trained,
            flops=self.flops,
            hidden_fraction=len(hidden) / self._layout.num_samples,
            hidden_wrong=int(self._found.is_wrong[hidden].sum()),
            hidden_copies=int(self._found.is_copy[hidden].sum()),
            lr_factor=batches.lr_factor,
            moved_back=int(batches.figures.get("moved_back", 0)),
            hidden_cap=batches.figures.get("hidden_cap", 0.0),
            class_skew=class_skew(held, self._found.data.labels[self._rows_of]),
            hidden_kinds={k: int(mask[hidden].sum()) for k, mask in self._found.kinds.items()},
        )

    def _train(self, batches: EpochBatches, flips: Tensor, reports: EpochReports) -> float:
        # int64[steps, replicas, batch]: the whole epoch's at once, so that no step waits for a copy
        all_rows = torch.from_numpy(self._rows_of[batches.sample_id]).to(self._device)
        all_weights = torch.from_numpy(batches.weight).to(self._device)
        means = []
        for step, (rows, weight) in enumerate(zip(all_rows, all_weights, strict=True)):
            inputs, target = self._taken(rows, flips)
            if not isinstance(self.replicas, OneModel) or not self._memory.keeps_scores:
                means.append(self.replicas.step(inputs, target, weight))
                continue
            mean, losses, logits = self.replicas.step_rows(inputs, target, weight)
            means.append(mean)
            ids, valid = batches.sample_id[step], batches.valid[step]
            reports.add(ids, valid, losses, *row_outcome(logits, target.flatten(0, 1)))
        return float(torch.stack(means).mean())

    def _refresh(self, due: NDArray[np.int64], flips: Tensor, reports: EpochReports) -> None:
        """Pass rows as their loader would, mirrored as in this epoch's training."""
        assert isinstance(self.replicas, OneModel), "importance needs averaged gradients"
        step_rows = self._settings.replicas * self._settings.batch_size
        for start in range(0, len(due), step_rows):
            ids = due[start : start + step_rows]
            rows = torch.from_numpy(self._rows_of[ids]).to(self._device)
            inputs, target = self._taken(rows, flips)
            losses, logits = self.replicas.pass_rows(inputs, target)
            reports.add(ids, np.ones(len(ids), np.bool_), losses, *row_outcome(logits, target))

    def _taken(self, rows: Tensor, flips: Tensor) -> tuple[Tensor, Tensor]:
        samples, labels = self._samples[rows], self._labels[rows]
        return self.task.input(samples, flips[rows]), self.task.target(samples, labels)

    def _count_flops(self) -> int:
        """Count the FLOPs of one row's forward pass."""
        model, samples = self.replicas.tested_model(), self._samples[:1]
        model.eval()
        unflipped = torch.zeros(1, dtype=torch.bool, device=samples.device)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(self.task.input(samples, unflipped))
        return int(counter.get_total_flops())

    def _now(self) -> float:
        """Seconds: of the processor, or by the clock when the GPU has done all it was asked for."""
        if self._device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def _replicas(settings: SettingsConfig, task: Task, *, seed: int, device: str) -> Replicas:
    model: nn.Module = seeded(lambda: task.build(settings), seed=seed).to(device)
    lr, momentum, decay = settings.lr, settings.momentum, settings.weight_decay
    if settings.update == "gradients":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        q = settings.gce_q if settings.loss == "generalised" else None
        return OneModel(
            model, lr=lr, momentum=momentum, weight_decay=decay,
            adamw=settings.optimizer == "adamw", gce_q=q, ema=settings.ema,
        )  # fmt: skip
    return ManyModels(
        model, replicas=settings.replicas, exchange=settings.update,
        local_steps=settings.local_steps, seed=seed, lr=lr, momentum=momentum, weight_decay=decay,
    )  # fmt: skip


def _flips(num_samples: int, *, seed: int, epoch: int, wanted: bool) -> Tensor:
    """bool[num_samples]: Rows mirrored in this epoch, the same ones in every arm."""
    if not wanted:
        return torch.zeros(num_samples, dtype=torch.bool)
    drawn: NDArray[np.int64] = generator(key(seed, "study flips", epoch=epoch)).integers(
        2, size=num_samples
    )
    return torch.from_numpy(drawn == 1)
