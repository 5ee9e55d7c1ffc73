"""A recorded model has no memory, and makes the weights that building it in memory gives."""

import gc
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.trainer import foreign_models
from tests.trainer.mesh.same_weights import same_weights
from tests.trainer.mesh.tiny_models import MAKERS, tied
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.materialize import materialize
from tonari.trainer.models import Adapted, StagedModel, deferred, seeded

Model = TypeVar("Model", bound=StagedModel)

SHIPPED = {**MAKERS, "tied llama": tied, **foreign_models.MAKERS}


class Wild(nn.Module):
    """A constructor that does what people's constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Embedding(7, 4, padding_idx=2)
        self.bag = nn.Parameter(torch.cat([torch.randn(2, 3), torch.rand(1, 3)]).T.contiguous())
        self.halved = nn.Parameter(torch.randn(4, dtype=torch.float64).half())
        self.made = nn.Parameter(torch.from_numpy(np.arange(6.0)).reshape(2, 3))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
        )
        own = torch.Generator().manual_seed(9)
        self.own = nn.Parameter(torch.empty(3, 5).normal_(generator=own))
        nn.init.orthogonal_(square := torch.empty(4, 4))
        self.square = nn.Parameter(square)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 4), 0.5))
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(5, 5), std=0.02))
        self.cut.data[1:3].mul_(3)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 7)
        self.tied.weight = self.numbers.weight
        chances = [each.item() for each in torch.linspace(0, 0.3, 4)]
        self.mask = torch.bernoulli(torch.full((4, 4), chances[2])) > 0
        self.order = torch.randperm(5).tolist()
        self.depth = int(torch.randn(6).gt(0).nonzero().shape[0])
        self.tables = [torch.arange(3.0) / 2, torch.eye(2)]
        self.register_buffer("positions", torch.arange(4).expand(2, -1))
        self.register_buffer("angles", torch.outer(torch.arange(3.0), torch.arange(2.0)).cos())
        if torch.rand(()) < 2 and bool((self.own > 0).any()):
            self.last = nn.Parameter(torch.randn(3) * float(self.square.detach().abs().max()))
        with torch.no_grad():
            self.last.copy_(torch.from_numpy(np.ones(3)) * 2 + self.last)
            for name, parameter in self.encoder.named_parameters():
                if name.endswith("linear1.weight"):
                    parameter.normal_(std=0.02).clamp_(-0.03, 0.03)
        self.kept = np.asarray(torch.randn(2)).tolist()


def wild() -> Adapted:
    """Adapt it."""
    return Adapted(Wild())


def recorded(build: Callable[[], Model]) -> Model:
    """Record a model, without touching torch's own generator."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = deferred(build, seed=5)
    assert torch.equal(before, torch.get_rng_state())
    assert model.recording is not None
    assert all(each.is_meta for each in [*model.parameters(), *model.buffers()])
    return model


@pytest.mark.parametrize("kind", SHIPPED)
def test_each_weight_made_by_itself_is_that_of_the_model_built_in_memory(kind: str) -> None:
    real, model = seeded(SHIPPED[kind], seed=5), recorded(SHIPPED[kind])
    materialize(model, "cpu")
    assert same_weights([model], [real])


def test_what_constructors_do_is_recorded() -> None:
    real, model = seeded(wild, seed=5), recorded(wild)
    materialize(model, "cpu")
    assert same_weights([model], [real])
    one, other = cast(Any, real.wrapped), cast(Any, model.wrapped)
    assert torch.equal(one.mask, other.mask)
    assert (one.order, one.depth, one.kept) == (other.order, other.depth, other.kept)
    assert all(torch.equal(a, b) for a, b in zip(one.tables, other.tables, strict=True))


def test_every_draw_advances_the_generator_as_the_real_one_does() -> None:
    ended: list[Tensor] = []

    def build() -> StagedModel:
        model = wild()
        ended.append(torch.get_rng_state())
        return model

    seeded(build, seed=5)
    recorded(build)
    assert torch.equal(*ended)


def test_a_weight_is_made_of_what_it_depends_on_alone() -> None:
    def build() -> StagedModel:
        return Adapted(nn.Sequential(*(nn.Linear(3, 3) for _ in range(20))))

    recording = recorded(build).recording
    assert recording is not None
    number = recording.views["wrapped.7.weight"].storage
    assert len(recording.tape._needed(number)) == 1


def test_a_weight_that_is_filled_again_is_drawn_once() -> None:
    def build() -> StagedModel:
        layer = nn.Linear(3, 3)
        nn.init.normal_(nn.init.xavier_uniform_(layer.weight))
        return Adapted(layer)

    recording = recorded(build).recording
    assert recording is not None
    needed = recording.tape._needed(recording.views["wrapped.weight"].storage)
    assert len(needed) == 1


def test_a_model_that_was_built_before_stays_as_it_is() -> None:
    network = nn.Linear(3, 3)
    model = deferred(lambda: Adapted(network), seed=5)
    assert model.recording is None
    assert model.wrapped.weight is network.weight


class _Elsewhere:
    """No module."""

    def __init__(self) -> None:
        self.table = torch.arange(3.0)


class Hiding(nn.Module):
    """Keeps a tensor where no module knows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere, self.layer = _Elsewhere(), nn.Linear(3, 3)


class Loading(nn.Module):
    """Takes the address of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        # As a library in another language would.
        view = torch.from_numpy(np.zeros(3, dtype=np.float32)).untyped_storage()
        self.layer.bias.data.set_(view)


class Placing(nn.Module):
    """Begins on meta, as libraries do that read weights from a file."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layer = nn.Linear(3, 3)
        self.layer.weight = nn.Parameter(torch.ones(3, 3))
        self.layer.bias = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Hiding, "no module"), (Loading, "Error"), (Placing, "makes a tensor on meta")],
)
def test_what_cannot_be_recorded_is_built_in_memory_with_a_warning(
    kind: type[nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()
    real = seeded(lambda: Adapted(kind()), seed=5)
    with caplog.at_level(logging.WARNING):
        model = deferred(lambda: Adapted(kind()), seed=5)
    assert model.recording is None
    assert reason in caplog.text
    assert "whole model in memory" in caplog.text
    assert same_weights([model], [real])


@pytest.mark.parametrize(("rank", "said"), [(0, 1), (1, 0)])
def test_one_rank_names_the_bytes_of_a_model_that_is_built_whole(
    rank: int, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    deferred(lambda: Adapted(Placing()), seed=5)
    assert caplog.text.count("makes the whole model in memory, 0.000 GB, before it is cut") == said


def test_an_error_of_settings_is_raised_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="layers"):
        deferred(lambda: Adapted(nn.Linear(3, 3), layers="nowhere"), seed=5)
    assert not caplog.text


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_the_caller_froze_stays_frozen_and_nothing_else(is_frozen: bool) -> None:
    # Where another test has frozen what there is, all of it thaws here
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    deferred(lambda: Adapted(nn.Linear(3, 3)), seed=5)
    assert (gc.get_freeze_count() > 0) == is_frozen
    gc.unfreeze()
