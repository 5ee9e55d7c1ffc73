"""A tensor-parallel style for layers that torch's own styles do not know: convolutions, norms.

The layer computes on plain tensors; its parameters are DTensors, so that checkpoints reshard.
"""

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tonari.trainer.private.modules import share_parameters


class LocalPart(ParallelStyle):
    """Run a layer on this rank's part of its parameters and of its input.

    Args:
        parameters: How the layer's own parameters are placed over tp.
        comes: How the input arrives.
        takes: How the layer wants it.
        makes: What the layer's output is; a product of split inner dimensions is ``Partial()``.
        gives: How the output leaves.
        gradient: Of the parameters; ``Partial()`` where whole ones work on a part of the input, as
            norms of single heads do where heads are split. Defaults to how they are placed.
    """

    def __init__(
        self,
        parameters: Placement | None = None,
        *,
        comes: Placement | None = None,
        takes: Placement | None = None,
        makes: Placement | None = None,
        gives: Placement | None = None,
        gradient: Placement | None = None,
    ) -> None:
        super().__init__()
        whole = Replicate()
        self.parameters = parameters or whole
        self.comes = comes or whole
        self.takes = takes or self.comes
        self.makes = makes or whole
        self.gives = gives or self.makes
        self.gradient = gradient or self.parameters

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(
                parameter, device_mesh, [self.parameters], src_data_rank=None
            )
            module.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))
        if isinstance(module, nn.GroupNorm) and self.parameters.is_shard():
            module.num_groups //= device_mesh.size()
        # A whole input of split parameters gets a part of its gradient from every rank.
        split = self.parameters.is_shard() and self.takes.is_replicate()
        input_gradient = Partial() if split else self.takes
        # Shares the layer's parameters, which FSDP exchanges in place, but not its hooks.
        layer = nn.Module()
        share_parameters(layer, module)
        layer.forward = module.forward

        def forward(*given: Any, **named: Any) -> Any:
            if given and isinstance(given[0], Tensor):
                values = redistribute(given[0], device_mesh, self.comes, self.takes, input_gradient)
                given = (values, *given[1:])
            weights = {
                name: parameter.to_local(grad_placements=[self.gradient])
                for name, parameter in layer.named_parameters(recurse=False)
                if isinstance(parameter, DTensor)
            }
            made = torch.func.functional_call(layer, weights, given, named)
            return redistribute(made, device_mesh, self.makes, self.gives, self.gives)

        module.forward = forward
        return module


def redistribute(
    values: Tensor, mesh: DeviceMesh, before: Placement, after: Placement, gradient: Placement
) -> Tensor:
    """Change how a plain tensor lies over a mesh; the backward pass is the reverse.

    Args:
        values: This rank's part.
        mesh: Of one dimension.
        before: How it lies.
        after: How it shall lie.
        gradient: How its gradient comes back.
    """
    if before == after == gradient:
        return values
    placed = DTensor.from_local(values, mesh, [before], run_check=False)
    return placed.redistribute(placements=[after]).to_local(grad_placements=[gradient])


def replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep what no style has split whole on each rank of the mesh, in place.

    Its parameters become DTensors as well: norms over all parameters then need one kind only.
    """
    for layer in module.modules():
        own = list(layer.parameters(recurse=False))
        if own and not any(isinstance(parameter, DTensor) for parameter in own):
            parallelize_module(layer, mesh, LocalPart())


def split_convolution() -> LocalPart:
    """Split a convolution by output channels; they stay split."""
    return LocalPart(Shard(0), makes=Shard(1))


def split_norm() -> LocalPart:
    """Split a group norm whose channels are split."""
    return LocalPart(Shard(0), comes=Shard(1), makes=Shard(1))


def joining_convolution() -> LocalPart:
    """Split a convolution by input channels and add up the parts."""
    return LocalPart(Shard(1), comes=Shard(1), makes=Partial(), gives=Replicate())


class Conv1D(ParallelStyle):
    """Split a layer of Hugging Face's GPT-2, whose weight is [inputs, outputs].

    Args:
        by: ``"outputs"``, which stay split, or ``"inputs"``, which come split.
    """

    def __init__(self, by: Literal["outputs", "inputs"]) -> None:
        super().__init__()
        self.by = by

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        by_outputs = self.by == "outputs"
        placed = {
            "weight": Shard(1 if by_outputs else 0),
            "bias": Shard(0) if by_outputs else Replicate(),
        }
        for name, placement in placed.items():
            whole = module.get_parameter(name)
            split = distribute_tensor(whole, device_mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(split, whole.requires_grad))
        every, total = Replicate(), Partial()

        def forward(values: Tensor) -> Tensor:
            weight, bias = (cast(DTensor, module.get_parameter(name)).to_local() for name in placed)
            if by_outputs:
                values = redistribute(values, device_mesh, every, every, total)
                return values @ weight + bias
            return redistribute(values @ weight, device_mesh, total, every, every) + bias

        module.forward = forward
        return module
