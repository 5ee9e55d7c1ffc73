"""Replicas that train apart on batches of their own, for the tests of this folder."""

import copy
import io
from typing import Any

import torch
from torch import nn

from dataio.world import World, run_threads, thread_worlds
from shuffle import ModelExchange
from shuffle.models.tensors import find_tensors

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


def train_to(stop: int, options: dict[str, Any], num_replicas: int = 3) -> list[Replica]:
    def act(world: World) -> Replica:
        replica = Replica(world, **options).run(stop)
        replica.exchange.state_dict()  # while the others are still there to answer
        return replica

    return run_threads(thread_worlds([num_replicas]), act)
