"""What a model learns: which columns it reads, and how its answer is judged, row by row."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from dataio.rows.samples import Batch
from tonari.trainer.errors import ConfigError
from tonari.trainer.models.given import Inputs


class Columns(NamedTuple):
    """Which columns of a batch a task reads."""

    input: tuple[str, ...]
    target: tuple[str, ...]


class Task(Protocol):
    """What the trainer asks of a task.

    A class that says ``draws = False`` of itself draws nothing as it takes its input and target,
    and needs no generators seeded for it; of its subclasses that says nothing.
    """

    @property
    def columns(self) -> Columns: ...

    def input(self, batch: Batch) -> Inputs:
        """Take the model's input from a batch: a tensor, or several by the names it gives them."""
        ...

    def target(self, batch: Batch) -> Tensor:
        """Take the right answers: int64[batch, ...]."""
        ...

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute floating[batch], differentiable: this rank's part of a row's loss, over cp."""
        ...

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Judge, the same on all cp ranks.

        Returns:
            right: bool or floating[batch]: The share of a row's answers that are right. The row
                counts as right where it is over a half.
            confidence: float32[batch].
        """
        ...


@runtime_checkable
class CountsTargets(Protocol):
    """A task of which a step descends the mean over all answers, not over rows. Optional."""

    def num_targets(self, batch: Batch) -> Tensor:
        """Count the answers of each row: int64[batch]."""
        ...


class Classify:
    """One class an image.

    Args:
        image: Column of uint8[batch, channels, height, width].
        label: Column of integers.
    """

    draws = False

    def __init__(self, *, image: str = "image", label: str = "label") -> None:
        self.columns = Columns((image,), (label,))

    def input(self, batch: Batch) -> Tensor:
        """Take the images."""
        return batch[self.columns.input[0]]

    def target(self, batch: Batch) -> Tensor:
        """Take int64[batch]."""
        return batch[self.columns.target[0]].long()

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute the cross-entropy of floating[batch, classes]."""
        check_classes(target, logits.shape[-1], self.columns.target[0])
        return cross_entropy(logits, target)

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Say whether the largest logit is the label's, and its probability."""
        return judge(logits, target)


class NextToken:
    """Each next token of a sequence; the columns hold one token more than the model reads.

    A row is as right, and as confident, as its tokens are on average.

    Args:
        tokens: Column of integer[batch, sequence_length + 1].
        cp: Ranks that share a sequence: each takes its consecutive part of it; None: one does.
    """

    draws = False

    def __init__(self, *, tokens: str = "tokens", cp: DeviceMesh | None = None) -> None:
        self.columns = Columns((tokens,), (tokens,))
        self._cp = None if cp is None or cp.size() == 1 else cp

    def input(self, batch: Batch) -> Tensor:
        """Take this rank's part of all tokens but the last."""
        return self._part(batch[self.columns.input[0]][:, :-1])

    def target(self, batch: Batch) -> Tensor:
        """Take this rank's part of all tokens but the first."""
        return self._part(batch[self.columns.target[0]][:, 1:])

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute this rank's part of the mean cross-entropy over all tokens of a row."""
        # floating[batch, places]
        losses = cross_entropy(logits.flatten(0, 1), target.flatten()).view(target.shape)
        means = losses.mean(dim=1)
        return means if self._cp is None else means / self._cp.size()

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Judge whole rows, the same on all cp ranks. Collective over cp."""
        right, confidence = judge(logits.flatten(0, 1), target.flatten())
        # float64[2, batch]
        means = torch.stack(
            [values.view(target.shape).double().mean(dim=1) for values in (right, confidence)]
        )
        if self._cp is not None:
            dist.all_reduce(means, group=self._cp.get_group())
            means = means / self._cp.size()
        return means[0], means[1].float()

    def _part(self, tokens: Tensor) -> Tensor:
        if self._cp is None:
            return tokens.long().contiguous()
        if tokens.shape[1] % self._cp.size():
            raise ConfigError(
                f"mesh.cp is {self._cp.size()}, which does not divide a sequence of "
                f"{tokens.shape[1]} tokens; choose a data.sequence_length that it divides"
            )
        return tokens.long().chunk(self._cp.size(), dim=1)[self._cp.get_local_rank()].contiguous()


NO_CLASS = -(2**63)
"""No label is: one below 0 is an error."""


def check_classes(target: Tensor, classes: int, column: str) -> None:
    """Refuse labels that are no number of a class, where they can be seen without waiting."""
    if type(target) is not Tensor or target.device.type != "cpu" or not target.numel():
        return
    least, most = target.aminmax()
    if int(least) < 0 or int(most) >= classes:
        wrong = target[(target < 0) | (target >= classes)]
        raise ConfigError(
            f"{column} holds {int(wrong[0])}, expected a class from 0 to {classes - 1}, as the "
            f"model has {classes}; give model.num_classes as many as there are, number classes "
            "from 0 (transform=), or leave such rows out (data.exclude)"
        )


def cross_entropy(logits: Tensor, target: Tensor, *, ignored: int = NO_CLASS) -> Tensor:
    """Compute a loss a row, in float32 at least.

    Args:
        logits: floating[rows, classes]; a DTensor split by class is not gathered.
        target: int64[rows].
        ignored: The target whose loss is 0.
    """
    logits = _precise(logits)
    if not isinstance(logits, DTensor):
        # torch leaves out -100 in silence.
        return F.cross_entropy(logits, target, reduction="none", ignore_index=ignored)
    # Not torch's loss_parallel: it wants the backward pass in its context too, which is not ours.
    largest, _ = _largest(logits)
    exponents = (logits.to_local() - largest[:, None]).exp().sum(dim=1)
    return _summed(exponents, logits).log() + largest - _summed(_at(logits, target), logits)


def label_margin(logits: Tensor, target: Tensor) -> Tensor:
    """Compute how far a row's target is above the mean of its logits; see `cross_entropy`."""
    logits = _precise(logits)
    if not isinstance(logits, DTensor):
        return logits.gather(1, target[:, None])[:, 0] - logits.mean(dim=1)
    total = _summed(logits.to_local().sum(dim=1), logits)
    return _summed(_at(logits, target), logits) - total / logits.shape[1]


@torch.no_grad()
def judge(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Compare rows with their targets, as `importance.outcome` does; logits may be split by class.

    Returns:
        correct: bool[rows].
        confidence: float32[rows]: The largest class's probability.
    """
    logits = _precise(logits)
    if not isinstance(logits, DTensor):
        return logits.argmax(dim=1) == target, logits.softmax(dim=1).amax(dim=1).float()
    largest, where = _largest(logits)
    exponents = (logits.to_local() - largest[:, None]).exp().sum(dim=1)
    return where == target, (1 / _summed(exponents, logits)).float()


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype.itemsize >= 4 else logits.float()


def _largest(logits: DTensor) -> tuple[Tensor, Tensor]:
    """Find each row's largest logit over all classes, and the first class that has it."""
    group = logits.device_mesh.get_group()
    largest, where = logits.to_local().detach().max(dim=1)
    overall = largest.clone()
    dist.all_reduce(overall, dist.ReduceOp.MAX, group=group)
    where = torch.where(largest == overall, where + _first_class(logits), logits.shape[1])
    dist.all_reduce(where, dist.ReduceOp.MIN, group=group)
    return overall, where


def _at(logits: DTensor, target: Tensor) -> Tensor:
    """Take the target's logit, 0 where another rank has it."""
    here = logits.to_local()
    index = target - _first_class(logits)
    inside = (index >= 0) & (index < here.shape[1])
    taken = here.gather(1, index.clamp(0, here.shape[1] - 1)[:, None])[:, 0]
    return torch.where(inside, taken, 0)


def _first_class(logits: DTensor) -> int:
    # check_mesh has made all parts equal.
    return logits.device_mesh.get_local_rank() * logits.to_local().shape[1]


def _summed(values: Tensor, logits: DTensor) -> Tensor:
    parts = DTensor.from_local(values, logits.device_mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()
