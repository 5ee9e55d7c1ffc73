"""Optimizers that look at whole weights, over ranks that hold parts of them.

Most optimizers treat each element by itself, or compute on torch's DTensors what they would on
whole tensors. Others fail there, or see a part and take it for the whole. A small step shows which
it is; those others then take their steps on whole weights, as one process does.
"""

import logging
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

logger = logging.getLogger(__name__)

ELEMENTWISE = {
    optim.ASGD, optim.SGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW,
    optim.NAdam, optim.RAdam, optim.RMSprop,
}  # fmt: skip

MOST_APART = 0.02
"""Of the length of a step: more than rounding in bfloat16 makes of what is the same."""

NUM_STEPS = 2
"""The second sees what the first has remembered."""


def step_on_whole_weights(optimizer: Optimizer) -> bool:
    """Have an optimizer see whole weights, if it would do something else with parts. Collective.

    Each rank then gathers the weights and gradients for a step, and keeps what the optimizer
    remembers whole.

    Args:
        optimizer: Of this rank's parameters; has taken no step.

    Returns:
        Whether it will.
    """
    parts = [each for each in _parameters(optimizer) if isinstance(each, DTensor)]
    if type(optimizer) in ELEMENTWISE or not parts or _steps_alike(optimizer):
        return False
    logger.warning(
        "%s looks at whole weights, of which a rank has a part: each gathers all of them and their "
        "gradients for a step, and keeps whole what the optimizer remembers; choose another "
        "optimizer where that takes too much memory",
        type(optimizer).__name__,
    )
    whole = _Whole()
    optimizer.register_step_pre_hook(whole.put_in)
    optimizer.register_step_post_hook(whole.put_back)
    return True


class _Whole:
    """Puts whole weights in the places of an optimizer's parameters, during a step."""

    def __init__(self) -> None:
        self._parts: list[tuple[DTensor, nn.Parameter]] = []

    @torch.no_grad()
    def put_in(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            group["params"] = [self._gather(optimizer, each) for each in group["params"]]

    def _gather(self, optimizer: Optimizer, part: nn.Parameter) -> nn.Parameter:
        if not isinstance(part, DTensor) or part.grad is None:
            return part
        whole = nn.Parameter(part.full_tensor(), part.requires_grad)
        grad = part.grad
        whole.grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        if part in optimizer.state:
            optimizer.state[whole] = optimizer.state.pop(part)
        self._parts.append((part, whole))
        return whole

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer, *_: object) -> None:
        parts = {whole: part for part, whole in self._parts}
        for group in optimizer.param_groups:
            group["params"] = [parts.get(each, each) for each in group["params"]]
        for part, whole in self._parts:
            if whole in optimizer.state:
                optimizer.state[part] = optimizer.state.pop(whole)
            replicated = [Replicate()] * part.device_mesh.ndim
            own = DTensor.from_local(whole.data, part.device_mesh, replicated, run_check=False)
            part.copy_(own.redistribute(placements=part.placements))
        self._parts = []


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _steps_alike(optimizer: Optimizer) -> bool:
    """Take steps with small weights, whole and in parts, and say whether they come out the same."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        trained = [each for each in group["params"] if each.requires_grad]
        kinds = {_kind(each): each for each in trained if isinstance(each, DTensor)}
        groups.append({**group, "params": [*kinds.values()]})
    wholes = [{**group, "params": [*map(_small, group["params"])]} for group in groups]
    parts = [
        {**group, "params": [*map(_split, whole["params"], group["params"])]}
        for group, whole in zip(groups, wholes, strict=True)
    ]
    before = [each.detach().clone() for group in wholes for each in group["params"]]
    try:
        moved = [_step(optimizer, each) for each in (wholes, parts)]
    except Exception:
        logger.debug("a step with parts of weights failed", exc_info=True)
        return False
    return all(
        bool((one - other).norm() <= MOST_APART * (one - start).norm())
        for start, one, other in zip(before, *moved, strict=True)
    )


def _kind(part: DTensor) -> tuple[object, ...]:
    return part.ndim, part.dtype, part.device_mesh, part.placements


def _small(like: DTensor) -> nn.Parameter:
    """Make a whole weight with a gradient, whose parts differ much."""
    generator = torch.Generator().manual_seed(like.ndim)
    shape = [2 * like.device_mesh.size()] + [like.device_mesh.size() * 4] * (like.ndim - 1)
    weight, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    growing = torch.arange(1, 1 + shape[0]).view(-1, *[1] * (like.ndim - 1)) ** 2
    weight, grad = ((each * growing).to(like.device, like.dtype) for each in (weight, grad))
    small = nn.Parameter(weight)
    small.grad = grad
    return small


def _split(small: nn.Parameter, like: DTensor) -> nn.Parameter:
    """Split a weight as another one is."""
    placements = [
        Shard(int(its.dim)) if its.is_shard() else Replicate()  # type: ignore[attr-defined]
        for its in like.placements
    ]
    mesh = like.device_mesh
    assert small.grad is not None, "made so"
    weight, grad = (
        distribute_tensor(each.detach().clone(), mesh, placements, src_data_rank=None)
        for each in (small, small.grad)
    )
    part = nn.Parameter(weight)
    part.grad = grad
    return part


def _step(optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[Tensor]:
    """Take steps as an optimizer would with other parameters; returns these, whole."""
    # Not made anew: only its caller knows by what settings.
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.state = defaultdict(dict)
    other.param_groups = [dict(group) for group in groups if group["params"]]
    for group in other.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] = group["lr"] or 1.0
    for _ in range(NUM_STEPS):
        other.step()
    moved = [each.detach() for each in _parameters(other)]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in moved]
