"""A stage of a pipeline, as torch's schedules pass microbatches through it."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.randomness import Randomness
from tonari.trainer.mesh.writable import writable
from tonari.trainer.models.given import Inputs
from tonari.trainer.models.trace import leaves
from tonari.trainer.private.messages import all_gather
from tonari.trainer.private.pipelining import StageOfAnything, goes_back_twice

MOST_APART = 0.05
"""Of the largest value: more than rounding in bfloat16 makes of what is the same."""


class Stage(StageOfAnything):
    """A stage that averages its gradients over the replicas only when ``syncs``.

    Args:
        given, named: As torch's own takes them; ``input_args`` and ``output_args`` as the module
            takes and gives them.
        randomness: Of the replica.
        same: Ranks that hold the same values between stages, as those of tp do. Each sends its part
            of them, and those who receive put the parts together again, forward and back: among
            neighbours, where a pipeline's message leaves the node. None: there are none.

    Source: scatter and gather around a pipeline's messages, Narayanan et al., Efficient large-scale
    language model training on GPU clusters using Megatron-LM, SC 2021, section 4.1.
    """

    syncs = True

    def __init__(
        self, *given: Any, randomness: Randomness, same: dist.ProcessGroup | None = None,
        **named: Any,
    ) -> None:  # fmt: skip
        self._same, self._whole = same, leaves(named["input_args"])
        self._checked = False
        _, stage, num_stages, *_ = given
        self._gives = leaves(named["output_args"])
        if same is not None and stage > 0:
            named["input_args"] = _parts(named["input_args"], same)
        if same is not None and stage < num_stages - 1:
            named["output_args"] = _parts(named["output_args"], same)
        super().__init__(*given, **named)
        self._randomness = randomness

    def forward_one_chunk(self, fwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        """Pass a microbatch forward."""
        self._randomness.begin(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *given, **named)

    def forward_maybe_with_nosync(self, *given: Tensor, **named: Any) -> Any:
        """Call the module with whole values, and keep this rank's part of what it gives."""
        same = self._same
        if same is not None and not self.is_first:
            given = tuple(
                _join_all(part, whole.shape, same) if _divides(whole, same) else part
                for part, whole in zip(given, self._whole, strict=True)
            )
        if not self.is_first:
            given = tuple(map(writable, given))
        result = super().forward_maybe_with_nosync(*given, **named)  # type: ignore[no-untyped-call]
        if self.is_last:
            return _with_gradient(result) if torch.is_grad_enabled() else result
        values = leaves(result)
        if torch.is_grad_enabled() and self.has_backward:
            values = tuple(
                # Where it is described without, nothing before it is trained.
                _with_gradient(value) if shape.requires_grad else value.detach()
                for value, shape in zip(values, self._gives, strict=True)
            )
        if same is None:
            return values if isinstance(result, tuple) else values[0]
        if not self._checked:
            self._checked = True
            check_same(values, same, self.stage_index)
        return tuple(_cut_own(value, same) if _divides(value, same) else value for value in values)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Go back over a microbatch for the input, the weights, or both.

        Where a weight's gradient would be wrong in two parts, the first does both.
        """
        if backward_type == "input":
            given, inputs = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
            if not can_go_back_twice(given, inputs, self.submod.parameters()):
                # torch asks for a loss by itself here.
                whole = bwd_kwargs | ({"stage_output": given[0]} if self.is_last else {})
                gradients, _ = super().backward_maybe_with_nosync("full", whole, last_backward)
                return gradients, []
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do so where a schedule ends: of a step's batches, at the last only; never in `eval`."""
        if self.syncs:
            super().perform_reduce_grad(grad_scale_factor)

    # torch 2.13 asks for them in `eval` too, where a rank owns two stages in a row, and fails.
    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """Hand the input's gradient to the stage before, on the same rank."""
        if not self.has_backward:
            return ()
        return cast(tuple[Tensor | None, ...], super().get_local_bwd_output(mb_index))

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the output's gradient from the stage after, on the same rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def can_go_back_twice(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Iterable[Tensor]
) -> bool:
    """Say whether torch can go back over a stage in two parts: for its inputs, then its weights.

    It can where each weight joins what comes from the inputs at one operation. Where there are
    two, it goes over what lies between them after that was freed, or counts a weight twice; a way
    from a weight to the outputs that joins nothing is left out.
    """
    ends = {_node(each) for each in outputs if each.requires_grad}
    users = _users(ends)
    carried = _reached((_node(each) for each in inputs if each.requires_grad), users)

    joins: set[Node] = set()

    def meets_once(weight: Node) -> bool:
        reached = _reached([weight], users, before=carried)
        met = {user for node in reached for user in users[node] if user in carried}
        joins.update(met)
        return not reached or (len(met) == 1 and not reached & ends)

    return all(
        meets_once(_node(weight)) for weight in weights if weight.requires_grad
    ) and goes_back_twice(outputs, inputs, users, joins)


def _node(value: Tensor) -> Node:
    return get_gradient_edge(value).node


def _users(ends: Iterable[Node]) -> dict[Node, list[Node]]:
    """List the operations that take what each operation gives, from the last ones on."""
    users: dict[Node, list[Node]] = {node: [] for node in ends}
    ahead = list(users)
    while ahead:
        user = ahead.pop()
        for node, _ in user.next_functions:
            if node is not None:
                if node not in users:
                    users[node] = []
                    ahead.append(node)
                users[node].append(user)
    return users


def _reached(
    nodes: Iterable[Node], users: dict[Node, list[Node]], *, before: Collection[Node] = ()
) -> set[Node]:
    """Find the operations that nodes go into, themselves included, up to some others."""
    reached = {node for node in nodes if node in users}
    ahead = list(reached)
    while ahead:
        for user in users[ahead.pop()]:
            if user not in reached and user not in before:
                reached.add(user)
                ahead.append(user)
    return reached


def _with_gradient(value: Tensor) -> Tensor:
    """Give the backward pass where to begin, though nothing before is trained."""
    return value if value.requires_grad else value.detach().requires_grad_()


class _Cut(torch.autograd.Function):
    """This rank's part of a value that all ranks of a group hold, flat."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.shape, ctx.group = value.shape, group
        return _cut(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _join(gradient, ctx.shape, ctx.group), None


class _Join(torch.autograd.Function):
    """The value of which each rank of a group holds a part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _join(part, shape, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _cut(gradient, ctx.group), None, None


_cut_own, _join_all = cast(Any, _Cut).apply, cast(Any, _Join).apply


def _cut(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = value.reshape(group.size(), -1)
    # A copy: what is sent does not keep the whole of it.
    return parts[group.rank()].clone()


def _join(part: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    whole = part.new_empty(shape)
    all_gather(whole.view(-1), part.contiguous(), group=group)
    return whole


@torch.no_grad()
def check_same(values: Iterable[Tensor], group: dist.ProcessGroup, stage: int) -> None:
    """Refuse values that differ among the ranks, whose parts would make something else."""
    for value in filter(Tensor.is_floating_point, values):
        if _divides(value, group):
            others = _join(_cut(value, group), value.shape, group)
            # Their last bits may differ, where a device adds up in any order.
            apart = (others - value).abs().max() / value.abs().max().clamp_min(1e-30)
            if not bool((apart <= MOST_APART) | apart.isnan()):
                raise ConfigError(
                    f"mesh.tp: ranks of tp hold different values behind stage {stage} of the "
                    f"pipeline ({float(apart):.2g} of the largest apart), where each sends a part "
                    "of what all of them hold; end each block with a style that makes its output "
                    "whole (Replicate), or give mesh.pp=1"
                )


def _divides(value: Tensor, group: dist.ProcessGroup) -> bool:
    return value.numel() > 0 and value.numel() % group.size() == 0


def _parts(whole: Inputs, group: dist.ProcessGroup) -> Inputs:
    """Describe a rank's parts of values, as meta tensors."""
    return tuple(
        each.new_empty(each.numel() // group.size(), requires_grad=each.requires_grad)
        if _divides(each, group)
        else each
        for each in leaves(whole)
    )
