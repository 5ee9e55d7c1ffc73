"""One process computes in bfloat16 what torch's sharding over one rank does, bit for bit."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dataio.job.launch import join
from tonari.trainer.mesh.half import Half
from tonari.trainer.mesh.mesh import AXES, make_mesh
from tonari.trainer.mesh.recompute import recompute
from tonari.trainer.models import GPT, seeded

ROWS, TOKENS, FEATURES = 4, 6, 8


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    # From torch 2.15 on oneDNN computes one of two equal LSTMs, and rounds otherwise.
    mkldnn: Any = torch.backends.mkldnn
    (before, *_) = mkldnn.set_flags(False)
    with join(device="cpu"):
        yield
    mkldnn.set_flags(before)


class Twice(nn.Module):
    """Has a weight in two places, one that gets no gradient, and one that asks for none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((FEATURES,), 0.3), requires_grad=False)

    def forward(self, values: Tensor, *, scale: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(values))) * self.frozen * scale
        return result


class RecurrentLayer(nn.Module):
    """Keeps a list of its weights beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(FEATURES, FEATURES, batch_first=True)

    def forward(self, values: Tensor, *, scale: Tensor) -> Tensor:
        result: Tensor = self.layer(values)[0] * scale
        return result


def make_gpt(*, again: bool) -> nn.Module:
    model = GPT(16, TOKENS, width=FEATURES, depth=2, heads=2)
    if again:
        for block in model.blocks.values():
            recompute(block, selective=False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a GPT": partial(make_gpt, again=False),
    "a GPT computed again": partial(make_gpt, again=True),
    "a shared weight": Twice,
    "an LSTM": RecurrentLayer,
}


def loss_of(model: nn.Module, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    if isinstance(model, GPT):
        result = model(torch.randint(16, (ROWS, TOKENS), generator=draw))
    else:
        values = torch.randn(ROWS, TOKENS, FEATURES, generator=draw)
        result = model(values, scale=torch.tensor(1.5))
    assert result.dtype == torch.bfloat16
    loss: Tensor = result.float().square().mean()
    return loss


def found(model: nn.Module) -> list[Tensor | None]:
    values: list[Tensor | None] = []
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        for value in (parameter, parameter.grad):
            assert value is None or value.dtype == torch.float32
            if isinstance(value, DTensor):
                value = value.to_local()
            values.append(None if value is None else value.detach().clone())
    return values


def same(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(some, others, strict=True)
    )


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A model, and the same one as torch shards it over one rank."""
    own, sharded = (seeded(MODELS[request.param], seed=0) for _ in range(2))
    Half(own)
    mesh = make_mesh((1,) * len(AXES), device_type="cpu")["dp_shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    return own, sharded


def test_steps_of_two_backward_passes_are_those_of_torch_s_sharding(
    pair: tuple[nn.Module, nn.Module],
) -> None:
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in pair]
    begun = found(pair[0])
    for step in range(3):
        for seed in (2 * step, 2 * step + 1):
            losses = [loss_of(each, seed) for each in pair]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
        assert same(*map(found, pair))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not same(found(pair[0]), begun)


@pytest.mark.parametrize("together", [True, False])
def test_two_forward_passes_may_come_before_their_ways_back(
    pair: tuple[nn.Module, nn.Module], together: bool
) -> None:
    begun = found(pair[0])
    for each in pair:
        losses = [loss_of(each, 0), loss_of(each, 1)]
        if together:
            losses = [sum(losses, torch.zeros(()))]
        for loss in losses[::-1]:
            loss.backward()
    assert same(*map(found, pair))
    values, gradients = found(pair[0])[::2], found(pair[0])[1::2]
    assert same(values, begun[::2])
    assert any(each is not None and each.any() for each in gradients)


def test_parameters_are_in_their_places_but_from_a_forward_pass_to_its_way_back() -> None:
    model = Twice()
    Half(model)
    plain = dict(model.named_parameters())
    loss = loss_of(model, 0)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    loss.backward()
    assert dict(model.named_parameters()) == plain
    with torch.no_grad():
        loss_of(model, 1)
    assert dict(model.named_parameters()) == plain
    loss_of(model, 2)  # nothing goes back over it
    with torch.no_grad():
        loss_of(model, 3)
    assert dict(model.named_parameters()) == plain


def test_an_error_in_a_forward_pass_leaves_the_parameters_in_their_places() -> None:
    model = Twice()
    Half(model)
    plain = dict(model.named_parameters())
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, FEATURES + 1), scale=torch.tensor(1.0))
    assert dict(model.named_parameters()) == plain
