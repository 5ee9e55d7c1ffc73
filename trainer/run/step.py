"""What happens to batches: a training step, new scores, or an evaluation."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dataio.batch.values import Batch
from trainer.mesh.clip import clip_gradients
from trainer.mesh.pipeline import Pipeline

MOST_BATCHES = 1 << 20
"""Of one step; numbers of steps are that far apart."""


class TakesReports(Protocol):
    """What a step needs of the loader."""

    def report(self, batch: Batch, loss: Tensor, correct: Tensor, confidence: Tensor) -> None: ...


class Step(NamedTuple):
    """How a step went, the same on all ranks.

    Attributes:
        norm: floating[]: Of the gradients before clipping; None where nobody asked for it.
        skipped: Whether the weights were left as they were.
    """

    norm: Tensor | None
    skipped: bool


class Evaluation(NamedTuple):
    """Means over all valid rows, the same on all ranks.

    Attributes:
        accuracy: Of the shares of right answers; a row of text has as many as tokens.
        loss: Of the losses.
    """

    accuracy: float
    loss: float


def train_step(
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    loader: TakesReports,
    batches: Sequence[Batch],
    *,
    clip: float = 0.0,
    skip_nonfinite: bool = False,
    step: int = 0,
) -> Step:
    """Update the model once by one or several batches, and report their rows. Collective.

    Args:
        pipeline: The model.
        optimizer: Of its parameters; those of a rank at least.
        loader: Takes the reports.
        batches: The step descends the mean over all their rows.
        clip: Largest norm of the gradients, over the whole mesh; 0 leaves them as they are.
        skip_nonfinite: Leave the weights as they are where the norm is not finite: it costs a wait
            for the device.
        step: Number of the step in the run: what the model draws, such as dropout, depends on it.
    """
    for number, batch in enumerate(batches, 1):
        last = number == len(batches)
        scored = pipeline.train(
            batch, share=1 / len(batches), sync=last, number=step * MOST_BATCHES + number
        )
        if scored is not None:
            loader.report(batch, scored.loss, scored.correct, scored.confidence)
    norm = None
    if clip or skip_nonfinite:
        norm = clip_gradients(
            pipeline.parameters(), pipeline.mesh, max_norm=clip or float("inf"),
            again=pipeline.again,
        )  # fmt: skip
    skipped = skip_nonfinite and norm is not None and not bool(norm.isfinite())
    if not skipped:
        optimizer.step()
    optimizer.zero_grad()
    return Step(norm, skipped)


def rescore(pipeline: Pipeline, loader: TakesReports, batches: Iterable[Batch]) -> None:
    """Give hidden rows a new score, in evaluation mode. Collective.

    Args:
        pipeline: The model.
        loader: Takes the scores.
        batches: Those that it has due: its ``refresh()``.
    """
    with _evaluating(pipeline):
        for batch in batches:
            scored = pipeline.forward(batch)
            if scored is not None:
                loader.report(batch, scored.loss, scored.correct, scored.confidence)


def evaluate(pipeline: Pipeline, batches: Iterable[Batch]) -> Evaluation:
    """Compute accuracy and mean loss over all replicas' valid rows. Collective.

    Args:
        pipeline: The model.
        batches: Equally many on all ranks; ``valid`` with the targets.
    """
    # Sums of the rows' shares of right answers and of losses; rows.
    sums = torch.zeros(3, dtype=torch.float64, device=pipeline.device)
    with _evaluating(pipeline):
        for batch in batches:
            scored = pipeline.forward(batch)
            # A replica's peers have the same scores: they count once.
            if scored is not None and pipeline.place.rank == pipeline.place.scorer:
                valid = batch["valid"]
                right = scored.right_fraction.double().masked_fill(~valid, 0).sum()
                loss = scored.loss.masked_fill(~valid, 0).double().sum()
                sums += torch.stack([right, loss, valid.sum().double()])
    dist.all_reduce(sums)
    num_right, loss_sum, num_valid = sums.tolist()
    return Evaluation(num_right / max(num_valid, 1), loss_sum / max(num_valid, 1))


@contextlib.contextmanager
def _evaluating(pipeline: Pipeline) -> Iterator[None]:
    for part in pipeline.parts:
        part.eval()
    yield
    for part in pipeline.parts:
        part.train()
