"""What a replica has learned: its weights, statistics and moments, by name."""

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dataio.base.errors import ExchangeError

SYNCHRONOUS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def name_parameters(model: nn.Module, optimizer: Optimizer | None) -> dict[str, nn.Parameter]:
    """Name every parameter once, tied ones too; those of the optimizer alone by their place."""
    named: dict[str, nn.Parameter] = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    for number, group in enumerate(optimizer.param_groups if optimizer else []):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                named[f"group {number} place {place}"] = parameter
    return named


def refuse_sharded(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse what is kept equal, or split, over ranks by torch itself.

    Raises:
        ValueError: Names the module or parameter, and the cure.
    """
    # By name: importing torch's distributed tensors takes longer than all the rest of a start
    for module in model.modules():
        wrapper = next((kind for kind in _kinds(module) if kind in SYNCHRONOUS), None)
        if wrapper:
            raise ValueError(
                f"ModelExchange: the model holds a {wrapper}, which averages gradients in every "
                f"step: replicas stay equal, and exchanging them would change nothing; expected "
                f"replicas that train apart: pass the plain module, or leave ModelExchange out"
            )
    for name, parameter in parameters.items():
        if "DTensor" in _kinds(parameter):
            raise ValueError(
                f"ModelExchange: parameter {name} is a DTensor, a piece of a model that several "
                f"ranks share; expected a whole model on every rank: leave ModelExchange out"
            )
        if is_lazy(parameter):
            raise ValueError(
                f"ModelExchange: parameter {name} has no shape yet, expected equal weights on all "
                f"replicas; run one batch through the model before making the exchange"
            )


def find_tensors(
    model: nn.Module, optimizer: Optimizer | None, *, trained: Iterable[str]
) -> dict[str, Tensor]:
    """List what is exchanged, in an order that is the same on every replica.

    Args:
        model: All its buffers that are part of its state.
        optimizer: All its tensors, which appear with its first step.
        trained: Names of the parameters that may differ from replica to replica.

    Raises:
        ExchangeError: If the optimizer keeps more than tensors and numbers.
    """
    named, wanted = name_parameters(model, optimizer), set(trained)
    found: dict[str, Tensor] = {
        f"parameter {name}": parameter for name, parameter in named.items() if name in wanted
    }
    lasting = model.state_dict(keep_vars=True)
    found |= {f"buffer {name}": value for name, value in model.named_buffers() if name in lasting}
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {}) if optimizer else {}
        for kind in sorted(state):
            if isinstance(state[kind], Tensor):
                found[f"moment {name} {kind}"] = state[kind]
            elif not isinstance(state[kind], (int, float, str, type(None))):
                raise ExchangeError(
                    f"ModelExchange: {type(optimizer).__name__} keeps {kind!r} of parameter {name} "
                    f"in a {type(state[kind]).__name__}, expected tensors and numbers; pass "
                    f"optimizer=None to exchange weights and statistics alone"
                )
    return {name: value.detach() for name, value in found.items() if value.numel()}


def digest_tensors(tensors: Iterable[Tensor]) -> bytes:
    """Hash the bits of tensors."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        state.update(flat.view(torch.uint8).numpy().data)
    return state.digest()


def _kinds(value: object) -> list[str]:
    return [kind.__name__ for kind in type(value).__mro__]
