"""Train one cell of a study."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tonari.ablate.study.config import SettingsConfig
from tonari.ablate.study.corrupt import Found
from tonari.ablate.study.data import Samples, draw_subset
from tonari.ablate.study.replicas import laid_out
from tonari.ablate.study.tasks import Task, losses_of_places
from tonari.ablate.study.training import Point, Training

TEST_ROWS = 1000
"""Samples passed at once when testing."""


@dataclass(frozen=True)
class CellResult:
    """A trained cell.

    Attributes:
        points: Its epochs.
        wall_s: Seconds that they took, tests included.
        cpu_s: Of the processor: on a machine that is shared, what tells of the work.
        train_s: Seconds of steps, selections and refresh passes, without tests: of the processor,
            or by the clock on a GPU, which has then done all it was asked for.
        rows_trained: Rows passed forward and backward, padding out.
        rows_refreshed: Rows passed forward only, for a new score.
        cost_rows: ``rows_trained`` and all else that training took, such as passes for new scores,
            in rows of the same time: ``rows_trained * train_s / (seconds in steps)``. A machine
            that is slow for a while changes both alike.
        flops: Of three forward passes for a row trained, one for a row refreshed.
        hidden_fraction: Share of the rows left out, mean over epochs.
        hidden_precision: Share of these, over all epochs, whose label is wrong, or which are junk;
            None where nothing is left out, or nothing is known to be wrong.
        hidden_recall: Share of the wrong ones that is left out, mean over epochs; None likewise.
    """

    points: tuple[Point, ...]
    wall_s: float
    cpu_s: float
    train_s: float
    rows_trained: int
    rows_refreshed: int
    cost_rows: float
    flops: float
    hidden_fraction: float
    hidden_precision: float | None
    hidden_recall: float | None

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last epoch."""
        last = self.points[-1].accuracy
        assert last is not None, "the last epoch is always tested"
        return last

    @property
    def test_loss(self) -> float:
        """Mean test loss after the last epoch, in nats, of text a byte."""
        last = self.points[-1].test_loss
        assert last is not None, "the last epoch is always tested"
        return last


def train_cell(
    settings: SettingsConfig,
    train: Found,
    test: Samples,
    *,
    num_classes: int,
    seed: int,
    device: str = "cpu",
    on_point: Callable[[Point], None] = lambda point: None,
) -> CellResult:
    """Train one arm with one seed.

    Args:
        settings: The arm's.
        train: The seed's samples, and what is wrong with them.
        test: Samples whose accuracy and loss are reported.
        num_classes: Classes of the dataset; text has none.
        seed: Of weights, partition, order and flips; arms of one seed share what they can.
        device: Where to train.
        on_point: Called after each epoch.

    Raises:
        ConfigError: If a replica has fewer rows than a batch.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    part = draw_subset(test, min(settings.evaluate_samples, len(test.labels)), seed=seed)
    training = Training(settings, train, num_classes=num_classes, seed=seed, device=device)
    points = []
    for epoch in range(settings.num_epochs):
        point = training.train_epoch(epoch)
        last = epoch + 1 == settings.num_epochs
        if last or (epoch + 1) % settings.evaluate_epochs == 0:
            model = training.replicas.tested_model()
            accuracy, loss = _tested(model, training.task, test if last else part, device)
            point = replace(point, accuracy=accuracy, test_loss=loss)
        points.append(point)
        on_point(point)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return CellResult(
        tuple(points), wall_s, cpu_s, training.train_s, training.rows_trained,
        training.rows_refreshed, training.cost_rows, training.flops,
        statistics.fmean(point.hidden_fraction for point in points), *_judged(points, train),
    )  # fmt: skip


def _judged(points: Sequence[Point], train: Found) -> tuple[float | None, float | None]:
    """Compute precision and recall of what was hidden."""
    num_wrong, num_rows = int(train.is_wrong.sum()), len(train.is_wrong)
    hidden = sum(round(point.hidden_fraction * num_rows) for point in points)
    caught = sum(point.hidden_wrong for point in points)
    if not num_wrong or not hidden:
        return None, None
    return caught / hidden, caught / (num_wrong * len(points))


def _tested(model: nn.Module, task: Task, test: Samples, device: str) -> tuple[float, float]:
    """Compute the share of answers that are right, and the mean loss of an answer."""
    model.eval()
    right, loss, num_answers = 0, 0.0, 0
    samples, labels = (torch.from_numpy(part) for part in test[:2])
    with torch.no_grad():
        for start in range(0, len(labels), TEST_ROWS):
            part = slice(start, start + TEST_ROWS)
            mine = samples[part].to(device)
            unflipped = torch.zeros(len(mine), dtype=torch.bool, device=device)
            rows, target = task.input(mine, unflipped), task.target(mine, labels[part].to(device))
            logits: Tensor = model(laid_out(rows))
            right += int((logits.argmax(dim=-1) == target).sum())
            loss += float(losses_of_places(logits, target).double().sum())
            num_answers += target.numel()
    model.train()
    return right / num_answers, loss / num_answers
