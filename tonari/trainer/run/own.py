"""What a caller of `trainer.train` brings of their own, and what is checked before data is staged.

A module that was not written for the trainer is wrapped in `Adapted`; the fields say what its
inputs look like, so that it can be followed without data.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import dataio
from dataio.base.named import import_named
from dataio.rows.samples import Batch
from tonari.trainer.config.config import Config
from tonari.trainer.config.kinds import check_args
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.contracts import check_losses
from tonari.trainer.models import Adapted, StagedModel
from tonari.trainer.models.given import Inputs
from tonari.trainer.models.staged import scaled
from tonari.trainer.models.trace import NUM_ROWS, Shape
from tonari.trainer.models.unchanged import without_trace
from tonari.trainer.private.norms import BatchNorm
from tonari.trainer.private.trees import tree_map
from tonari.trainer.run.tasks import Columns, Task

logger = logging.getLogger(__name__)

Loss = Callable[[Tensor, Tensor], Tensor]
"""Logits and target, floating[rows, ...] and as the task gives it, to a loss a row."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""A rank's parameters to their optimizer."""

Transform = Callable[..., Any]
"""As of `dataio.Loader`."""


@dataclass(frozen=True, kw_only=True)
class Own:
    """What a caller gives in place of what the settings name; see `trainer.train`.

    Attributes:
        sources: What is trained, and what is evaluated on; the others are arguments of `train`.
    """

    model: Callable[[], nn.Module] | None = None
    task: Task | None = None
    fields: Mapping[str, dataio.Field] | None = None
    evaluation_fields: Mapping[str, dataio.Field] | None = None
    transform: Transform | None = None
    evaluation_transform: Transform | None = None
    optimizer: MakeOptimizer | None = None
    loss: Loss | None = None
    sources: tuple[dataio.Source, dataio.Source | None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            raise ConfigError(
                f"model= is a {type(self.model).__name__} that is made, expected a function that "
                "makes it, on each rank by itself; give model=lambda: ..."
            )
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer= is a {(name := type(self.optimizer).__name__)} that is made, expected "
                f"a function of the parameters; give optimizer=lambda parameters: "
                f"{name}(parameters, ...)"
            )
        if isinstance(self.task, type):
            raise ConfigError(f"task= is the class {self.task.__name__}, expected an object of it")


GIVES = ("sources", "model")
"""What is no business of a recipe: the files of a run name these."""


def own_of(config: Config, given: Own | None = None) -> Own:
    """Take what a run's recipe gives, and in place of it what the caller gives.

    Args:
        config: The settings, with their ``recipe``.
        given: By the caller.

    Raises:
        ConfigError: If there is no such function, or it gives what `trainer.train` does not take.
    """
    given = given or Own()
    recipe = config.recipe
    if not recipe.kind:
        return given
    try:
        makes = import_named(recipe.kind)
    except ImportError as error:
        raise ConfigError(
            f'recipe.kind is "{recipe.kind}", which cannot be imported: {error}'
        ) from error
    if not callable(makes):
        raise ConfigError(
            f'recipe.kind is "{recipe.kind}", a {type(makes).__name__}, expected a function that '
            "returns arguments of trainer.train"
        )
    check_args("recipe", makes, recipe.args)
    found = makes(**recipe.args)
    takes = [its.name for its in dataclasses.fields(Own) if its.name not in GIVES]
    if not isinstance(found, Mapping) or not set(found) <= set(takes):
        what = list(found) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise ConfigError(
            f'recipe.kind is "{recipe.kind}", which returns {what}, expected a dict with some of '
            f"{', '.join(takes)}, as trainer.train takes them"
        )
    beneath = {name: its for name, its in found.items() if getattr(given, name) is None}
    return replace(given, **beneath)


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
        ConfigError: If it is no module, or has no sizes yet.
    """
    if isinstance(module, nn.Module):
        _check_sizes(module)
        begin_training(module.wrapped if isinstance(module, Adapted) else module)
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
    if all(shape_of(its) is not None for its in columns.values()):
        adapted.describe_inputs(partial(_input_of, cache(partial(_inputs_of_ones, task, columns))))
    return adapted


def begin_training(module: nn.Module) -> None:
    """Put a module into training as a plain loop does; what was put into evaluation by hand stays.

    A module that is in evaluation as a whole, as libraries give it, trains as a whole.
    """
    by_hand = [each for each in module.modules() if not each.training] if module.training else []
    module.train()
    for each in by_hand:
        each.training = False
    trained = [
        name
        for name, each in module.named_modules()
        if not each.training
        and not isinstance(each, BatchNorm)
        and any(parameter.requires_grad for parameter in each.parameters())
    ]
    if trained:
        logger.warning(
            "%s is in evaluation mode as it was made (%d modules with weights that are trained), "
            "and stays so, without dropout and the like; call its train() where it is made, if "
            "that is not meant",
            trained[0], len(trained),
        )  # fmt: skip


def _check_sizes(module: nn.Module) -> None:
    held = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, value in held if is_lazy(value)]
    if lazy:
        raise ConfigError(
            f"{type(module).__name__} has weights without a size: {', '.join(lazy[:4])}, expected "
            "sizes before the first batch, by which weights are made, spread and given to the "
            "optimizer; give them (nn.Linear for nn.LazyLinear), or call the module once on an "
            "example in the function that makes it"
        )


def _inputs_of_ones(task: Task, columns: Mapping[str, dataio.Field]) -> tuple[Inputs, Inputs]:
    """Take the input of batches of ones: tasks may look at values, or make tensors on the CPU."""
    with without_trace(task):
        two, three = (_on_meta(task.input(batch_of_ones(columns, rows))) for rows in NUM_ROWS)
    return two, three


def _input_of(examples: Callable[[], tuple[Inputs, Inputs]], rows: int) -> Inputs:
    """Describe what a task takes from a batch of some rows, as meta tensors."""

    def scale(two: Tensor, three: Tensor) -> Tensor:
        shape = Shape(tuple(two.shape), tuple(three.shape), two.dtype).of(rows)
        return torch.empty(shape, dtype=two.dtype, device="meta")

    found: Inputs = tree_map(scale, *examples())
    return found


def batch_of_ones(fields: Mapping[str, dataio.Field], rows: int) -> Batch:
    """Make a batch of ones, of fields whose shape is known."""
    batch: dict[str, Any] = {}
    for name, its in fields.items():
        shaped = shape_of(its)
        assert shaped is not None, "the caller has asked"
        shape, dtype = shaped
        batch[name] = torch.ones((rows, *shape), dtype=dtype)
    return batch


def check_loss(
    model: StagedModel, task: Task, fields: Mapping[str, dataio.Field], *, rows: int = NUM_ROWS[0]
) -> None:
    """Refuse a loss that is not one a row, where it can be computed without data.

    Raises:
        ConfigError: Says what it gave.
    """
    columns = {name: fields[name] for name in task.columns.target if name in fields}
    if any(shape_of(its) is None for its in columns.values()):
        return
    try:
        logits = torch.empty(model.logits_shape(rows), device="meta")
        with without_trace(task):
            target: Tensor = _on_meta(task.target(batch_of_ones(columns, rows)))
            losses = task.losses(logits, target)
    except Exception:
        # Losses that look at values are checked as the first batch passes.
        return
    check_losses(losses, rows)


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


def shape_of(its: dataio.Field) -> tuple[tuple[int, ...], torch.dtype] | None:
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
    """Turn bytes of images, uint8[rows, channels, height, width], into floating point.

    Of several inputs, those of this form: other bytes, such as masks, stay as they are.
    """

    def convert(value: Tensor) -> Tensor:
        if value.dtype != torch.uint8:
            return value
        if not mean:
            return scaled(value, dtype)
        shift, scale = (
            torch.tensor(each, dtype=dtype, device=value.device) for each in (mean, std)
        )
        return (value.to(dtype) / 255 - shift[:, None, None]) / scale[:, None, None]

    if isinstance(inputs, Tensor):
        return convert(inputs)
    found: Inputs = tree_map(lambda each: convert(each) if each.ndim == 4 else each, inputs)
    return found


def _on_meta(inputs: Any) -> Any:
    return tree_map(lambda each: each.to("meta"), inputs)
