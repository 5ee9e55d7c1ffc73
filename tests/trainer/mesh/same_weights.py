"""Whether two spreads of a model have the same weights, bit for bit."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonari.trainer.models import Adapted
from tonari.trainer.models.absent import Absent


def same_weights(ones: Sequence[nn.Module], others: Sequence[nn.Module]) -> bool:
    """Compare names, placements, ties, and this rank's numbers, of parameters and all else."""
    return len(ones) == len(others) and all(
        [name for name, _ in _all_of(one)] == [name for name, _ in _all_of(other)]
        and _ties(one) == _ties(other)
        and all(
            _same(left, right)
            for (_, left), (_, right) in zip(_all_of(one), _all_of(other), strict=True)
        )
        for one, other in zip(ones, others, strict=True)
    )


def _all_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from part.named_parameters(remove_duplicate=False)
    yield from part.named_buffers(remove_duplicate=False)
    if isinstance(part, Adapted):
        # What stands for weights of other stages.
        yield from ((name, getattr(module, name)) for module, name in part._hollow)


def _ties(part: nn.Module) -> list[int]:
    """Number the parameters by identity."""
    seen: dict[int, int] = {}
    parameters = part.named_parameters(remove_duplicate=False)
    return [seen.setdefault(id(parameter), len(seen)) for _, parameter in parameters]


def _same(left: Tensor, right: Tensor) -> bool:
    alike = type(left) is type(right) and left.requires_grad == right.requires_grad
    if isinstance(left, Absent) and isinstance(right, Absent):
        return (left.what, left.shape, left.dtype) == (right.what, right.shape, right.dtype)
    if isinstance(left, DTensor) and isinstance(right, DTensor):
        if left.placements != right.placements:
            return False
        left, right = left.to_local(), right.to_local()
    return (
        alike and left.dtype == right.dtype and left.device == right.device
        and (0 in right.stride() or left.stride() == right.stride()) and torch.equal(left, right)
    )  # fmt: skip
