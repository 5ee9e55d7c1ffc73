"""Weights of parts that were cut, split and sharded without memory: each is made by itself."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonari.trainer.models.deferred import Recording
from tonari.trainer.models.staged import StagedModel
from tonari.trainer.private.modules import apply, buffers_of, parameters_of
from tonari.trainer.private.placements import compute_local_shape_and_global_offset


def materialize(part: StagedModel, device: str, *, offload: bool = False) -> None:
    """Give a part its weights, in place: each is made whole, copied in part, and freed.

    The memory that this needs is that of the part, and of what its largest weight is made from.

    Args:
        part: Of a model with a ``recording``; its parameters and buffers on ``meta``.
        device: Of the mesh.
        offload: Whether parameters that are sharded stay in the host's memory.
    """
    assert part.recording is not None, "the caller has asked"
    # A tied weight is made once, and stays one.
    made: dict[int, Tensor] = {}
    for path, module in part.named_modules(remove_duplicate=False):
        for held in (parameters_of(module), buffers_of(module)):
            for name, value in held.items():
                if value is None or not value.is_meta:
                    continue
                if id(value) not in made:
                    where = "cpu" if offload and isinstance(value, nn.Parameter) else device
                    full_name = f"{path}.{name}" if path else name
                    made[id(value)] = _make(value, full_name, part.recording, where)
                held[name] = made[id(value)]
    # Sharded modules look at their parameters anew; what is no parameter moves to the device.
    apply(part, lambda each: each if isinstance(each, DTensor) else each.to(device))


def own_part(value: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Find this rank's part of a tensor, and where in the whole it begins."""
    if not isinstance(value, DTensor):
        return value, (0,) * value.dim()
    _, offsets = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return value.to_local(), tuple(offsets)


def _make(value: Tensor, name: str, recording: Recording, device: str) -> Tensor:
    """Make this rank's part of a parameter or buffer."""
    real = torch.empty_like(value.detach(), device=device)
    mine, offsets = own_part(real)
    if mine.numel():
        there = tuple(slice(a, a + n) for a, n in zip(offsets, mine.shape, strict=True))
        mine.copy_(recording.make(name)[there])
    if not isinstance(value, nn.Parameter):
        return real
    parameter = nn.Parameter(real, value.requires_grad)
    # What libraries note on a parameter.
    parameter.__dict__.update(value.__dict__)
    return parameter
