"""An average of the weights over the steps of a run, which is evaluated and kept in checkpoints.

Each rank averages the parts of parameters and buffers that it holds: nothing is sent.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tonari.trainer.mesh.parallelize import average_buffers
from tonari.trainer.private import foreach
from tonari.trainer.private.modules import buffers_of


class WeightAverage:
    """The exponential moving average of parameters and floating buffers.

    A step keeps ``min(decay, (1 + steps) / (10 + steps))`` of it, so that it forgets where the run
    began. It equals the average of one process on every mesh on which the weights do.

    Args:
        parts: The stages that this rank owns, spread; their weights are where it begins.
        decay: In [0, 1).

    Attributes:
        state: The average by the name of the parameter or buffer in ``ModuleList(parts)``, spread
            as that is.
        held: The same as a module's own parameters and buffers.
        decay: As given.

    Source: the warm-up, TensorFlow's ``ExponentialMovingAverage``.
    """

    def __init__(self, parts: Sequence[nn.Module], *, decay: float) -> None:
        self._parts, self.decay = list(parts), decay
        whole = nn.ModuleList(parts)
        # Kept, as the optimizer keeps them: FSDP shows gathered ones in their place at times.
        self._parameters: dict[str, Tensor] = dict(whole.named_parameters())
        buffers = [name for name, its in whole.named_buffers() if its.is_floating_point()]
        # By their places: a module may put another tensor there in a forward pass.
        self._places = [
            (buffers_of(whole.get_submodule(path)), name)
            for path, _, name in (each.rpartition(".") for each in buffers)
        ]
        with torch.no_grad():
            values = zip([*self._parameters, *buffers], self._own(), strict=True)
            self.state = {name: value.detach().clone() for name, value in values}
        parameters = (self.state[name] for name in self._parameters)
        self.held = nn.ParameterList(nn.Parameter(p, requires_grad=False) for p in parameters)
        for number, name in enumerate(buffers):
            self.held.register_buffer(f"buffer {number}", self.state[name])

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take in the weights after a step.

        Args:
            steps: Of the run that are done, this one included.
        """
        kept = min(self.decay, (1 + steps) / (10 + steps))
        pairs = [*zip(_local(self.state.values()), _local(self._own()), strict=True)]
        averaged = [each for each in pairs if each[0].is_floating_point() or each[0].is_complex()]
        if averaged:
            means, values = (list(each) for each in zip(*averaged, strict=True))
            foreach.lerp_(means, values, 1 - kept)
        for mean, value in pairs:
            if not (mean.is_floating_point() or mean.is_complex()):
                mean.copy_(value)  # whole numbers, as of a base that is quantised, have no mean

    def average_buffers(self, mesh: DeviceMesh) -> None:
        """Give every replica the mean of all replicas' averaged batch statistics. Collective."""
        average_buffers(self.held, mesh)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in the place of the weights, and put these back at the end."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _own(self) -> list[Tensor]:
        """List the parameters and floating buffers as they are now."""
        buffers = [held[name] for held, name in self._places]
        return [*self._parameters.values(), *(its for its in buffers if its is not None)]

    @torch.no_grad()
    def _swap(self) -> None:
        pairs = zip(_local(self.state.values()), _local(self._own()), strict=True)
        seen: set[int] = set()
        for mean, value in pairs:
            if value.numel() and value.data_ptr() in seen:
                continue  # two weights in the same memory change places once
            seen.add(value.data_ptr())
            kept = value.clone()
            value.copy_(mean)
            mean.copy_(kept)
        for part in self._parts:
            for module in part.modules():
                # What was gathered for the last pass is of the other weights.
                if isinstance(module, FSDPModule):
                    module.reshard()


def _local(values: Iterable[Tensor]) -> list[Tensor]:
    return [v.to_local() if isinstance(v, DTensor) else v for v in values]
