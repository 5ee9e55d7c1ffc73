"""What happens to one batch: a training step, a new score, or an evaluation."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from importance import outcome

Batch = dict[str, Tensor]


class Reports(Protocol):
    """What a step needs of the loader."""

    def report(self, batch: Batch, loss: Tensor, correct: Tensor, confidence: Tensor) -> None: ...

    def refresh(self) -> Iterator[Batch]: ...


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Reports, batch: Batch
) -> Tensor:
    """Update the model by one batch and report its rows' losses. Collective.

    Returns:
        float[]: This replica's weighted loss; its mean over replicas is the policy's loss.
    """
    loss = _score(model, loader, batch)
    mean = (loss * batch["weight"]).mean()
    mean.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return mean.detach()


@torch.no_grad()
def rescore(model: nn.Module, loader: Reports) -> None:
    """Give the hidden rows that are due a new score, in evaluation mode. Collective."""
    model.eval()
    for batch in loader.refresh():
        _score(model, loader, batch)
    model.train()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> float:
    """Compute the accuracy over all replicas' valid rows. Collective."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for batch in batches:
        right = model(batch["image"]).argmax(dim=1) == batch["label"]
        counts += torch.stack([(right & batch["valid"]).sum(), batch["valid"].sum()])
    dist.all_reduce(counts)
    model.train()
    num_right, num_valid = counts.tolist()
    return float(num_right / max(num_valid, 1))


def _score(model: nn.Module, loader: Reports, batch: Batch) -> Tensor:
    logits = model(batch["image"])
    loss = F.cross_entropy(logits, batch["label"], reduction="none")
    loader.report(batch, loss.detach(), *outcome(logits, batch["label"]))
    return loss
