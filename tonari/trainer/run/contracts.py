"""What a task, a loss and the settings beside them must be, checked before data is staged."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

import dataio
from tonari.trainer.config.augment import AugmentConfig
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import StagedModel
from tonari.trainer.models.unchanged import without_trace
from tonari.trainer.run.own import Own, batch_of_ones, shape_of
from tonari.trainer.run.tasks import Task

logger = logging.getLogger(__name__)

ROWS = 3

IN_LOSS = ("label_smoothing", "mixup", "cutmix")
"""Settings that the loss of the data's own task carries out."""

IN_TASK = (*IN_LOSS, "erase")
"""Settings that the data's own task carries out."""


def check_settings(augment: AugmentConfig, own: Own) -> None:
    """Refuse settings that a caller's loss or task would leave without effect.

    Raises:
        ConfigError: Names the first.
    """
    given, names = ("task", IN_TASK) if own.task is not None else ("loss", IN_LOSS)
    if own.task is None and own.loss is None:
        return
    for name in names:
        value = getattr(augment, name)
        if value:
            raise ConfigError(
                f"augment.{name} is {value}, but train was given a {given} of its own, in whose "
                f"place it would have no effect; leave it out, and do this in the {given}"
            )


def check_columns(task: Task, fields: Mapping[str, dataio.Field], own: Own) -> None:
    """Refuse a task that reads a column which no field gives, or a target that is no class.

    Args:
        task: What is learnt.
        fields: Of a sample.
        own: What the caller brings.

    Raises:
        ConfigError: Names the column.
    """
    if own.transform is None:  # else it may give any
        for name in (*task.columns.input, *task.columns.target):
            if name not in fields:
                raise ConfigError(
                    f"the task reads the column {name!r}, but the fields of a sample are "
                    f"{', '.join(fields)}; give train(fields=...) with {name!r}, or a task that "
                    "reads one of these"
                )
    if own.task is not None or own.transform is not None:
        return
    for name in task.columns.target:
        shaped = shape_of(fields[name])
        if name == "label" and shaped is not None:
            shape, dtype = shaped
            if shape or dtype.is_floating_point or dtype.is_complex:
                raise ConfigError(
                    f"the field {name!r} is {str(dtype).removeprefix('torch.')}{list(shape)}, "
                    "expected one whole number a row, the number of its class, by which the "
                    "trainer judges answers; for other targets give train(task=...), whose "
                    "target, losses and outcome are yours"
                )


def check_rows_apart(
    model: StagedModel, task: Task, fields: Mapping[str, dataio.Field], *, cut_by: str
) -> None:
    """Refuse a loss of which a row depends on other rows, where a step's rows are not together.

    Args:
        model: Says the shape of logits.
        task: With the caller's losses.
        fields: Of a sample.
        cut_by: What parts the rows, for the message; empty: nothing does.

    Raises:
        ConfigError: If so. Not where the losses cannot be computed from made-up rows.
    """
    if not cut_by:
        return
    # A loss of pairs has none among rows that are all of one class.
    for mixed in (False, True):
        try:
            found = _losses_of_changed_row(model, task, fields, mixed=mixed)
        except Exception:
            # It looks at values, or at what only batches have.
            continue
        if found is not None:
            _check_apart(*found, cut_by)


def _check_apart(losses: Tensor, again: Tensor, changed: Tensor, cut_by: str) -> None:
    if losses.shape != (ROWS,) or not torch.equal(losses, again):
        return  # Of another shape, which is refused elsewhere; or it draws.
    others = slice(0, ROWS - 1)
    if not torch.allclose(losses[others], changed[others], rtol=1e-5, atol=1e-7, equal_nan=True):
        raise ConfigError(
            f"the loss of a row depends on the other rows of its batch, which {cut_by} cuts into "
            "parts: each part would have a loss of its own; expected a loss that a row has by "
            "itself; leave that out, or compute it from each row alone"
        )


def _losses_of_changed_row(
    model: StagedModel, task: Task, fields: Mapping[str, dataio.Field], *, mixed: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute made-up rows' losses twice, and once with other logits in the last row.

    Their targets are made of ones, or where they are ``mixed`` of zeros in every other row.
    """
    columns = {name: fields[name] for name in task.columns.target if name in fields}
    if any(shape_of(its) is None for its in columns.values()):
        return None
    shape = model.logits_shape(ROWS)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator)
    changed = logits.clone()
    changed[-1] = torch.randn(shape[1:], generator=generator)
    with without_trace(task), torch.no_grad():
        batch = batch_of_ones(columns, ROWS)
        if mixed:
            for column in batch.values():
                column[::2] = 0
        target = task.target(batch)
        one, again, other = (task.losses(each, target) for each in (logits, logits, changed))
    return one, again, other
