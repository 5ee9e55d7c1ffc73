"""Replicas that cannot exchange are refused by name."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from dataio.base.errors import ExchangeError, StallError, WorldError
from dataio.world import World, run_threads, single_world, thread_worlds
from shuffle import ModelExchange
from tests.shuffle.models.replicas import Net, Replica


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
    try:
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
        from torch.distributed.tensor import DTensor as Split
    except ImportError:
        pytest.skip("older torch has the same classes in private modules")

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
