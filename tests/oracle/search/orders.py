"""Idle time of a pipeline: torch's own lists of operations, simulated as `tonari plan` does it."""

from collections import defaultdict
from types import SimpleNamespace

from torch.distributed.pipelining.schedules import _ComputationType, get_schedule_class

from tests.oracle.test_simulate import Bench
from tonari.oracle.record import Message, Wait
from tonari.oracle.simulate import simulate
from tonari.oracle.stopwatch import Timed
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
    """Simulate a step, and subtract what a rank computes; arguments as of `bubble_s`.

    The schedule must be one of several stages a rank.
    """
    stages = num_stages(pp, schedule, virtual)
    of_ranks = orders(schedule, pp=pp, virtual=virtual, microbatches=microbatches)
    rank_of = {
        stage: rank for rank in range(pp) for stage in stages_of(rank, pp, schedule, virtual)
    }
    # What a rank receives from another one, in the order in which that sends it
    sent: defaultdict[tuple[int, int], list[Pass]] = defaultdict(list)
    for rank, order in enumerate(of_ranks):
        for one, *_ in order:
            target = rank_of.get(_next_stage(one), rank)
            if target != rank:
                sent[rank, target].append(one)
    programs = []
    for rank, order in enumerate(of_ranks):
        received = [(pair, one) for pair, ones in sent.items() if pair[1] == rank for one in ones]
        number_of = {one: number for number, (_, one) in enumerate(received)}
        events: list[Message | Wait] = [
            Message("receive", pair, 0, pair[0]) for pair, _ in received
        ]
        laps_s = [0.0] * (len(events) + 1)
        for one, of_forward, of_backward in order:
            if (need := _need(one)) in number_of:
                events.append(Wait(number_of[need]))
                laps_s.append(0.0)
            laps_s[-1] += (of_forward * forward_s + of_backward * backward_s) * pp / stages
            target = rank_of.get(_next_stage(one), rank)
            if target != rank:
                events.append(Message("send", (rank, target), 0, target))
                laps_s.append(0.0)
        programs.append(Timed(rank=rank, events=tuple(events), laps_s=(tuple(laps_s),), step_s=()))
    simulation = simulate(programs, Bench(message_s=0.0), steps=1)
    return simulation.step_ends_s[0] - microbatches * (forward_s + backward_s)


def _next_stage(one: Pass) -> int:
    """Find the stage that waits for a pass, if there is one."""
    kind, stage, _ = one
    if kind == "weights":
        return -1
    return stage + 1 if kind == "forward" else stage - 1


def _need(one: Pass) -> Pass | None:
    """Find the pass over another stage that a pass waits for."""
    kind, stage, microbatch = one
    if kind == "forward":
        return kind, stage - 1, microbatch
    if kind == "backward":
        return kind, stage + 1, microbatch
    return None


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
