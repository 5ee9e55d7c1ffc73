"""What happens to batches: a training step, new scores, or an evaluation."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dataio.rows.samples import Batch
from tonari.trainer.mesh.clip import clip_gradients
from tonari.trainer.mesh.pipeline import MOST_BATCHES, Pipeline
from tonari.trainer.models.unchanged import state_kept


class TakesReports(Protocol):
    """What a step needs of the loader."""

    @property
    def needs_outcome(self) -> bool:
        """Whether reports must have ``correct`` and ``confidence``; the same on all ranks."""
        ...

    def report(
        self, batch: Batch, loss: Tensor, correct: Tensor | None, confidence: Tensor | None
    ) -> None: ...


class Step(NamedTuple):
    """How a step went, the same on all ranks.

    Attributes:
        norm: floating[]: Of the gradients before clipping; None where nobody asked for it.
        skipped: Whether the weights were left as they were.
    """

    norm: Tensor | None
    skipped: bool


class Weighed(NamedTuple):
    """A batch of a step.

    Attributes:
        batch: Its weights make the mean that the step descends.
        share: Of the batch in the step: float, or float64[].
    """

    batch: Batch
    share: float | Tensor


class EvaluationMeans(NamedTuple):
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
    before_norm: Callable[[], None] | None = None,
) -> Step:
    """Update the model once by one or several batches, and report their rows. Collective.

    Args:
        pipeline: The model.
        optimizer: Of its parameters; those of a rank at least.
        loader: Takes the reports.
        batches: The step descends the weighted mean over all their rows, on all replicas, however
            many of a batch are padding.
        clip: Largest norm of the gradients, over the whole mesh; 0 leaves them as they are.
        skip_nonfinite: Leave the weights as they are where the norm is not finite: it costs a wait
            for the device.
        step: Number of the step in the run: what the model draws, such as dropout, depends on it.
        before_norm: Called by all ranks before they measure the norm, which is then by one
            message of all: see `clip_gradients`.
    """
    weighed = weigh(pipeline, batches)
    for number, (batch, (weighed_batch, share)) in enumerate(zip(batches, weighed, strict=True), 1):
        scored = pipeline.train(
            weighed_batch,
            share=share,
            sync=number == len(batches),
            outcome=loader.needs_outcome,
            number=step * MOST_BATCHES + number,
        )
        if scored is not None:
            loader.report(batch, scored.loss, scored.correct, scored.confidence)
    norm = None
    if before_norm is not None:
        before_norm()
    if clip or skip_nonfinite:
        norm = clip_gradients(
            pipeline.parameters(), pipeline.mesh, max_norm=clip or float("inf"),
            again=pipeline.again, on_all=before_norm is not None,
        )  # fmt: skip
    skipped = skip_nonfinite and norm is not None and not bool(norm.isfinite())
    if not skipped:
        optimizer.step()
    optimizer.zero_grad()
    return Step(norm, skipped)


def weigh(pipeline: Pipeline, batches: Sequence[Batch]) -> list[Weighed]:
    """Find each batch's share of a step: that of its rows, without padding, on all replicas.

    A batch's weights make its mean one over the valid rows of all replicas. Where the task counts
    the targets of rows, they are weighed by these, and so are the batches. Collective, where it
    does or there are several batches; does not wait for the device.

    Returns:
        The batches; the shares are together 1, and the same on all ranks.
    """
    # isinstance of a protocol takes as long as a small layer.
    count: Callable[[Batch], Tensor] | None = getattr(pipeline.task, "num_targets", None)
    if len(batches) == 1 and count is None:
        return [Weighed(batches[0], 1.0)]
    # Of each batch, on all replicas: rows that are no padding, and their targets.
    sums = torch.zeros(2, len(batches), dtype=torch.float64, device=pipeline.device)
    targets: list[Tensor] = []
    if count is not None and pipeline.place.has_target:
        targets = [count(batch) for batch in batches]
    # The ranks of a replica train the same rows: they count once.
    if pipeline.place.rank == pipeline.place.scorer:
        valid = [batch["sample_id"] >= 0 for batch in batches]
        of_rows = targets if count is not None else [torch.ones_like(each) for each in valid]
        sums[0] = torch.stack([each.sum() for each in valid])
        sums[1] = torch.stack([(n * each).sum() for n, each in zip(of_rows, valid, strict=True)])
    dist.all_reduce(sums)
    shares = (sums[1] / sums[1].sum().clamp(min=1)).unbind()
    if not targets:
        return [Weighed(batch, share) for batch, share in zip(batches, shares, strict=True)]
    per_target = (sums[0] / sums[1].clamp(min=1)).unbind()
    return [
        Weighed({**batch, "weight": (batch["weight"] * n * scale).float()}, share)
        for batch, n, scale, share in zip(batches, targets, per_target, shares, strict=True)
    ]


def grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Take as many batches a step; the last step of an epoch may have fewer."""
    while group := list(itertools.islice(batches, size)):
        yield group


def rescore(pipeline: Pipeline, loader: TakesReports, batches: Iterable[Batch]) -> None:
    """Give hidden rows a new score, in evaluation mode. Collective.

    Args:
        pipeline: The model.
        loader: Takes the scores.
        batches: Those that it has due: its ``refresh()``.
    """
    with evaluating(pipeline):
        for batch in batches:
            scored = pipeline.forward(batch, outcome=loader.needs_outcome)
            if scored is not None:
                loader.report(batch, scored.loss, scored.correct, scored.confidence)


def evaluate(pipeline: Pipeline, batches: Iterable[Batch]) -> EvaluationMeans:
    """Compute accuracy and mean loss over all replicas' valid rows. Collective.

    Args:
        pipeline: The model.
        batches: Equally many on all ranks; ``valid`` with the targets.
    """
    mine = _evaluation_sums(pipeline, batches)
    sums = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, mine)
    return _evaluation_means(sums)


def evaluate_alone(pipeline: Pipeline, replicas: Iterable[Iterable[Batch]]) -> EvaluationMeans:
    """Compute what `evaluate` does, to the last digit, in one process that has the whole model.

    Args:
        pipeline: The model.
        replicas: The batches of each replica, one after the other.
    """
    return _evaluation_means([_evaluation_sums(pipeline, batches) for batches in replicas])


def _evaluation_means(sums: Sequence[Tensor]) -> EvaluationMeans:
    # Rounded once, whatever the order: ranks sum as one process does.
    columns = zip(*torch.stack([*sums]).tolist(), strict=True)
    num_right, loss_sum, num_valid = map(math.fsum, columns)
    return EvaluationMeans(num_right / max(num_valid, 1), loss_sum / max(num_valid, 1))


def _evaluation_sums(pipeline: Pipeline, batches: Iterable[Batch]) -> Tensor:
    """Sum up this rank's shares of right answers, losses and rows: float64[3]."""
    sums = torch.zeros(3, dtype=torch.float64, device=pipeline.device)
    with evaluating(pipeline):
        for batch in batches:
            scored = pipeline.forward(batch)
            # A replica's peers have the same scores: they count once.
            if scored is not None and pipeline.place.rank == pipeline.place.scorer:
                assert scored.right_fraction is not None, "an evaluation asks for outcomes"
                valid = batch["valid"]
                right = scored.right_fraction.double().masked_fill(~valid, 0).sum()
                loss = scored.loss.masked_fill(~valid, 0).double().sum()
                sums += torch.stack([right, loss, valid.sum().double()])
    return sums


@contextlib.contextmanager
def evaluating(pipeline: Pipeline) -> Iterator[None]:
    """Put a model into evaluation; at the end all that it holds is as it was.

    Those are buffers and attributes that a forward pass updates, the mode of each module, and the
    generators of random numbers, from which evaluations draw the same each time.
    """
    with state_kept(pipeline.parts), pipeline.drawing_alike():
        modes = [(each, each.training) for part in pipeline.parts for each in part.modules()]
        before = [part.training for part in pipeline.parts]
        for part in pipeline.parts:
            part.eval()
        try:
            yield
        finally:
            # By its own method first: a module may do more there, such as merging weights.
            for part, training in zip(pipeline.parts, before, strict=True):
                part.train(training)
            for module, training in modes:
                module.training = training
