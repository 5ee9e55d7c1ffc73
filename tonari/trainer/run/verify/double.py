"""A task of single precision, for a model in double precision."""

import torch
from torch import Tensor

from dataio.rows.samples import Batch
from tonari.trainer.models.given import Inputs
from tonari.trainer.private.trees import tree_map
from tonari.trainer.run.tasks import Columns, Task


class InDouble:
    """A task that gives a model floating point of double precision, in place of single.

    Args:
        task: Says all else.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        if hasattr(task, "num_targets"):
            self.num_targets = task.num_targets

    @property
    def columns(self) -> Columns:
        """Those of the task."""
        return self._task.columns

    def input(self, batch: Batch) -> Inputs:
        """Take what the task takes."""
        found: Inputs = tree_map(_double, self._task.input(batch))
        return found

    def target(self, batch: Batch) -> Tensor:
        """Take what the task takes."""
        return _double(self._task.target(batch))

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute the task's."""
        return self._task.losses(logits, target)

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Judge as the task does."""
        return self._task.outcome(logits, target)


def _double(value: Tensor) -> Tensor:
    return (
        value.double() if value.dtype in (torch.float32, torch.bfloat16, torch.float16) else value
    )
