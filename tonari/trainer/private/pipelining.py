"""What a stage of a pipeline sends and is checked for, before torch 2.13.

Why: torch 2.11 and 2.12 refuse inputs that lie otherwise in memory than they were described, such
as pictures with one channel; ask for a gradient of all that they receive, whole numbers too; and
end a run where a stage has none to send back. Torch 2.13 sends zeros there, as is done here for
those before it. Where a rank owns two stages in a row, they send to their own rank as they begin.
Public instead: torch 2.13, where this class adds no more than the first.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

__all__ = ["StageOfAnything"]

BEFORE_2_13 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


class StageOfAnything(PipelineStage):
    """A stage that takes inputs in any layout, and of any type, with or without a gradient."""

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Leave it out: whoever makes a stage describes what it makes."""

    if BEFORE_2_13:

        def _prepare_forward_infra(self, *given: Any, **named: Any) -> Any:
            """Make what is received into: torch asks for gradients where it is told to train."""
            trains, self.has_backward = self.has_backward, False
            try:
                return super()._prepare_forward_infra(*given, **named)  # type: ignore[no-untyped-call]
            finally:
                self.has_backward = trains
                for infos in self.args_recv_info.values() if trains and not self.is_first else ():
                    for info, shape in zip(infos, self.inputs_meta, strict=True):
                        info.buffer.requires_grad_(shape.requires_grad)

        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            """Get to know the neighbours, but for the own rank, to which gloo sends nothing."""
            known: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # type: ignore[no-untyped-call]
            return [its for its in known if its.group_peer != self.group_rank]

        def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
            """Take what the stage before gave, on the same rank."""
            given = prev_stage_outputs
            given = (given,) if isinstance(given, Tensor) else given
            infos = self.args_recv_info[mb_index]
            for info, tensor, shape in zip(infos, given, self.inputs_meta, strict=True):
                info.buffer = tensor.detach().requires_grad_(shape.requires_grad)

        def backward_maybe_with_nosync(
            self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
        ) -> Any:
            """Go back; of the input alone torch lists no gradient where there is none."""
            gradients, more = super().backward_maybe_with_nosync(  # type: ignore[no-untyped-call]
                backward_type, bwd_kwargs, last_backward
            )
            if backward_type == "input":
                inputs, found = bwd_kwargs["input_values"], iter(gradients)
                if len(gradients) < len(inputs):
                    gradients = tuple(next(found) if its.requires_grad else None for its in inputs)
            return gradients, more

        def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
            """Send back gradients, zeros where there are none."""
            if self.has_backward and not self.is_first:
                found = self.bwd_cache[bwd_chunk_id]
                self.bwd_cache[bwd_chunk_id] = self._filled(found, bwd_chunk_id)
            return super().get_bwd_send_ops(bwd_chunk_id)  # type: ignore[no-untyped-call]

        def get_local_bwd_output(self, mb_index: int) -> Any:
            """Give gradients to the stage before, on the same rank, zeros where there are none."""
            return self._filled(super().get_local_bwd_output(mb_index), mb_index)  # type: ignore[no-untyped-call]

        def _filled(self, gradients: Sequence[Tensor | None], chunk: int) -> tuple[Tensor, ...]:
            infos = self.args_recv_info[chunk]
            return tuple(
                torch.zeros_like(info.buffer) if its is None else its
                for its, info in zip(gradients, infos, strict=True)
            )
