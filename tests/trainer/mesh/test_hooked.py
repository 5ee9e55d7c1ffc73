"""Hooks on weights go along to whatever takes a weight's place; what cannot is refused."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.trainer.mesh.test_parallelize_alone import TwoStages
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.models import Adapted, StagedModel, deferred, seeded

X = torch.arange(12.0).view(3, 4) / 7


class HookedNet(nn.Module):
    """Two layers, of which hooks mask and scale gradients."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList([first, second])
        mask = torch.eye(4)
        first.weight.register_hook(lambda gradient: gradient * mask)
        second.weight.register_hook(lambda gradient: gradient * 0.5)
        second.bias.register_hook(torch.zeros_like)

    def forward(self, x: Tensor) -> Tensor:
        """Pass through both."""
        for layer in self.layers:
            x = layer(x)
        return x.tanh()


class LateNet(HookedNet):
    """A hook that torch calls once a gradient is added up."""

    def __init__(self) -> None:
        super().__init__()
        bias = self.get_parameter("layers.0.bias")
        bias.register_post_accumulate_grad_hook(lambda parameter: None)


class SameMemory(HookedNet):
    """Two parameters in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        first = self.get_parameter("layers.0.weight")
        self.get_parameter("layers.1.weight").data = first.data


def adapted(kind: Callable[[], nn.Module] = HookedNet) -> StagedModel:
    """Name its layers, and say what it takes."""
    model = Adapted(kind(), layers="layers")
    model.describe_inputs(lambda rows: torch.empty(rows, 4, device="meta"))
    return model


@pytest.mark.parametrize(
    ("options", "build"),
    [
        ({}, seeded), ({}, deferred), ({"offload": True}, seeded), ({"offload": True}, deferred),
        ({"dtype": "bfloat16"}, deferred), ({"place": TwoStages()}, deferred),
        ({"place": TwoStages()}, seeded), ({"checkpointing": "full"}, deferred),
    ],
)  # fmt: skip
def test_gradients_pass_the_hooks_of_the_weight_that_was_made(
    mesh: DeviceMesh, options: dict[str, Any], build: Callable[..., StagedModel]
) -> None:
    def train(parts: list[StagedModel]) -> dict[str, Tensor]:
        values = X
        first = parts[0]
        assert isinstance(first, Adapted)
        for part in parts:
            given = part(values) if part is first else part(values, X)
            values = given[0] if isinstance(given, tuple) else given
        values.float().square().sum().backward()
        named = [each for part in parts for each in part.named_parameters()]
        found = {name: its.grad for name, its in named if its.grad is not None}
        return {name: getattr(its, "_local_tensor", its) for name, its in found.items()}

    plain = seeded(adapted, seed=3)
    expected = train([plain])
    assert expected["wrapped.layers.1.bias"].count_nonzero() == 0
    found = train(parallelize(build(adapted, seed=3), mesh, **options))
    assert found.keys() == expected.keys()
    exact = "dtype" not in options
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-6 if exact else 0.05, atol=1e-7 if exact else 0.05
        )
        assert torch.equal(found[name] == 0, gradient == 0), name


@pytest.mark.parametrize("build", [seeded, deferred])
def test_what_would_be_lost_is_refused(mesh: DeviceMesh, build: Callable[..., StagedModel]) -> None:
    late = build(lambda: adapted(LateNet), seed=3)
    with pytest.raises(ConfigError, match=r"weight layers.0.bias has a hook .*leave it out"):
        parallelize(late, mesh, offload=True)
    same = build(lambda: adapted(SameMemory), seed=3)
    with pytest.raises(ConfigError, match=r"weights layers.0.weight and layers.1.weight are two"):
        parallelize(same, mesh, offload=True)
    if build is seeded:
        assert parallelize(seeded(lambda: adapted(LateNet), seed=3), mesh)
        assert parallelize(seeded(lambda: adapted(SameMemory), seed=3), mesh)


class LockedNet(HookedNet):
    """Holds what cannot be copied: a lock, an iterator, a tensor that was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.numbers = threading.Lock(), (number for number in range(3))
        self.computed = self.get_parameter("layers.0.weight") * 2


def test_a_rank_s_stages_share_what_cannot_be_copied(mesh: DeviceMesh) -> None:
    parts = parallelize(seeded(lambda: adapted(LockedNet), seed=3), mesh, TwoStages())
    locks = [each.wrapped.lock for each in parts if isinstance(each, Adapted)]
    assert len(locks) == 2
    assert locks[0] is locks[1]
    assert parts[0](X)[0].shape == X.shape
