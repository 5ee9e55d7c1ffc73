"""Weights that a tp plan does not name, and that meet what it splits."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.average import check_alike
from tonari.trainer.models import Adapted
from tonari.trainer.models.split import check_split
from tonari.trainer.models.styles import LocalPart, replicate_rest

WIDTH, HEADS = 8, 4
PLAN = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}


class Norm(nn.Module):
    """Of single heads, as Gemma writes it: what is multiplied is made of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH // HEADS))

    def forward(self, heads: Tensor) -> Tensor:
        """Scale each head."""
        scale = (heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        made: Tensor = heads * scale * (1.0 + self.weight.float())
        return made


class Attends(nn.Module):
    """Attention by heads, which a plan splits."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.query_norm: nn.Module = Norm()
        self.key_norm: nn.Module = nn.LayerNorm(WIDTH // HEADS)
        self.head = nn.Linear(WIDTH, 3)

    def heads(self, hidden: Tensor) -> Tensor:
        """View what a layer gives by heads."""
        made: Tensor = hidden.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        return made

    def forward(self, hidden: Tensor) -> Tensor:
        """Map floating[rows, places, width] to logits."""
        query = self.query_norm(self.heads(self.query(hidden)))
        key = self.key_norm(self.heads(self.key(hidden)))
        value = self.heads(self.value(hidden))
        made = nn.functional.scaled_dot_product_attention(query, key, value)
        added = hidden + self.out(made.transpose(1, 2).flatten(2))
        logits: Tensor = self.head(added.mean(1))
        return logits


class UsedTwice(Attends):
    """One norm works on heads and, before them, on what is whole."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Do so."""
        return super().forward(self.query_norm(hidden.unflatten(-1, (HEADS, -1))).flatten(2))


class OneKey(Attends):
    """All heads of the queries share a key, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.key_norm = nn.Linear(WIDTH, WIDTH // HEADS), nn.Identity()


class Scales(Attends):
    """A weight of the module itself meets heads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def heads(self, hidden: Tensor) -> Tensor:
        """Scale them too."""
        return super().heads(hidden) * self.scale


def adapted(kind: Callable[[], nn.Module], without: tuple[str, ...] = ()) -> Adapted:
    plan = {path: style for path, style in PLAN.items() if path not in without}
    model = Adapted(kind(), tp_plan=plan)
    model.describe_inputs(lambda rows: torch.empty(rows, 5, WIDTH, device="meta"))
    return model


def added_up(model: Adapted) -> set[str]:
    plan = model.tp_plan(sequence_parallel=False, loss_parallel=False)
    return {
        path
        for path, style in plan.items()
        if isinstance(style, LocalPart) and style.gradient.is_partial()
    }


def test_the_gradients_of_norms_of_heads_are_added_up_though_no_plan_names_them() -> None:
    model = adapted(Attends)
    model.check_mesh(tp=2)
    assert added_up(model) == {"wrapped.query_norm", "wrapped.key_norm"}


def test_a_frozen_norm_and_one_of_whole_heads_need_nothing() -> None:
    model = adapted(Attends)
    model.wrapped.query_norm.requires_grad_(False)
    model.check_mesh(tp=2)
    assert added_up(model) == {"wrapped.key_norm"}
    module, gathered = (
        Attends(),
        ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate()),
    )
    inputs = torch.empty(2, 5, WIDTH, device="meta")
    assert check_split(module, dict.fromkeys(("query", "key", "value"), gathered), inputs) == set()


@pytest.mark.parametrize(
    ("kind", "without", "says"),
    [
        (UsedTwice, (), r"query_norm.weight of UsedTwice is whole .* name query_norm in the plan"),
        (OneKey, ("key",), r"a tensor \[8, .*\] of OneKey is whole on each rank, and meets"),
        (Scales, (), r"scale of Scales is whole on each rank, and meets what the tp plan splits"),
    ],
)
def test_what_gets_a_part_of_a_gradient_for_another_reason_is_refused(
    kind: type[nn.Module], without: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        adapted(kind, without).check_mesh(tp=2)


def test_gradients_of_a_whole_weight_that_differ_on_its_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer = nn.LayerNorm(4)
        replicate_rest(layer, mesh)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        check_alike(layer.named_parameters(), mesh)
        # Of the weight the other rank has twice as much, of the bias almost the same.
        ratio = torch.tensor([2.0, 1.0 + 1e-6])

        def gather(every: list[Tensor], mine: Tensor, **_: object) -> None:
            every[0].copy_(mine)
            every[1].copy_(mine * ratio)

        monkeypatch.setattr(dist, "all_gather", gather)
        with pytest.raises(
            ConfigError, match=r"the gradient of weight differs on the ranks.* name"
        ):
            check_alike(layer.named_parameters(), mesh)
    finally:
        dist.destroy_process_group()
