"""A run that is saved and resumed, in the middle of a round too."""

from typing import Any

import pytest
import torch
from torch import nn

from dataio.base.errors import ExchangeError, StateError
from dataio.world import World, run_threads, thread_worlds
from tests.shuffle.models.replicas import Replica, bits, train, train_to


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
