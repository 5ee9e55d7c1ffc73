"""What a caller of `trainer.train` brings of their own, and what is checked before data is staged.

A module that was not written for the trainer is wrapped in `Adapted`; the fields say what its
inputs look like, so that it can be followed without data.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import dataio
from dataio.base.named import import_named
from dataio.batch.values import Batch
from trainer.errors import ConfigError
from trainer.models import Adapted, StagedModel
from trainer.models.staged import scaled
from trainer.models.trace import NUM_ROWS, Inputs
from trainer.run.tasks import Columns, Task

Loss = Callable[[Tensor, Tensor], Tensor]
"""Logits and target, floating[rows, ...] and as the task gives it, to a loss a row."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""A rank's parameters to their optimizer."""

Transform = Callable[..., Any]
"""As of `dataio.Loader`."""


@dataclass(frozen=True, kw_only=True)
class Own:
    """What a caller gives in place of what the settings name; see `trainer.train`."""

    model: Callable[[], nn.Module] | None = None
    task: Task | None = None
    fields: Mapping[str, dataio.Field] | None = None
    transform: Transform | None = None
    evaluation_transform: Transform | None = None
    optimizer: MakeOptimizer | None = None
    loss: Loss | None = None


def import_model(path: str) -> Callable[..., nn.Module]:
    """Import ``package.module:name``.

    Raises:
        ConfigError: If there is none, or it cannot be called.
    """
    try:
        found = import_named(path)
    except ImportError as error:
        raise ConfigError(f'model.kind is "{path}", which cannot be imported: {error}') from error
    if not callable(found):
        raise ConfigError(
            f'model.kind is "{path}", a {type(found).__name__}, expected a class or function that '
            "makes the model"
        )
    made: Callable[..., nn.Module] = found
    return made


def adapt(
    module: nn.Module, *, layers: tuple[str, ...] | str | None, task: Task,
    fields: Mapping[str, dataio.Field], mean: Sequence[float] = (), std: Sequence[float] = (),
) -> StagedModel:  # fmt: skip
    """Make a model of stages of any module, and say what it will be called with.

    Args:
        module: What the caller's function made.
        layers: Where its blocks are; None: as it says.
        task: Takes its input from a batch.
        fields: Of a sample.
        mean: Of the bytes of images divided by 255, one for each channel; empty: they become
            floating point in [-1, 1].
        std: Likewise.

    Raises:
        ConfigError: If it is no module.
    """
    if isinstance(module, StagedModel) and not isinstance(module, Adapted):
        return module
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the model is {type(module).__name__}, expected a torch.nn.Module; let the function "
            "that makes it return one"
        )
    adapted = module if isinstance(module, Adapted) else Adapted(module, layers=layers)
    if any(isinstance(each, dataio.Image) for each in fields.values()):
        adapted.prepare = partial(_in_floats, mean=mean, std=std)
    columns = {name: fields[name] for name in task.columns.input if name in fields}
    if all(_shape(its) is not None for its in columns.values()):
        adapted.describe_inputs(lambda rows: _on_meta(task.input(empty_batch(columns, rows))))
    return adapted


def empty_batch(fields: Mapping[str, dataio.Field], rows: int) -> Batch:
    """Make a batch without data, on ``meta``, of fields whose shape is known."""
    batch: dict[str, Any] = {}
    for name, its in fields.items():
        shaped = _shape(its)
        assert shaped is not None, "the caller has asked"
        shape, dtype = shaped
        batch[name] = torch.empty((rows, *shape), dtype=dtype, device="meta")
    return batch


def check_loss(
    model: StagedModel, task: Task, fields: Mapping[str, dataio.Field], *, rows: int = NUM_ROWS[0]
) -> None:
    """Refuse a loss that is not one a row, where it can be computed without data.

    Raises:
        ConfigError: Says what it gave.
    """
    columns = {name: fields[name] for name in task.columns.target if name in fields}
    if any(_shape(its) is None for its in columns.values()):
        return
    try:
        logits = torch.empty(model.logits_shape(rows), device="meta")
        losses = task.losses(logits, task.target(empty_batch(columns, rows)))
    except Exception:
        # Losses that look at values are checked as the first batch passes.
        return
    check_losses(losses, rows)


def check_losses(losses: Tensor, rows: int) -> None:
    """Refuse losses that are not floating[rows]."""
    if tuple(losses.shape) != (rows,):
        raise ConfigError(
            f"the loss of {rows} rows is {list(losses.shape)}, expected [{rows}]: one loss a row, "
            'which importance and the weights of rows need; give reduction="none", and take the '
            "mean over what else a row has"
        )


class OwnLoss:
    """A task whose loss is the caller's.

    Args:
        task: Says all else.
        loss: Logits and target -> floating[rows].
    """

    def __init__(self, task: Task, loss: Loss) -> None:
        self._task, self._loss = task, loss

    @property
    def columns(self) -> Columns:
        """Those of the task."""
        return self._task.columns

    def input(self, batch: Batch) -> Inputs:
        """Take what the task takes."""
        return self._task.input(batch)

    def target(self, batch: Batch) -> Tensor:
        """Take what the task takes."""
        return self._task.target(batch)

    def losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute the caller's loss, floating[rows]."""
        return self._loss(logits, target)

    def outcome(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Judge as the task does."""
        return self._task.outcome(logits, target)


def _shape(its: dataio.Field) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Find the shape and dtype that a field is delivered in; None where pictures decide."""
    if isinstance(its, dataio.Image):
        return None if its.out is None else ((its.channels, *its.out), torch.uint8)
    column = its.column("")
    if column is None:
        return None
    return tuple(column.shape), torch.from_numpy(np.empty(0, column.dtype)).dtype


def _in_floats(
    inputs: Inputs, dtype: torch.dtype, *, mean: Sequence[float], std: Sequence[float]
) -> Inputs:
    """Turn bytes of images, uint8[rows, channels, height, width], into floating point."""
    if not isinstance(inputs, Tensor) or inputs.dtype != torch.uint8:
        return inputs
    if not mean:
        return scaled(inputs, dtype)
    shift, scale = (torch.tensor(each, dtype=dtype, device=inputs.device) for each in (mean, std))
    return (inputs.to(dtype) / 255 - shift[:, None, None]) / scale[:, None, None]


def _on_meta(inputs: Inputs) -> Inputs:
    found: Inputs = tree_map(lambda each: each.to("meta"), inputs)
    return found
