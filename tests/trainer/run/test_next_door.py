"""Pieces of weights have copies on other ranks that take the same steps, and are cut anew."""

import queue
import threading
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dataio.base.errors import WorldError
from dataio.job.live import LiveJob
from dataio.world import World
from dataio.world.threads import run_threads, thread_worlds
from tests.trainer.digits import write_config
from tonari.trainer.checkpoint.directory import Progress
from tonari.trainer.config.config import Config, load_config
from tonari.trainer.deliver.deliver import ReplicaLoader
from tonari.trainer.errors import ConfigError
from tonari.trainer.run import next_door
from tonari.trainer.run.ema import WeightAverage
from tonari.trainer.run.live import Live
from tonari.trainer.run.next_door import PieceCopies, find_holders
from tonari.trainer.run.whole_steps import ELEMENTWISE

SHAPES = ((7, 3), (2,), (1, 2), (8, 1))
"""Of the weights: some have fewer rows than there are ranks."""
SIZES = (1, 1, 4, 1, 1)


class Messages:
    """Between threads, as `torch.distributed` sends them between processes."""

    def __init__(self) -> None:
        self.here = threading.local()
        self._sent: defaultdict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)

    def isend(self, sent: Tensor, rank: int) -> Any:
        self._sent[self.here.rank, rank].put(sent.clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, into: Tensor, rank: int) -> None:
        into.copy_(self._sent[rank, self.here.rank].get(timeout=20))

    def irecv(self, into: Tensor, rank: int) -> Any:
        return SimpleNamespace(wait=lambda: self.recv(into, rank))


def cut(whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    parts = whole.chunk(num_ranks)
    return parts[rank].clone() if rank < len(parts) else whole[:0].clone()


def make(kind: Any, weights: list[Tensor]) -> tuple[nn.ParameterList, Any, WeightAverage]:
    module = nn.ParameterList(map(nn.Parameter, weights))
    module[3].requires_grad_(False)
    optimizer = kind([{"params": [*module][:2]}, {"params": [*module][2:], "lr": 0.3}])
    return module, optimizer, WeightAverage([module], decay=0.9)


def values(module: Any, optimizer: torch.optim.Optimizer, average: Any) -> list[Tensor]:
    states = [optimizer.state.get(each, {}) for each in module]
    remembered = [state[name] for state in states for name in sorted(state)]
    cut = [each for each in remembered if isinstance(each, Tensor) and each.dim()]
    return [each.detach() for each in (*module, *average.held.parameters(), *cut)]


def train(
    world: World, made: Any, copies: PieceCopies | None, grads: list[list[Tensor]], *, done: int
) -> None:
    """Take steps with gradients, of which each rank has its piece."""
    module, optimizer, average = made
    for steps, whole in enumerate(grads, done + 1):
        norm = nn.utils.get_total_norm(whole)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5  # as schedules do
        for weight, grad in zip(module, whole, strict=True):
            if weight.requires_grad:
                weight.grad = cut(grad, world.rank, world.world_size)
        if copies is not None:
            copies.share_gradients()
        nn.utils.clip_grads_with_norm_(module, 0.5, norm)
        optimizer.step()
        average.update(steps)
        if copies is not None:
            copies.step(norm, clip=0.5, steps=steps)


def make_copies(world: World, numbers: tuple[int, ...], made: Any) -> PieceCopies:
    module, optimizer, average = made
    job = cast(LiveJob, SimpleNamespace(world=world, ranks=numbers))
    copies = PieceCopies(job, [module], optimizer, average)
    copies._own.num_rows = [shape[0] for shape in SHAPES]  # as of a DTensor
    return copies


@pytest.fixture
def config(tmp_path) -> Config:
    return load_config(write_config(tmp_path, num_samples=4), ("run.live=true",))


@given(st.data())
def test_what_is_left_of_pieces_and_copies_takes_the_steps_of_one_process(config, data):
    nodes = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=4), label="ranks of nodes")
    kind = data.draw(st.sampled_from(sorted(ELEMENTWISE, key=lambda each: each.__name__)))
    num_new = data.draw(st.integers(0, 2), label="newcomers")
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
    weights, *grads = (
        [torch.randn(shape, generator=draw) for shape in SHAPES] for _ in range(5)
    )  # fmt: skip
    messages = Messages()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(next_door, "dist", messages)
        worlds = thread_worlds(nodes)
        numbers = tuple(range(len(worlds)))

        def begin(world: World) -> tuple[Any, PieceCopies]:
            messages.here.rank = world.rank
            made = make(kind, [cut(each, world.rank, len(worlds)) for each in weights])
            copies = make_copies(world, numbers, made)
            copies.begin(None, [])
            copies.share_gradients()  # of a step in which a draw left out all weights
            train(world, made, copies, grads[:2], done=0)
            return made, copies

        had = run_threads(worlds, begin)
        for _, copies in had if len(worlds) > 1 else []:
            assert copies._twin is not None
            owner, twin = had[copies.copied][0], copies._twin
            pairs = zip(
                values(*owner), values(twin.weights, twin.optimizer, twin.average), strict=True
            )
            assert all(map(torch.equal, *zip(*pairs, strict=True))), "bit for bit"
        lost = data.draw(st.sets(st.sampled_from(numbers), max_size=len(numbers) - 1), label="lost")
        left = tuple(number for number in numbers if number not in lost)
        # No rank knows which of those that come is a newcomer.
        after = (*left, *range(len(numbers), len(numbers) + num_new))
        ends = not had[0][1].can_spare(left)

        def go_on(world: World) -> list[Tensor]:
            messages.here.rank = world.rank
            live, number = Live(config, SIZES), after[world.rank]
            live._had = had[number][1] if number in left else None
            job: Any = SimpleNamespace(
                world=world, ranks=after, num_began=len(numbers), number=2 if number in left else 0
            )  # fmt: skip
            if ends:
                with pytest.raises(WorldError, match="a piece of the weights is on none of them"):
                    live.begin(job)
                return []
            live.begin(job)
            made = make(kind, [cut(each, world.rank, len(after)).zero_() for each in weights])
            for group in made[1].param_groups:
                group["lr"] /= 4  # `Live` brings them
            copies = make_copies(world, after, made)
            copies.begin(live._had, live._providers)
            train(world, made, copies, grads[2:], done=2)
            return values(*made)

        pieces = run_threads(thread_worlds([1] * len(after)), go_on)
    if ends:
        return
    (alone,) = thread_worlds([1])
    made = make(kind, weights)
    train(alone, made, None, grads, done=0)
    for number, whole in enumerate(values(*made)):
        # Vectorised by their places, numbers differ in the last digit.
        torch.testing.assert_close(torch.cat([its[number] for its in pieces]), whole)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6).flatmap(
    lambda nodes: st.permutations([n for n, ranks in enumerate(nodes) for _ in range(ranks)])
))  # fmt: skip
def test_each_rank_holds_one_copy_of_another_node_unless_one_has_more_than_half(nodes):
    holders = find_holders(nodes)
    assert sorted(holders) == [*range(len(nodes))]
    apart = [nodes[rank] != nodes[holder] for rank, holder in enumerate(holders)]
    most = max(Counter(nodes).values())
    assert all(apart) == (2 * most <= len(nodes))
    if len(nodes) > 1:
        assert all(rank != holder for rank, holder in enumerate(holders))


def test_ranks_leave_if_the_others_have_all_pieces(config):
    for asked, goes_on in (("1000", True), ("1010", True), ("1100", False), ("1111", False)):
        live, left = Live(config, SIZES), list[int]()
        job: Any = SimpleNamespace(
            world=thread_worlds([1] * 4)[0], ranks=(0, 1, 2, 3), num_began=4,
            leave=lambda left=left: left.append(1),
        )  # fmt: skip
        live._job = job
        live._had = PieceCopies(job, [], torch.optim.SGD([torch.zeros(1)]), None)
        # Copies that no step counts on yet are of no use.
        live._has = cast(PieceCopies, SimpleNamespace(can_spare=lambda left: True))
        assert live.leave_job([each == "1" for each in asked]) == goes_on, asked
        assert len(left) == goes_on


def test_an_optimizer_whose_steps_copies_could_not_take_is_refused(config):
    live = Live(config, SIZES)
    live.on_all = True
    optimizer = torch.optim.SGD([torch.zeros(1)])
    live.check_optimizer(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"has hooks of its step.*leave run.live out"):
        live.check_optimizer(optimizer)


def test_trained_weights_that_are_whole_on_each_rank_are_refused(config, monkeypatch):
    class Cut(nn.Parameter):
        pass

    monkeypatch.setattr("tonari.trainer.run.live.DTensor", Cut)
    live, whole = Live(config, SIZES), nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    live.check_optimizer(torch.optim.SGD([Cut(torch.zeros(2))]))
    with pytest.raises(ConfigError, match=r"shape \[3\] is torch.complex64.*leave run.live out"):
        live.check_optimizer(torch.optim.SGD([Cut(torch.zeros(2)), whole]))


@pytest.mark.parametrize(("nodes", "warns"), [([1, 1, 1], False), ([3], True), ([1], False)])
def test_a_node_that_has_pieces_and_their_copies_is_warned_of(
    config, monkeypatch, caplog, nodes, warns
):
    sent = SimpleNamespace(wait=lambda: None)
    silent = SimpleNamespace(isend=lambda *_: sent, recv=lambda *_: None)
    monkeypatch.setattr(next_door, "dist", silent)
    live, model, world = Live(config, SIZES), nn.Linear(3, 3), thread_worlds(nodes)[0]
    live._job = cast(
        LiveJob,
        SimpleNamespace(world=world, ranks=range(sum(nodes)), keep=lambda *_, **its: its),
    )
    optimizer = torch.optim.SGD(model.parameters())
    live.keep(Progress(), cast(ReplicaLoader, None), optimizer, [model], None)
    assert ("more than half of the ranks are on one node" in caplog.text) == warns
