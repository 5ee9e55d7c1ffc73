"""What a checkpoint holds of model and optimizer, named as in the whole model on any mesh."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.tensor import DTensor

from tonari.trainer.checkpoint.directory import Progress
from tonari.trainer.errors import CheckpointError

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
PART = re.compile(r"^((?:state|param_groups)\.)?(\d+)\.(.*)$")
"""The number of a part, in the name of a parameter or of its optimizer's state."""

OWN = "wrapped."
"""What an `Adapted` model puts before its module's own names."""

OF_RANK = "of_rank"
"""The kind of what each rank of a mesh has for itself."""

Named = dict[str, Any]


class Saveable(Protocol):
    """What a checkpoint needs of the loader, on every rank."""

    def save(self, path: Path) -> None: ...

    def restore(self, path: Path) -> None: ...


def read_state(
    whole: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, Tensor] | None = None,
) -> dict[str, Named]:
    """Read the state of model and optimizer, which shares the memory of both. Collective.

    Args:
        whole: Has the parts as children: torch wants the model of all of an optimizer's weights.
        optimizer: Of all their parameters.
        average: Averaged weights by name; None: there are none.
    """
    try:
        state, optimizer_state = get_state_dict(whole, optimizer, options=OPTIONS)
    except KeyError as error:
        names = dict(whole.named_parameters(remove_duplicate=False)).keys()
        tied = sorted(map(plain_name, names - dict(whole.named_parameters()).keys()))
        raise CheckpointError(
            f"model: a parameter was replaced while it trained ({', '.join(tied) or 'which'} has "
            "the weight of another now), expected those that it was made with; tie weights in its "
            "__init__, not in forward"
        ) from error
    read: dict[str, Named] = {"model": state, "optimizer": optimizer_state}
    return read if average is None else read | {"ema": dict(average)}


def read_weights(whole: nn.Module, average: Mapping[str, Tensor] | None = None) -> dict[str, Named]:
    """Read what `read_state` does, without the optimizer's part. Collective."""
    read: dict[str, Named] = {"model": get_model_state_dict(whole)}
    return read if average is None else read | {"ema": dict(average)}


def by_plain_names(state: dict[str, Named], parts: Sequence[nn.Module]) -> dict[str, Named]:
    """Name the values as in the whole model, whichever parts of it are here.

    What an optimizer and an average remember of a tied weight has its first name; of the model's
    own values each name is kept, as the whole model's ``state_dict`` has them.
    """
    return {
        kind: {plain_name(name, tied_in(kind, parts)): value for name, value in named.items()}
        for kind, named in state.items()
    }


def tied_in(kind: str, parts: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """Choose the parts by which names of a kind become those of whole weights."""
    return () if kind == "model" else parts


def plain_name(name: str, parts: Sequence[nn.Module] = ()) -> str:
    """Give a value its name in the whole model.

    Args:
        name: With the number of its part.
        parts: Know which names are one weight's: it has its first.
    """
    found = PART.match(name)
    if found is None:
        return name
    kind, number, rest = found.groups()
    first_names: Mapping[str, str] = {}
    if parts:
        first_names = getattr(parts[int(number)], "first_names", {})
    for other, first in first_names.items():
        if rest == other or rest.startswith(f"{other}."):
            rest = first + rest.removeprefix(other)
            break
    return (kind or "") + rest.removeprefix(OWN)


def check_finite(parts: Sequence[nn.Module], progress: Progress) -> None:
    """Raise CheckpointError if a parameter of this rank is not finite, or a buffer no number.

    Buffers may be infinite: masks are.
    """
    held = nn.ModuleList(parts)
    lost = [(name, ~_own_part(value).isfinite().all()) for name, value in held.named_parameters()]
    lost += [(name, _own_part(value).isnan().any()) for name, value in held.named_buffers()]
    for name, is_lost in lost:
        if bool(is_lost):
            raise CheckpointError(
                f"step {progress.steps}: {plain_name(name)} is not finite, expected numbers to go "
                "on from; no checkpoint was written, and those before it are kept: go on from one "
                "of them with a smaller optimizer.lr, or with optimizer.clip"
            )


def _own_part(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value.detach()


def first_reason(error: BaseException) -> object:
    """Find why one rank failed, the first if several did."""
    # The exception's own text holds each rank's whole traceback.
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)
