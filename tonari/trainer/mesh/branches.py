"""Branches of a block that lie on different ranks and meet again: sub-graph parallelism.

All ranks of a group run the same model on the same rows. What lies before and behind the branches
is computed by each of them; each has its own of the branches.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tonari.trainer.private.trees import tree_leaves

Join = Literal["sum", "concat", "list"]
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what a branch returns."""


class Branches(nn.Module):
    """Branches of a block, each on one rank of a group; forward and backward are those of one.

    Collective: all ranks of the group make it of the same branches, give it the same inputs, and
    train the same rows with what it returns. Each of them has then the whole gradient of what lies
    outside, and of its own branches. Nothing is averaged over this group.

    The state dict has the names of ``nn.ModuleList(branches)``, those of this rank's branches
    alone. A whole state dict loads: what belongs to other ranks' branches is passed over.

    In training each branch draws, such as for dropout, from a generator that is seeded by torch's.
    So what follows draws the same on all ranks, and one process draws what several do.

    Args:
        branches: Each takes all inputs, one tensor at least, and returns a floating one, whose
            shape and dtype follow from those of the inputs. Those of other ranks are let go of.
        join: ``"sum"``, or ``"concat"`` along ``dim``, or all outputs as a ``"list"``.
        dim: Of the outputs.
        group: The ranks; None: all. Without a process group all branches lie here.
        costs: Of each branch, >= 0, such as measured seconds; None: its number of parameters. The
            dearest goes first, and each to the rank that has least. A rank may have none.

    Raises:
        ValueError: If there is no branch, costs are not as many, or join is none of these; or if
            a branch has `Branches` of the same ranks in it.
    """

    def __init__(
        self,
        branches: Sequence[nn.Module],
        *,
        join: Join = "sum",
        dim: int = 1,
        group: dist.ProcessGroup | None = None,
        costs: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if costs is None:
            costs = [sum(each.numel() for each in branch.parameters()) for branch in branches]
        if not branches or len(costs) != len(branches) or join not in get_args(Join):
            raise ValueError(
                f"Branches: found {len(branches)} branches, {len(costs)} costs and join={join!r}, "
                f"expected one branch or more, as many costs, and one of {get_args(Join)}"
            )
        self.join, self.dim = join, dim
        self.group = (group or dist.group.WORLD) if dist.is_initialized() else None
        for inner in (each for branch in branches for each in branch.modules()):
            if isinstance(inner, Branches) and len(_ranks(self.group) & _ranks(inner.group)) > 1:
                raise ValueError(
                    "Branches: a branch has Branches of the same ranks in it, expected none, as "
                    "one rank alone computes it; put all side by side, or give the inner ones a "
                    "group with no other rank of this one"
                )
        self.ranks = deal(costs, dist.get_world_size(group) if self.group else 1)
        here = dist.get_rank(group) if self.group else 0
        for number, branch in enumerate(branches):
            if self.ranks[number] == here:
                self.add_module(str(number), branch)
        self._forms: dict[object, list[Form]] = {}
        self.register_load_state_dict_pre_hook(_pass_over_others)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any) -> Any:
        """Compute this rank's branches, and join all. Collective; so is the backward pass.

        Args:
            inputs: For each branch. Gradients of tensors are added up over the ranks; tensors in
                lists and dicts, such as raw data, must need none.

        Returns:
            What one process returns: the same on all ranks.

        Raises:
            ValueError: If outputs are no floating tensors, or differ in shape or dtype where they
                are added up; or if no input is a tensor, or one in a list needs a gradient.
        """
        if self.group is None:
            return self._joined([*self._outputs(inputs).values()])
        tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if not tensors or sum(map(_needs_grad, tensors)) > sum(map(_needs_grad, inputs)):
            raise ValueError(
                f"Branches: inputs are {[type(x).__name__ for x in inputs]}, expected a tensor at "
                "least, and none in lists and dicts that needs a gradient, which would be that of "
                "this rank's branches alone; give it as an input of its own"
            )
        shared = [_SharedInput.apply(self.group, x) if _needs_grad(x) else x for x in inputs]  # type: ignore[no-untyped-call]
        outputs = self._outputs(shared)
        meeting = _BranchMeeting(
            self.group, self.ranks, self._agreed(tensors, outputs), [*outputs], tensors[0].device
        )
        # Inputs go along: the backward pass must come to them also where no branch lies
        values = [*outputs.values(), *filter(_needs_grad, shared)]
        # A rank without weights here goes back as the others do
        values.append(torch.zeros((), requires_grad=torch.is_grad_enabled()))
        if self.join == "sum":
            return _SumOfAll.apply(meeting, *values)  # type: ignore[no-untyped-call]
        return self._joined([*_OutputsOfAll.apply(meeting, *values)])  # type: ignore[no-untyped-call]

    def _outputs(self, inputs: Sequence[Any]) -> dict[int, Tensor]:
        devices = [x.device for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.is_cuda]
        seed = int(torch.randint(1 << 62, ())) if self.training else 0
        outputs = {}
        for name, branch in self.named_children():
            with torch.random.fork_rng(devices[:1], enabled=self.training):
                if self.training:
                    torch.manual_seed(seed + int(name))
                outputs[int(name)] = branch(*inputs)
        return outputs

    def _joined(self, outputs: list[Tensor]) -> Any:
        if self.join == "concat":
            return torch.cat(outputs, self.dim)
        return reduce(torch.add, outputs) if self.join == "sum" else outputs

    def _agreed(self, tensors: Sequence[Tensor], outputs: Mapping[int, Tensor]) -> list[Form]:
        """Say what all branches return: asked of the other ranks once for each form of inputs."""
        asked = tuple((x.shape, x.dtype) for x in tensors), torch.is_autocast_enabled()
        if asked not in self._forms:
            mine = {
                number: (tuple(x.shape), x.dtype)
                if _is_floating(x)
                else str(getattr(x, "dtype", type(x).__name__))
                for number, x in outputs.items()
            }
            every: list[dict[int, Any]] = [{}] * dist.get_world_size(self.group)
            dist.all_gather_object(every, mine, self.group)
            found = {number: form for part in every for number, form in part.items()}
            if wrong := {number: form for number, form in found.items() if isinstance(form, str)}:
                raise ValueError(
                    f"Branches: the branches {[*wrong]} return {[*wrong.values()]}, expected one "
                    "tensor of floating numbers each; split others into several blocks"
                )
            forms = [found[number] for number in range(len(self.ranks))]
            if self.join == "sum" and len({*forms}) > 1:
                raise ValueError(
                    f"Branches: outputs are {forms}, expected one shape and dtype to be added up; "
                    'bring them to one, or give join="concat"'
                )
            self._forms[asked] = forms
        return self._forms[asked]


def deal(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Deal branches to ranks: the dearest first, each to the first of those that have least.

    Returns:
        The rank of each branch.
    """
    total, ranks = [0.0] * num_ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda each: -costs[each]):
        ranks[number] = total.index(min(total))
        # A branch without parameters is one, too
        total[ranks[number]] += max(costs[number], 1e-9)
    return ranks


def gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather the rows of all replicas, such as embeddings for a contrastive loss. Collective.

    The backward pass adds up the gradients that the replicas have of these rows. So each of them
    may take the mean loss of its own rows among all, and average its weights' gradients over the
    replicas, as DDP does: these are then the gradients of the mean over all rows.

    Args:
        rows: floating[num_rows, ...]: As many on each rank.
        group: The replicas; None: all ranks.

    Returns:
        floating[num_ranks * num_rows, ...]: In the order of the ranks.
    """
    return _RowsOfAll.apply(group or dist.group.WORLD, rows)  # type: ignore[no-untyped-call, no-any-return]


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Do what ``nn.utils.clip_grad_norm_`` does, for a model with `Branches`. Collective.

    That function sees only the gradients on its own rank, so that ranks would scale differently.

    Args:
        model: Its `Branches` lie on the same group, and not in one another.
        max_norm: Of all gradients, those of other ranks' branches included.

    Returns:
        float64[]: The norm before, the same on all ranks.
    """
    blocks = [module for module in model.modules() if isinstance(module, Branches)]
    own = {parameter for block in blocks for parameter in block.parameters()}
    with_grad = [each for each in model.parameters() if each.grad is not None]
    parts = [
        [p.grad for p in with_grad if p.grad is not None and (p in own) == its]
        for its in (True, False)
    ]
    # Of no gradient at all it has a dtype of its own
    squares = [nn.utils.get_total_norm(part).double().square() for part in parts]
    of_branches = squares[0].to(squares[1].device)
    if blocks and blocks[0].group is not None:
        dist.all_reduce(of_branches, group=blocks[0].group)
    norm = (of_branches + squares[1]).sqrt()
    nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    return norm


class _BranchMeeting(NamedTuple):
    """Who has which branch, and what each returns."""

    group: dist.ProcessGroup
    ranks: Sequence[int]
    forms: Sequence[Form]
    mine: Sequence[int]
    device: torch.device


class _SharedInput(torch.autograd.Function):
    """The same on all ranks; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, value: Tensor) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _summed(grad, ctx.group)


class _SumOfAll(torch.autograd.Function):
    """Outputs of all branches -> their sum."""

    @staticmethod
    def forward(ctx: Any, meeting: _BranchMeeting, *values: Tensor) -> Tensor:
        ctx.num_mine, ctx.num_others = len(meeting.mine), len(values) - len(meeting.mine)
        shape, dtype = meeting.forms[0]
        start = torch.zeros(shape, dtype=dtype, device=meeting.device)
        total = reduce(torch.add, values[: ctx.num_mine], start)
        dist.all_reduce(total, group=meeting.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[grad] * ctx.num_mine, *[None] * ctx.num_others


class _OutputsOfAll(torch.autograd.Function):
    """Outputs of this rank's branches -> those of all, each sent by the rank that has it."""

    @staticmethod
    def forward(ctx: Any, meeting: _BranchMeeting, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.mine, ctx.num_others = meeting.mine, len(values) - len(meeting.mine)
        ctx.set_materialize_grads(False)  # of what is not used there is none
        outputs, sent = dict(zip(meeting.mine, values, strict=False)), []
        for number, (shape, dtype) in enumerate(meeting.forms):
            own = outputs.get(number)
            outputs[number] = (
                torch.empty(shape, dtype=dtype, device=meeting.device)
                if own is None
                else own.clone(memory_format=torch.contiguous_format)
            )
            source = dist.get_global_rank(meeting.group, meeting.ranks[number])
            sent.append(dist.broadcast(outputs[number], source, meeting.group, async_op=True))
        for each in sent:
            assert each is not None
            each.wait()
        return tuple(outputs[number] for number in range(len(meeting.forms)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[grads[number] for number in ctx.mine], *[None] * ctx.num_others


class _RowsOfAll(torch.autograd.Function):
    """Rows of this rank -> those of all; their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, rows: Tensor) -> Tensor:
        ctx.group, ctx.num_rows = group, len(rows)
        every = [
            torch.empty_like(rows, memory_format=torch.contiguous_format)
            for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(every, rows.contiguous(), group)
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        here = dist.get_rank(ctx.group) * ctx.num_rows
        return None, _summed(grad, ctx.group)[here : here + ctx.num_rows]


def _summed(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = grad.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _ranks(group: dist.ProcessGroup | None) -> set[int]:
    return set() if group is None else {*dist.get_process_group_ranks(group)}


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _needs_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _pass_over_others(
    module: Branches, state_dict: dict[str, Any], prefix: str, *others: object
) -> None:
    """Take out what lies in branches of other ranks: torch would find it unexpected."""
    lacks = {str(number) for number in range(len(module.ranks))} - {
        name for name, _ in module.named_children()
    }
    for name in [*state_dict]:
        if name.startswith(prefix) and name[len(prefix) :].split(".")[0] in lacks:
            del state_dict[name]
