"""Replicas that train apart and exchange their models: who with whom, what becomes of it, when."""

import copy
import io
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dataio.base.errors import ExchangeError, StallError, StateError, WorldError
from dataio.world import World, run_threads, single_world, thread_worlds
from shuffle import ModelExchange, equal_exchange
from shuffle.model_plan import partner_of
from shuffle.model_state import cut_pieces, find_tensors, pack, settle
from shuffle.pairwise import Handover
from tests.multirank import ROOT, RunRanks, launch_command, run_job

SEED = 5


class Net(nn.Module):
    """Something of everything: statistics, a tied weight, half precision, a mask, frozen values."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        # Not torch's own generator, which all threads share
        source = torch.Generator().manual_seed(0)
        for linear in (self.first, self.last):
            for parameter in linear.parameters():
                nn.init.normal_(parameter, std=0.5, generator=source)
        self.tied = self.first
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)).relu()) * self.scale
        return result


class Replica:
    """One replica's training: Adam on batches of its own, a pure function of replica and step."""

    def __init__(self, world: World, *, optimizer: bool = True, **options: Any) -> None:
        self.world, self.model, self.steps = world, Net(), 0
        # A beta that forgets fast: moments change much during an overlap
        trained = [value for value in self.model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01, betas=(0.5, 0.6))
        self.exchange = ModelExchange(
            self.model, self.optimizer if optimizer else None, world=world, seed=SEED, **options
        )

    def run(self, steps: int) -> "Replica":
        for _ in range(steps):
            source = torch.Generator().manual_seed(1000 * self.world.replica + self.steps)
            x = torch.randn(8, 4, generator=source) * (1 + self.world.replica)
            self.optimizer.zero_grad()
            self.model(x).pow(2).mean().backward()
            self.optimizer.step()
            self.steps += 1
            self.exchange.step()
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        found = find_tensors(self.model, self.optimizer, trained=names)
        return {name: value.clone() for name, value in found.items()}

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = (self.model, self.optimizer, self.exchange)
        torch.save([copy.deepcopy(part.state_dict()) for part in parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> "Replica":
        model, optimizer, exchange = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.exchange.load_state_dict(exchange)
        self.steps = exchange["step"]
        return self


def train(num_replicas: int, steps: int, **options: Any) -> list[Replica]:
    worlds = thread_worlds([num_replicas])
    return run_threads(worlds, lambda world: Replica(world, **options).run(steps))


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: value.reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, value in tensors.items()
    }


def exchanged(names: list[str]) -> list[str]:
    return [name for name in names if name != "parameter frozen"]


def before_and_after(
    num_replicas: int, mode: str
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Train apart for five steps, then exchange at once; every replica's tensors around that."""

    def act(world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        replica = Replica(world, every=6, mode=mode, overlap=0).run(5)
        before = replica.tensors()
        replica.exchange.step()
        return before, replica.tensors()

    return run_threads(thread_worlds([num_replicas]), act)


# Who with whom


@given(st.integers(1, 90), st.integers(0, 50))
def test_partners_are_each_others_and_only_an_odd_replica_is_left_over(
    num_replicas: int, number: int
) -> None:
    found = [
        partner_of(replica, num_replicas=num_replicas, seed=SEED, round_number=number)
        for replica in range(num_replicas)
    ]
    assert found.count(None) == num_replicas % 2
    for replica, partner in enumerate(found):
        if partner is not None:
            assert partner != replica
            assert found[partner] == replica


def test_every_pair_is_as_likely_as_every_other_and_all_sit_out_alike() -> None:
    rounds, pairs = 2000, Counter[tuple[int, int | None]]()
    for number in range(rounds):
        for replica in range(5):
            partner = partner_of(replica, num_replicas=5, seed=SEED, round_number=number)
            pairs[replica, partner] += 1
    assert len(pairs) == 25, "each with four others, or alone"
    for count in pairs.values():
        assert abs(count - rounds / 5) < 5 * (rounds * 0.2 * 0.8) ** 0.5


def test_partners_of_a_large_world_are_found_without_looking_at_the_others() -> None:
    size = 2**40
    partner = partner_of(12345, num_replicas=size, seed=SEED, round_number=3)
    assert partner is not None
    assert partner_of(partner, num_replicas=size, seed=SEED, round_number=3) == 12345


def test_models_cost_what_the_equal_exchange_of_rows_costs() -> None:
    assert equal_exchange(100, share_bytes=1000, rounds_per_epoch=3) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="expected the bytes of a replica's rows"):
        equal_exchange(100, share_bytes=0)


# What becomes of it


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 5])
def test_a_swap_moves_every_state_whole_to_the_partner(num_replicas: int) -> None:
    ended = before_and_after(num_replicas, "swap")
    for replica, (before, after) in enumerate(ended):
        partner = partner_of(replica, num_replicas=num_replicas, seed=SEED, round_number=1)
        held = before if partner is None else ended[partner][0]
        assert bits(after) == bits(held)
        assert partner is None or bits(after) != bits(before)
    kinds = {name.split()[0] for name in ended[0][0]}
    assert kinds == {"parameter", "buffer", "moment"}
    assert ended[0][0]["buffer norm.num_batches_tracked"] == 5


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 5])
def test_an_average_makes_partners_equal_and_keeps_the_mean_over_replicas(
    num_replicas: int,
) -> None:
    ended = before_and_after(num_replicas, "average")
    for replica, (before, after) in enumerate(ended):
        partner = partner_of(replica, num_replicas=num_replicas, seed=SEED, round_number=1)
        assert bits(after) == bits(before if partner is None else ended[partner][1])
    for name in ended[0][0]:
        was = torch.stack([before[name] for before, _ in ended]).double().mean(0)
        now = torch.stack([after[name] for _, after in ended]).double().mean(0)
        exact = 2e-2 if "scale" in name else 1e-6
        torch.testing.assert_close(now, was, rtol=exact, atol=exact * 0.1)


def test_swapping_twice_with_the_same_partner_gives_everything_back() -> None:
    def act(world: World) -> None:
        replica = Replica(world, every=5, mode="swap", overlap=0).run(4)
        before = replica.tensors()
        replica.exchange.step()
        assert bits(replica.tensors()) != bits(before)
        for _ in range(5):
            replica.exchange.step()
        assert bits(replica.tensors()) == bits(before)

    run_threads(thread_worlds([2]), act)


@pytest.mark.parametrize(
    ("mode", "after"), [("average", [6.0 + 3.0, 6.0 + 6.0]), ("swap", [8.0 + 3.0, 4.0 + 6.0])]
)
def test_steps_made_while_the_bytes_travelled_are_kept(mode: Any, after: list[float]) -> None:
    """Plain gradient descent on a slope: every step is the same, wherever the weights are."""

    def act(world: World) -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        exchange = ModelExchange(model, optimizer, world=world, every=4, mode=mode, overlap=3)
        found = []
        for step in range(1, 8):
            model.weight.grad = torch.full((1, 1), -(1.0 + world.rank))
            optimizer.step()
            exchange.step()
            if step >= 6:
                found.append(model.weight.item())
        return found[0], found[1]

    first, second = run_threads(thread_worlds([2]), act)
    assert (first[0], second[0]) == (6.0, 12.0), "not before it is due"
    assert [first[1], second[1]] == after


@pytest.mark.parametrize("mode", ["average", "swap"])
def test_second_moments_and_variances_stay_above_zero(mode: str) -> None:
    """With a moment that halves each step, adding the difference alone would go below zero."""
    for replica in train(4, 40, every=10, mode=mode, overlap=9):
        for name, value in replica.tensors().items():
            assert value[~value.isinf()].isfinite().all(), name
            if name.endswith(("exp_avg_sq", "running_var")):
                assert value.min() > 0, name
        assert replica.exchange.stats()["rounds"] == 3


@given(st.sampled_from([True, False]), st.lists(st.floats(0, 10, width=32), min_size=3, max_size=3))
def test_a_bounded_element_never_falls_below_both_its_own_and_the_goal(
    average: bool, values: list[float]
) -> None:
    now, mine, theirs = (torch.tensor([value]) for value in values)
    settled = settle(now, mine, theirs, average=average, bounded=True)
    goal = (mine + theirs) / 2 if average else theirs
    assert settled >= torch.minimum(now, goal)


def test_counts_take_the_larger_and_flags_either_when_averaged() -> None:
    def merged(now: list[Any], mine: list[Any], theirs: list[Any], average: bool) -> list[Any]:
        tensors = map(torch.tensor, (now, mine, theirs))
        settled = settle(*tensors, average=average, bounded=True)
        return settled.tolist()

    assert merged([12, 12], [10, 10], [7, 20], True) == [12, 22]
    assert merged([12, 12], [10, 10], [7, 20], False) == [9, 22]
    assert merged([True, False], [True, False], [False, False], True) == [True, False]
    assert merged([True, False], [True, False], [False, True], False) == [False, True]


def test_half_precision_travels_in_its_own_dtype_and_frozen_weights_not_at_all() -> None:
    model = Net()
    found = find_tensors(model, None, trained=["scale", "first.weight", "first.bias"])
    assert list(found) == exchanged(list(found))
    assert "buffer scratch" not in found
    assert sum(name.endswith("first.weight") for name in found) == 1, "tied weights once"
    pieces = cut_pieces(found)
    packed = torch.zeros(pieces[-1].stop, dtype=torch.uint8)
    pack(found, pieces, packed)
    for piece in pieces:
        assert piece.view(packed).dtype == found[piece.name].dtype
        assert torch.equal(piece.view(packed), found[piece.name])
    assert next(p for p in pieces if p.name == "parameter scale").dtype == torch.bfloat16
    replica = train(2, 5, every=4)[0]
    assert replica.exchange.round_bytes < sum(
        value.nbytes + 16 for value in replica.tensors().values()
    )


def test_a_parameter_frozen_later_is_still_exchanged() -> None:
    def act(world: World) -> bytes:
        replica = Replica(world, every=6, mode="average", overlap=0).run(5)
        replica.model.last.requires_grad_(False)
        replica.exchange.step()
        return replica.model.last.weight.detach().numpy().tobytes()

    first, second = run_threads(thread_worlds([2]), act)
    assert first == second


@pytest.mark.parametrize("optimizer", ["none", "sgd", "groups"])
def test_any_optimizer_whose_state_is_tensors_is_exchanged(optimizer: str) -> None:
    def act(world: World) -> bool:
        source = torch.Generator().manual_seed(world.rank)
        model = Net()
        extra = nn.Parameter(torch.zeros(2))
        groups: list[dict[str, Any]] = [
            {"params": [*model.first.parameters()]},
            {"params": [*model.last.parameters(), extra], "lr": 0.2},
        ]
        made = {
            "none": None,
            "sgd": torch.optim.SGD(model.parameters(), lr=0.1),
            "groups": torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        }[optimizer]
        exchange = ModelExchange(model, made, world=world, every=1, overlap=0, mode="average")
        moved = made or torch.optim.SGD(model.parameters(), lr=0.1)
        x, slope = torch.randn(8, 4, generator=source), torch.randn(2, generator=source)
        (model(x).pow(2).mean() + (extra * slope).sum()).backward()
        moved.step()
        exchange.step()
        told = world.allgather(
            model.last.weight.detach().numpy().tobytes() + extra.detach().numpy().tobytes(),
            doing="comparing",
        )
        if optimizer == "groups":
            assert {name.split()[0] for name in find_tensors(model, made, trained=[])} == {
                "buffer",
                "moment",
            }
        return told[0] == told[1]

    assert all(run_threads(thread_worlds([2]), act))


def test_an_optimizer_that_keeps_lists_is_refused_with_the_cure() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.eye(2)).pow(2).mean()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    with pytest.raises(ExchangeError, match=r"LBFGS keeps .* in a list.*pass optimizer=None"):
        find_tensors(model, optimizer, trained=["weight", "bias"])


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_averaging_all_leaves_the_mean_model_on_every_replica(num_replicas: int) -> None:
    def act(world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        replica = Replica(world, every=50).run(4 + world.rank)
        before = replica.tensors()
        replica.exchange.average_all()
        return before, replica.tensors()

    ended = run_threads(thread_worlds([num_replicas]), act)
    for name in ended[0][0]:
        if name.startswith("moment"):
            continue
        stacked = torch.stack([before[name] for before, _ in ended]).double()
        wanted = stacked.max(0).values if "num_batches" in name else stacked.mean(0)
        for _, after in ended:
            torch.testing.assert_close(after[name].double(), wanted, rtol=4e-3, atol=1e-6)
            assert bits({name: after[name]}) == bits({name: ended[0][1][name]})


# When: the overlap, and what does not depend on it


class Slow:
    """A world whose messages are seen as done only after a drawn number of looks."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._rng = world, np.random.default_rng([seed, world.rank])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def isend(self, *args: Any, **options: Any) -> Any:
        return self._delayed(self._world.isend(*args, **options))

    def irecv(self, *args: Any, **options: Any) -> Any:
        return self._delayed(self._world.irecv(*args, **options))

    def _delayed(self, request: Any) -> Any:
        looks = iter(range(int(self._rng.integers(0, 30))))
        return SimpleNamespace(test=lambda: next(looks, None) is None and request.test())


@pytest.mark.parametrize("mode", ["average", "swap"])
@pytest.mark.parametrize("overlap", [0, 1, 3, 4])
def test_the_result_does_not_depend_on_when_the_bytes_come(mode: str, overlap: int) -> None:
    def final(wrap: Callable[[World], Any]) -> list[dict[str, bytes]]:
        worlds = thread_worlds([3])
        return run_threads(
            worlds,
            lambda world: bits(
                Replica(wrap(world), every=4, mode=mode, overlap=overlap).run(19).tensors()
            ),
        )

    prompt = final(lambda world: world)
    assert final(lambda world: Slow(world, 1)) == prompt
    assert final(lambda world: Slow(world, 2)) == prompt
    assert prompt[0] != prompt[1]


def test_nothing_waits_for_a_partner_before_a_round_is_due() -> None:
    """The partner takes no step at all until this replica has taken all but the last."""
    ahead = threading.Event()

    def act(world: World) -> float:
        replica = Replica(world, every=4, overlap=4)
        replica.run(3)
        replica.exchange._apart = True  # the first round's question to all is asked elsewhere
        if world.rank == 1:
            assert ahead.wait(20)
        replica.run(4)
        if world.rank == 0:
            ahead.set()
        replica.run(1)
        return replica.exchange.stats()["rounds"]

    assert run_threads(thread_worlds([2]), act) == [1, 1]


def test_figures_tell_what_was_sent_and_what_came_in_time() -> None:
    for replica in train(2, 13, every=4, overlap=4):
        stats = replica.exchange.stats()
        assert stats["rounds"] == 2
        assert stats["sent_bytes"] == 3 * replica.exchange.round_bytes or (
            stats["sent_bytes"] == 2 * replica.exchange.round_bytes
        )
        assert stats["messages"] == 4, "a header and a state, a round"
        assert 0 <= stats["overlap_fraction"] <= 1
        assert stats["blocked_s"] >= 0


def test_figures_of_three_replicas_count_the_rounds_sat_out() -> None:
    ended = [replica.exchange.stats() for replica in train(3, 12, every=2, overlap=0)]
    assert sum(stats["rounds_alone"] for stats in ended) == 6
    assert all(stats["rounds"] + stats["rounds_alone"] == 6 for stats in ended)


def test_a_large_state_travels_in_messages_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def act(world: World) -> bool:
        mine = np.arange(1000, dtype=np.uint8) + np.uint8(world.rank)
        theirs = np.zeros(1000, np.uint8)
        header = np.array([1], np.uint64)
        trade = Handover(
            world, peer=1 - world.rank, tag=0, mine=mine, theirs=theirs, header=header,
            check=lambda found: None, doing="testing", max_message_bytes=64,
        )  # fmt: skip
        trade.wait()
        sizes.append(trade.messages)
        return bool((theirs - mine == (1 if world.rank == 0 else 255)).all())

    assert all(run_threads(thread_worlds([2]), act))
    assert sizes == [17, 17]


def test_at_most_four_messages_are_under_way_in_each_direction() -> None:
    world = thread_worlds([2])[0]
    posted: list[int] = []
    never = SimpleNamespace(test=lambda: False)
    done = SimpleNamespace(test=lambda: True)

    class Counting:
        def isend(self, data: np.ndarray, **_: Any) -> Any:
            posted.append(len(data))
            return done if len(posted) == 1 else never

        def irecv(self, into: np.ndarray, **_: Any) -> Any:
            return done

    assert world.rank == 0
    trade = Handover(
        Counting(),  # type: ignore[arg-type]
        peer=1, tag=0, mine=np.zeros(100, np.uint8), theirs=np.zeros(100, np.uint8),
        header=np.array([1], np.uint64), check=lambda found: None, doing="testing",
        max_message_bytes=10,
    )  # fmt: skip
    for _ in range(5):
        assert not trade.poll()
    assert posted == [8, 10, 10, 10, 10]


def test_no_state_is_sent_before_both_agree_on_what_it_is() -> None:
    posted: list[int] = []
    answers = iter([False, False, True])

    class Counting:
        def isend(self, data: np.ndarray, **_: Any) -> Any:
            posted.append(len(data))
            return SimpleNamespace(test=lambda: True)

        def irecv(self, into: np.ndarray, **_: Any) -> Any:
            return SimpleNamespace(test=lambda: next(answers))

    def refuse(found: np.ndarray) -> None:
        raise ExchangeError("not the same")

    trade = Handover(
        Counting(),  # type: ignore[arg-type]
        peer=1, tag=0, mine=np.zeros(9, np.uint8), theirs=np.zeros(9, np.uint8),
        header=np.array([1], np.uint64), check=refuse, doing="testing",
    )  # fmt: skip
    assert not trade.poll()
    assert not trade.poll()
    with pytest.raises(ExchangeError, match="not the same"):
        trade.poll()
    assert posted == [8]


# Stopping and going on


@pytest.mark.parametrize("mode", ["average", "swap"])
def test_a_run_resumed_at_any_step_ends_with_the_same_bits(mode: str) -> None:
    options: dict[str, Any] = {"every": 4, "mode": mode, "overlap": 3}
    steps = 14
    whole = [bits(replica.tensors()) for replica in train(3, steps, **options)]
    for stop in range(steps + 1):
        saved = [replica.save() for replica in train_to(stop, options)]

        def go_on(world: World, stop: int = stop, saved: list[bytes] = saved) -> dict[str, bytes]:
            replica = Replica(world, **options).load(saved[world.rank])
            return bits(replica.run(steps - stop).tensors())

        assert run_threads(thread_worlds([3]), go_on) == whole, f"stopped after {stop} steps"


def train_to(stop: int, options: dict[str, Any], num_replicas: int = 3) -> list[Replica]:
    def act(world: World) -> Replica:
        replica = Replica(world, **options).run(stop)
        replica.exchange.state_dict()  # while the others are still there to answer
        return replica

    return run_threads(thread_worlds([num_replicas]), act)


def test_saving_changes_nothing_for_the_run_that_goes_on() -> None:
    def act(world: World) -> dict[str, bytes]:
        replica = Replica(world, every=4, overlap=3)
        for _ in range(14):
            replica.run(1).exchange.state_dict()
        return bits(replica.tensors())

    whole = [bits(replica.tensors()) for replica in train(3, 14, every=4, overlap=3)]
    assert run_threads(thread_worlds([3]), act) == whole


def test_a_state_between_rounds_is_a_few_numbers() -> None:
    state = train(2, 7, every=4, overlap=2)[0].exchange.state_dict()
    assert state["round"] is None
    assert state["step"] == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [({"every": 5}, "the same arguments"), ({"mode": "swap"}, "average_all()")],
)
def test_a_state_of_other_arguments_is_refused(change: dict[str, Any], message: str) -> None:
    state = train(2, 4, every=4, overlap=0)[0].exchange.state_dict()

    def act(world: World) -> None:
        Replica(world, **{"every": 4, "overlap": 0, **change}).exchange.load_state_dict(state)

    with pytest.raises(StateError, match=message):
        run_threads(thread_worlds([2]), act)


def test_a_state_is_not_loaded_over_a_round_under_way() -> None:
    replica = train_to(4, {"every": 4, "overlap": 2}, num_replicas=2)[0]
    with pytest.raises(StateError, match=r"round 1 is under way.*flush\(\)"):
        replica.exchange.load_state_dict(replica.exchange.state_dict())


def test_a_round_of_another_model_is_an_error_that_names_the_tensor() -> None:
    replica = train_to(4, {"every": 4, "overlap": 2}, num_replicas=2)[0]
    replica.model.first = nn.Linear(4, 6).to(torch.float64)
    with pytest.raises(ExchangeError, match=r"parameter first.weight is torch.float64\[6, 4\]"):
        replica.exchange.flush()


def test_closing_ends_the_round_that_the_partner_waits_for() -> None:
    def act(world: World) -> float:
        replica = Replica(world, every=4, overlap=3)
        with replica.exchange:
            replica.run(5)
        return replica.exchange.stats()["rounds"]

    assert run_threads(thread_worlds([2]), act) == [1, 1]


# Refusals and failures


def test_replicas_whose_gradients_are_reduced_by_hand_are_refused_in_the_first_round() -> None:
    def act(world: World) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = ModelExchange(model, optimizer, world=world, every=2)
        for _ in range(2):
            model(torch.ones(8, 4) * torch.arange(8)[:, None]).pow(2).mean().backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    grads = parameter.grad.float().numpy()
                    mean = world.allreduce(grads, op="sum", doing="averaging") / 3
                    parameter.grad.copy_(torch.from_numpy(mean))
            optimizer.step()
            exchange.step()

    with pytest.raises(ExchangeError, match="after 2 steps all 3 replicas hold bitwise the same"):
        run_threads(thread_worlds([3]), act)


def test_a_rate_of_zero_at_first_is_not_taken_for_synchronous_training() -> None:
    def act(world: World) -> float:
        replica = Replica(world, every=2, overlap=0)
        replica.optimizer.param_groups[0]["lr"] = 0.0
        replica.run(2)
        replica.optimizer.param_groups[0]["lr"] = 0.1
        return replica.run(2).exchange.stats()["rounds"]

    assert run_threads(thread_worlds([2]), act) == [2, 2]


def test_replicas_that_begin_with_other_weights_are_refused_on_every_rank() -> None:
    def act(world: World) -> None:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, float(world.rank == 2))
        nn.init.zeros_(model.bias)
        with pytest.raises(ExchangeError, match=r"rank 2 begins with other weights.*manual_seed"):
            ModelExchange(model, world=world, every=2)

    run_threads(thread_worlds([3]), act)


def test_replicas_of_other_arguments_are_refused_by_name() -> None:
    def act(world: World) -> None:
        with pytest.raises(WorldError, match=r"rank 1 was made with .*'every': 3"):
            Replica(world, every=2 + world.rank)

    run_threads(thread_worlds([2]), act)


class DistributedDataParallel(nn.Module):
    """Stands for torch's, which needs a process group; it is known by its name."""


class DTensor(nn.Parameter):
    """Stands for torch's, which needs a device mesh; it is known by its name."""


def test_models_that_torch_keeps_equal_or_split_are_refused() -> None:
    world = single_world()
    with pytest.raises(ValueError, match=r"holds a DistributedDataParallel.*pass the plain module"):
        ModelExchange(nn.Sequential(DistributedDataParallel()), world=world, every=2)
    split = nn.Linear(2, 2)
    split.weight = DTensor(split.weight.data)
    with pytest.raises(ValueError, match=r"parameter weight is a DTensor.*whole model"):
        ModelExchange(split, world=world, every=2)
    with pytest.raises(ValueError, match=r"no shape yet.*one batch"):
        ModelExchange(nn.LazyLinear(2), world=world, every=2)


def test_torchs_own_wrappers_have_the_names_that_are_refused() -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor as Split

    kinds = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel, FSDPModule, Split)
    names = ["DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DTensor"]
    assert [kind.__name__ for kind in kinds] == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "at least 1 step"),
        ({"every": 4, "overlap": 5}, r"in \[0, every\] = \[0, 4\]"),
        ({"every": 4, "mode": "mix"}, 'expected "average" or "swap"'),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelExchange(nn.Linear(1, 1), world=single_world(), **options)


def test_a_world_whose_replicas_share_ranks_is_refused() -> None:
    world: Any = Mock(spec=World, num_replicas=2, world_size=4)
    with pytest.raises(ValueError, match="4 ranks make 2 replicas"):
        ModelExchange(nn.Linear(1, 1), world=world, every=2)


def test_one_replica_alone_trains_on() -> None:
    replica = Replica(single_world(), every=2, overlap=0).run(5)
    assert replica.exchange.stats()["rounds_alone"] == 2
    assert replica.exchange.round_bytes == 0


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_partner_that_is_gone_is_named_within_the_limit(overlap: int) -> None:
    def act(world: World) -> None:
        replica = Replica(world, every=2, overlap=overlap).run(3)
        if world.rank == 0:
            world.timeout_s = 0.2
            with pytest.raises(StallError, match="for rank 1 while exchanging models in round"):
                replica.run(5)

    run_threads(thread_worlds([2]), act)


def test_partners_at_different_rounds_are_told_so() -> None:
    def act(world: World) -> None:
        replica = Replica(world, every=2, overlap=0).run(2)
        if world.rank == 1:
            replica.exchange._step += 2
        replica.run(2)

    with pytest.raises(ExchangeError, match=r"sends round \d.*expected round \d.*the same step"):
        run_threads(thread_worlds([2]), act)


def test_partners_whose_optimizers_stepped_other_parameters_are_told_so() -> None:
    def act(world: World) -> None:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        exchange = ModelExchange(model, optimizer, world=world, every=1, overlap=0)
        out = model.norm(model.first(torch.ones(8, 4) * torch.arange(8)[:, None]))
        (model.last(out) if world.rank else out[:, :1]).pow(2).mean().backward()
        optimizer.step()
        exchange.step()

    with pytest.raises(ExchangeError, match=r"\d+ tensors, .*gradient, zeros will do"):
        run_threads(thread_worlds([2]), act)


# What it is for


def distance_to_optimum(num_replicas: int, exchange: str | None) -> float:
    """Fit a line through classes of points that lie on one replica each; how far from the best?"""
    rng = np.random.default_rng(0)
    points = torch.tensor(rng.normal(size=(num_replicas, 40, 6)), dtype=torch.float64)
    points += torch.tensor(rng.normal(size=(num_replicas, 1, 6)))
    truth = torch.tensor(rng.normal(size=(num_replicas, 6)))
    targets = torch.einsum("rnd,rd->rn", points, truth)
    best = torch.linalg.lstsq(points.reshape(-1, 6), targets.reshape(-1, 1)).solution[:, 0]

    def act(world: World) -> float:
        model = nn.Linear(6, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        mode: Any = exchange or "average"
        trade = ModelExchange(model, optimizer, world=world, every=4, mode=mode)
        for _ in range(400):
            optimizer.zero_grad()
            (model(points[world.rank])[:, 0] - targets[world.rank]).pow(2).mean().backward()
            optimizer.step()
            if exchange:
                trade.step()
        trade.flush()
        if exchange:
            trade.average_all()
        return float((model.weight[0] - best).norm().detach())

    distances: Iterator[float] = iter(run_threads(thread_worlds([num_replicas]), act))
    return sum(distances) / num_replicas


@pytest.mark.parametrize("mode", ["average", "swap"])
def test_exchanging_models_ends_nearer_the_optimum_of_all_rows_than_training_apart(
    mode: str,
) -> None:
    apart = distance_to_optimum(4, None)
    assert distance_to_optimum(4, mode) < 0.5 * apart


# On real ranks


@pytest.mark.multirank
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_real_ranks_exchange_and_resume_in_the_middle_of_a_round(
    run_ranks: RunRanks, num_ranks: int
) -> None:
    reports = run_ranks("model_exchange", num_ranks, timeout_s=90).reports
    for mode in ("average", "swap"):
        ended = [report[mode] for report in reports]
        assert len({told["whole"] for told in ended}) == num_ranks, "they train apart"
        assert len({told["mean"] for told in ended}) == 1
        for told in ended:
            assert told["resumed"] == told["whole"]
            assert told["stats"]["rounds"] + told["stats"]["rounds_alone"] == 4
            if num_ranks == 2:
                assert told["stats"]["sent_bytes"] > 4 * 2 * 400 * 400 * 4


@pytest.mark.multirank
def test_a_silent_partner_on_real_ranks_is_named_within_the_limit(run_ranks: RunRanks) -> None:
    ended = run_ranks("model_exchange_dies", 2, check=False, timeout_s=60)
    assert ended.returncode != 0
    assert "waited 2 s for rank 1 while exchanging models in round 2" in ended.output


@pytest.mark.multirank
def test_the_example_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def run(*arguments: str) -> list[str]:
        script = str(ROOT / "examples" / "local_sgd.py")
        status, output = run_job(
            [*launch_command("mpiexec", 2), script, *arguments],
            env={"TONARI_CACHE": str(tmp_path / "cache"), "TONARI_RANKS_PER_NODE": "1"},
            timeout_s=120,
        )
        assert status == 0, output
        return re.findall(r"(?:epoch \d|mean model): accuracy \d\.\d+", output)

    saved = f"--saved={tmp_path / 'saved'}"
    whole = run()
    assert len(whole) == 6
    assert float(whole[-1].split()[-1]) > 0.7, "each sees half of the classes"
    assert run(saved, "--epochs=2")[:2] == whole[:2]
    assert run(saved, "--resume")[-1] == whole[-1]
