"""What a stage of a pipeline takes, sends, and goes back over in two parts, before torch 2.13.

Why: torch 2.11 refuses inputs that lie otherwise in memory than they were described, such as
pictures with one channel; asks for a gradient of all that it receives, whole numbers too; ends a
run where a stage has none to send back, as 2.12 does; and sends to its own rank where that owns two
stages in a row. Torch 2.13 sends zeros where there is no gradient, as is done here for those before
it. Public instead: torch 2.13, where the class adds nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage

__all__ = ["StageOfAnything", "goes_back_twice"]

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class StageOfAnything(PipelineStage):
    """A stage that takes inputs in any layout, and of any type, with or without a gradient."""

    if TORCH < (2, 12):
        inputs_meta: tuple[Tensor, ...]

        def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
            """Leave it out: whoever makes a stage describes what it makes."""

        def _prepare_forward_infra(self, *given: Any, **named: Any) -> Any:
            """Make what is received into, with a gradient where one is described."""
            trains, self.has_backward = self.has_backward, False
            made = super()._prepare_forward_infra(*given, **named)
            self.has_backward = trains
            if not self.is_first:
                infos: Any
                for infos in self.args_recv_info.values():
                    for info, shape in zip(infos, self.inputs_meta, strict=True):
                        info.buffer.requires_grad_(shape.requires_grad)
            return made

        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            """Get to know the neighbours, but for the own rank, to which gloo sends nothing."""
            known: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
            return [its for its in known if its.group_peer != self.group_rank]

        def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
            """Take what the stage before gave, on the same rank."""
            given = prev_stage_outputs
            given = (given,) if isinstance(given, Tensor) else given
            infos = self.args_recv_info[mb_index]
            for info, tensor, shape in zip(infos, given, self.inputs_meta, strict=True):
                info.buffer = tensor.detach().requires_grad_(shape.requires_grad)

    if TORCH < (2, 13):

        def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
            """Send back gradients, zeros where there are none."""
            if self.has_backward and not self.is_first:
                infos = self.args_recv_info[bwd_chunk_id]
                self.bwd_cache[bwd_chunk_id] = _filled(self.bwd_cache[bwd_chunk_id], infos)
                self.grad_send_info = [info.source if _is_sent(info) else None for info in infos]
            return super().get_bwd_send_ops(bwd_chunk_id)

        def get_local_bwd_output(self, mb_index: int) -> Any:
            """Give gradients to the stage before, on the same rank, zeros where there are none."""
            found = super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]
            return _filled(found, self.args_recv_info[mb_index])


def _filled(gradients: Sequence[Tensor | None], infos: Sequence[Any]) -> tuple[Tensor | None, ...]:
    return tuple(
        torch.zeros_like(info.buffer) if its is None and _is_sent(info) else its
        for its, info in zip(gradients, infos, strict=True)
    )


def _is_sent(info: Any) -> bool:
    """Say whether a gradient is sent back: of all in torch 2.11, in 2.12 where one is described."""
    described = getattr(info, "tensor_meta", None)
    return described is None or described.requires_grad


def goes_back_twice(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], users: Mapping[Node, Sequence[Node]],
    joins: set[Node],
) -> bool:  # fmt: skip
    """Say whether torch goes back over a stage in two parts where weights meet its inputs in turn.

    Before 2.13 it takes a gradient of all outputs and for all inputs, and gives the sum of an
    operation's gradients to the first of its values.

    Args:
        outputs, inputs: Of the stage.
        users: The operations that take what each operation gives.
        joins: Where weights meet what comes from the inputs.
    """
    if TORCH >= (2, 13):
        return True
    if not all(each.requires_grad for each in (*outputs, *inputs)):
        return False
    edges = [edge for node in joins for user in users[node] for edge in user.next_functions]
    edges += [get_gradient_edge(each)[:2] for each in outputs]
    return all(get_gradient_edge(each).node in users for each in inputs) and all(
        number == 0 for node, number in edges if node in joins
    )
