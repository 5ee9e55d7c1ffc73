"""Idle time of a pipeline by torch's own lists of operations, in which each pass takes its time."""

from types import SimpleNamespace

from torch.distributed.pipelining.schedules import _ComputationType, get_schedule_class

from tonari.trainer.mesh.pipeline import TORCH_NAMES
from tonari.trainer.mesh.place import Schedule, num_stages, stages_of

KINDS = {
    _ComputationType.FORWARD: ("forward", 1.0, 0.0),
    _ComputationType.FULL_BACKWARD: ("backward", 0.0, 1.0),
    _ComputationType.BACKWARD_INPUT: ("backward", 0.0, 0.5),
    _ComputationType.BACKWARD_WEIGHT: ("weights", 0.0, 0.5),
}
"""What is passed over, and its shares of a stage's forward and backward time."""
Pass = tuple[str, int, int]
"""Its kind, stage and microbatch."""


def idle_s(
    schedule: Schedule, *, pp: int, virtual: int, microbatches: int, forward_s: float,
    backward_s: float,
) -> float:  # fmt: skip
    """Find when the last rank is done, less what a rank computes; arguments as of `bubble_s`.

    The schedule must be one of several stages a rank.
    """
    stages = num_stages(pp, schedule, virtual)
    each = stages // pp
    of_ranks = orders(schedule, pp=pp, virtual=virtual, microbatches=microbatches)
    ends_s: dict[Pass, float] = {}
    now_s, at = [0.0] * pp, [0] * pp
    while any(len(order) > at[rank] for rank, order in enumerate(of_ranks)):
        before = sum(at)
        for rank, order in enumerate(of_ranks):
            while at[rank] < len(order):
                one, of_forward, of_backward = order[at[rank]]
                needs = _needs(one, stages)
                if any(need not in ends_s for need in needs):
                    break
                begins_s = max([now_s[rank], *(ends_s[need] for need in needs)])
                took_s = (of_forward * forward_s + of_backward * backward_s) / each
                ends_s[one] = now_s[rank] = begins_s + took_s
                at[rank] += 1
        assert sum(at) > before, "the order can be carried out"
    return max(now_s) - microbatches * (forward_s + backward_s)


def _needs(one: Pass, stages: int) -> list[Pass]:
    kind, stage, microbatch = one
    if kind == "forward":
        return [(kind, stage - 1, microbatch)] if stage else []
    if kind == "weights" or stage == stages - 1:
        return [("forward", stage, microbatch)]
    return [(kind, stage + 1, microbatch)]


def orders(
    schedule: Schedule, *, pp: int, virtual: int, microbatches: int
) -> list[list[tuple[Pass, float, float]]]:
    """List what each rank passes over, one after another, and its shares; see `KINDS`."""
    stages = num_stages(pp, schedule, virtual)
    ranks = {stage: rank for rank in range(pp) for stage in stages_of(rank, pp, schedule, virtual)}
    own = [
        SimpleNamespace(
            group_size=pp, group_rank=0, stage_index=stage, num_stages=stages, has_backward=True,
            stage_index_to_group_rank=ranks, is_first=not stage, is_last=stage == stages - 1,
            group=None, device=None, submod=None,
        )
        for stage in stages_of(0, pp, schedule, virtual)
    ]  # fmt: skip
    made = get_schedule_class(TORCH_NAMES[schedule])(own, microbatches, loss_fn=lambda *_: None)
    made_orders = made.pipeline_order
    found: list[list[tuple[Pass, float, float]]] = []
    for rank in range(pp):
        found.append([])
        for entry in filter(None, made_orders[rank]):
            for action in entry.sub_actions or [entry]:
                kind, of_forward, of_backward = KINDS[action.computation_type]
                one = kind, action.stage_index, action.microbatch_index
                found[-1].append((one, of_forward, of_backward))
    return found
