"""Make the optimizer that the settings name, with groups of parameters that decay and do not."""

import inspect
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from dataio.base.named import import_named
from tonari.trainer.config.optimizer import OptimizerConfig
from tonari.trainer.errors import ConfigError
from tonari.trainer.run.whole_steps import step_on_whole_weights


def make_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[nn.Parameter],
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Make the optimizer of this rank's parameters, which may be parts of weights. Collective.

    Args:
        config: Names it, where no ``make`` is given.
        parameters: Of this rank.
        make: The caller's own way to make it.

    Raises:
        ConfigError: If it is none, or cannot be stepped so.
    """
    if make is None:
        made = build_optimizer(config, parameters)
    else:
        given = list(parameters)
        made = make(given)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"the optimizer is {type(made).__name__}, expected a torch.optim.Optimizer; let "
                "the function that makes it return one"
            )
        _check_closure(type(made), f"the optimizer is {type(made).__name__}")
        own = {id(each) for each in given}
        if any(id(each) not in own for group in made.param_groups for each in group["params"]):
            raise ConfigError(
                f"optimizer= made a {type(made).__name__} of weights that are not the model's, "
                "expected those that it is given; write optimizer=lambda parameters: "
                f"{type(made).__name__}(parameters, ...)"
            )
    step_on_whole_weights(made)
    return made


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Make the optimizer of this rank's parameters.

    Checkpoints keep what it remembers by the parameter's name, so that ranks of a pipeline, which
    own some parameters each, may have other groups than one process.

    Raises:
        ConfigError: If the class is not found, or does not take the settings.
    """
    given = list(parameters)
    groups = _groups(config, given)
    # On a GPU: one operation on all shards, where torch's default has ten, each of which passes
    # through every shard in Python.
    fused = bool(given) and all(each.is_cuda for each in given)
    if config.kind == "adamw":
        first, second = config.betas
        return torch.optim.AdamW(
            groups, lr=config.lr, betas=(first, second), weight_decay=config.weight_decay,
            fused=fused or None,
        )  # fmt: skip
    if config.kind == "sgd":
        return torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay,
            fused=fused or None,
        )  # fmt: skip
    made_by = _find(config.kind)
    settings = {"lr": config.lr, **config.args}
    if "weight_decay" in inspect.signature(made_by).parameters:
        settings["weight_decay"] = config.weight_decay
    else:
        for group in groups:
            group.pop("weight_decay", None)
    try:
        return made_by(groups, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"[optimizer.args]: {config.kind} does not take the settings {settings}: {error}; "
            f"it takes {', '.join(list(inspect.signature(made_by).parameters)[1:])}"
        ) from error


def find_lr_shares(optimizer: torch.optim.Optimizer) -> list[float]:
    """Find the learning rate of each group as a share of the largest on any rank. Collective."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    largest = torch.tensor(max(rates, default=0.0), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [rate / float(largest) if largest else 1.0 for rate in rates]


def _groups(config: OptimizerConfig, parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    """Group parameters by the shape they have in the whole model, which no mesh changes."""
    if config.decays_norms or not config.weight_decay:
        return [{"params": parameters}]
    matrices: dict[str, object] = {"params": [each for each in parameters if each.ndim > 1]}
    vectors: dict[str, object] = {
        "params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0,
    }  # fmt: skip
    # A rank of a pipeline may own no parameters of one kind.
    return [group for group in (matrices, vectors) if group["params"]]


def _find(kind: str) -> Callable[..., torch.optim.Optimizer]:
    try:
        found = import_named(kind if ":" in kind else ":".join(kind.rsplit(".", 1)))
    except ImportError as error:
        raise ConfigError(
            f'optimizer.kind is "{kind}", which cannot be imported ({error}); give a class that '
            'can, such as "torch.optim.NAdam" or "package.module:Name"'
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            f'optimizer.kind is "{kind}", which is no torch.optim.Optimizer; give a class that is '
            'one, such as "torch.optim.NAdam"'
        )
    _check_closure(found, f'optimizer.kind is "{kind}"')
    return found


def _check_closure(kind: type[torch.optim.Optimizer], found: str) -> None:
    if issubclass(kind, torch.optim.SparseAdam):
        raise ConfigError(
            f"{found}, which steps on sparse gradients alone; choose one that takes dense ones"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{found}, which computes the loss several times a step (its step needs a closure); "
            "choose an optimizer that takes one gradient a step"
        )
