"""What becomes of two states that are averaged or swapped."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dataio.base.errors import ExchangeError
from dataio.world import World, run_threads, thread_worlds
from shuffle import ModelExchange
from shuffle.models.merge import merge_tensor
from shuffle.models.pieces import cut_pieces, pack
from shuffle.models.plan import partner_of
from shuffle.models.tensors import find_tensors
from tests.shuffle.models.replicas import (
    SEED,
    Net,
    Replica,
    before_and_after,
    bits,
    exchanged,
    train,
)


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
    settled = merge_tensor(now, mine, theirs, average=average, bounded=True)
    goal = (mine + theirs) / 2 if average else theirs
    assert settled >= torch.minimum(now, goal)


def test_counts_take_the_larger_and_flags_either_when_averaged() -> None:
    def merged(now: list[Any], mine: list[Any], theirs: list[Any], average: bool) -> list[Any]:
        tensors = map(torch.tensor, (now, mine, theirs))
        settled = merge_tensor(*tensors, average=average, bounded=True)
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
