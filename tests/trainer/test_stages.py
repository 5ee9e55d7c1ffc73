"""What passes by the layers of a module: it travels with them, or the cut is refused by name."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trainer.stages import cut_up, run_stages, run_whole
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import Adapted, seeded
from tonari.trainer.models.absent import Absent

WIDTH, ROWS = 8, 5


class Plain(nn.Module):
    """A line, layers, and a line."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(self.layer(number) for number in range(4))
        self.table = nn.Parameter(torch.linspace(-3, 3, WIDTH), requires_grad=False)

    def layer(self, number: int) -> nn.Module:
        """Make a layer."""
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def through(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Call the layers, each with others beside."""
        for layer in self.layers:
            hidden = layer(hidden, *others)
        return hidden

    def forward(self, rows: Tensor) -> Tensor:
        """Map floating[rows, width] to logits."""
        return self.ends(self.through(self.stem(rows)))

    def ends(self, hidden: Tensor) -> Tensor:
        """Give the logits."""
        logits: Tensor = self.head(hidden)
        return logits


class Adds(nn.Module):
    """A layer that adds what it is given beside, or leaves out what a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        """Take both."""
        masked = other.dtype == torch.bool
        both = hidden.masked_fill(other, 0.0) if masked else hidden + other
        return torch.tanh(self.line(both))


class Beside(Plain):
    def layer(self, number: int) -> nn.Module:
        return Adds()


class LongSkip(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        skip = torch.tanh(self.stem(rows))
        return self.ends(self.through(skip * 2) * skip)


class SameSkip(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        skip = torch.tanh(self.stem(rows))
        return self.ends(self.through(skip) + skip)


class Frozen(Beside):
    def forward(self, rows: Tensor) -> Tensor:
        return self.ends(self.through(self.stem(rows), torch.sin(self.table)))


class TrainedBeside(Frozen):
    def __init__(self) -> None:
        super().__init__()
        self.table.requires_grad_(True)


class Detached(Beside):
    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.stem(rows)
        return self.ends(self.through(hidden * 2, hidden.detach()))


class MaskedBeside(Beside):
    def forward(self, rows: Tensor) -> Tensor:
        gate = self.stem(rows)
        return self.ends(self.through(gate * gate.sigmoid(), gate < 0))


class DrawnBeside(Beside):
    def forward(self, rows: Tensor) -> Tensor:
        drawn = torch.rand(len(rows), 1) < 0.5
        return self.ends(self.through(self.stem(rows), drawn))


class Ladder(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        hidden, given = self.stem(rows), []
        for layer in self.layers:
            hidden = layer(hidden)
            given.append(hidden)
        return self.ends(hidden + sum(given))


class Means(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        hidden, total = self.stem(rows), torch.zeros(())
        for layer in self.layers:
            hidden = layer(hidden)
            total = total + hidden.detach().mean()
        return self.ends(hidden) + total


class TwoStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        """Give two tensors that both depend on the weights."""
        hidden = torch.tanh(self.line(hidden + beside))
        return hidden, hidden * beside


class Twofold(Plain):
    def layer(self, number: int) -> nn.Module:
        return TwoStem()

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.stem(rows)
        beside = torch.ones_like(hidden)
        for layer in self.layers:
            hidden, beside = layer(hidden, beside)
        return self.ends(hidden * beside)


class NormalisedTie(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        weight = F.normalize(self.stem.weight)
        return F.linear(self.through(self.stem(rows)), weight)


class Peeks(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        scale = cast(nn.Linear, cast(nn.Sequential, self.layers[3])[0]).weight.abs().mean()
        return self.ends(self.through(self.stem(rows) * scale))


class ClassToken(Plain):
    """A buffer of a pass that is filled in part by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = (
            nn.Parameter(torch.randn(WIDTH)),
            nn.Parameter(torch.randn(3, WIDTH)),
        )

    def forward(self, rows: Tensor) -> Tensor:
        tokens = torch.empty(len(rows), 3, WIDTH)
        tokens[:, 0] = self.token
        tokens[:, 1:] = self.stem(rows)[:, None]
        return self.ends(self.through(tokens + self.places)[:, 0])


class Statistics(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        skip = self.norm(self.stem(rows))
        return self.ends(self.through(skip * 2) + skip)


class Encoder(Plain):
    """torch's own, which looks at its first layer, with padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.layers = self.encoder.layers

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.stem(rows)[:, None].expand(-1, 3, -1)
        padding = torch.arange(3).expand(len(rows), 3) > 1
        return self.ends(self.encoder(hidden, src_key_padding_mask=padding)[:, 0])


class KeptTable(Beside):
    """Positions that the first pass makes and later ones find."""

    kept: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.sin(torch.arange(WIDTH).to(rows))
        return self.ends(self.through(self.stem(rows), self.kept))


class Weighs(Plain):
    """Gives a parameter to a module, outside of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        gate = self.stem(self.scale).tanh()
        return self.ends(self.through(self.stem(rows)) * gate)


class ChangedInput(Plain):
    """Changes what it is given where it lies, and uses it before and behind the layers."""

    def forward(self, rows: Tensor) -> Tensor:
        rows.mul_(0.5).add_(1.0)
        return self.ends(self.through(self.stem(rows)) * rows)


TRAVEL = [
    LongSkip, SameSkip, Frozen, TrainedBeside, Detached, MaskedBeside, DrawnBeside, Ladder, Means,
    Twofold, NormalisedTie, Peeks, ClassToken, Statistics, Encoder, KeptTable, Weighs,
    ChangedInput,
]  # fmt: skip


def example(rows: int) -> Tensor:
    return torch.empty(rows, WIDTH, dtype=torch.float64, device="meta")


@pytest.fixture(autouse=True)
def _in_doubles() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def adapted(kind: Callable[[], nn.Module]) -> Callable[[], Adapted]:
    return lambda: Adapted(kind(), layers="layers")


@pytest.mark.parametrize("cuts", [[2], [1, 2, 3]], ids=["two", "four"])
@pytest.mark.parametrize("kind", TRAVEL)
def test_what_passes_by_the_layers_travels_with_them(kind: type[Plain], cuts: list[int]) -> None:
    torch.manual_seed(7)
    logits, grads = run_whole(adapted(kind), batch())
    torch.manual_seed(7)
    found, found_grads = run_stages(adapted(kind), example, batch(), cuts)
    torch.testing.assert_close(found, logits, rtol=1e-12, atol=1e-14)
    assert found_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(found_grads[name], grad, rtol=1e-10, atol=1e-13, msg=name)


def test_microbatches_of_which_one_is_changed_before_the_other_goes_back() -> None:
    stage = cut_up(adapted(ChangedInput), example, [2])[0]
    # Views of one batch, as a schedule makes them: they share what autograd watches.
    passes = [stage(each) for each in batch()[:4].chunk(2)]
    for given in passes:
        given[0].sum().backward()
    grads = [each.grad for name, each in stage.named_parameters() if "stem" in name]
    assert grads
    assert all(grad is not None for grad in grads)


@pytest.mark.parametrize("kind", [each for each in TRAVEL if each is not DrawnBeside])
def test_it_does_in_an_evaluation(kind: type[Plain]) -> None:
    model = seeded(adapted(kind), seed=3).eval()
    with torch.no_grad():
        expected = model(batch())
    found, _ = run_stages(adapted(kind), example, batch(), [1, 3], training=False)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class ChangedSkip(LongSkip):
    def forward(self, rows: Tensor) -> Tensor:
        skip = self.stem(rows)
        skip.tanh_()
        return self.ends(self.through(skip * 2) * skip)


class KeptInside(Plain):
    """The first layer leaves what it makes where the others find it."""

    def layer(self, number: int) -> nn.Module:
        if number == 0:
            self.box: list[Tensor] = []
        return Leaves(self.box, writes=number == 0)


class Leaves(nn.Module):
    def __init__(self, box: list[Tensor], *, writes: bool) -> None:
        super().__init__()
        self.box, self.writes, self.line = box, writes, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what the first layer made."""
        made = torch.tanh(self.line(hidden))
        if self.writes:
            self.box[:] = [made * 2]
        return made + self.box[0]


class SkipsInEvaluation(LongSkip):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) if self.training else Plain.forward(self, rows)


class KeptWeight(Beside):
    """A table of a weight that stays as the first pass made it."""

    kept: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.sin(self.table)
        return self.ends(self.through(self.stem(rows), self.kept))


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class OwnFunction(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        skip = Doubles.apply(self.stem(rows))
        return self.ends(self.through(skip * 2) + skip)


class CountsPasses(Plain):
    """A buffer that a pass changes before its layers and reads behind them."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(rows.mean(0), 0.1)
        return self.ends(self.through(self.stem(rows)) + self.mean)


class Forces(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        with torch.enable_grad():
            rows = rows.detach().requires_grad_()
            energy = super().forward(rows).sum()
            (force,) = torch.autograd.grad(energy, rows, create_graph=True)
        return force[:, :3]


class RenormedWords(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH, max_norm=1.0)

    def forward(self, rows: Tensor) -> Tensor:
        words = self.words(rows[:, 0].abs().long().clamp(max=8))
        return self.ends(self.through(self.stem(rows) + words))


class ClampedBeside(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        self.table.data.clamp_(-0.05, 0.05)
        with torch.no_grad():
            self.stem.weight.div_(self.stem.weight.norm())
        return super().forward(rows + self.table)


class ScaledByStatistics(CountsPasses):
    def forward(self, rows: Tensor) -> Tensor:
        self.stem.weight.data.mul_(1 + self.mean.mean())
        return super().forward(rows)


class Jittered(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        self.table.data.add_(torch.randn(len(self.table)) / 100)
        return super().forward(rows + self.table)


class ByTheirShape(Plain):
    def forward(self, rows: Tensor) -> Tensor:
        self.table.data.mul_(torch.ones_like(rows[0]) * 0.9)
        return super().forward(rows + self.table)


class SetByData(Plain):
    is_set = False

    def forward(self, rows: Tensor) -> Tensor:
        if not self.is_set:
            self.table.data.copy_(rows.mean(0))
            self.is_set = True
        return super().forward(rows + self.table)


@pytest.mark.parametrize(
    ("kind", "is_gathered", "says"),
    [
        (
            RenormedWords,
            False,
            r"RenormedWords.forward changes words.weight in place, a parameter, expected",
        ),
        (SetByData, True, r"SetByData.forward changes table in place, .* leave mesh.dp_replicate"),
        (ScaledByStatistics, False, r"changes stem.weight in place, a parameter, .* its own rows"),
        (Jittered, False, r"Jittered.forward changes table in place"),
        (ClampedBeside, True, r"ClampedBeside.forward changes stem.weight in place"),
        (ClampedBeside, False, None),
        (ByTheirShape, False, None),
        (Forces, True, r"Forces.forward takes a gradient by torch.autograd .* name no layers"),
        (Forces, False, None),
        (Plain, True, None),
    ],
)
def test_what_replicas_would_do_apart_is_refused_by_name(
    kind: type[Plain], is_gathered: bool, says: str | None
) -> None:
    model = adapted(kind)()
    model.describe_inputs(example)
    if says is None:
        model.check_replicas(is_gathered=is_gathered)
        return
    with pytest.raises(ConfigError, match=says):
        model.check_replicas(is_gathered=is_gathered)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Forces, r"Forces.forward takes a gradient by torch.autograd .* leave mesh.pp out"),
        (ChangedSkip, r"changes a tensor \[3, 8\] in place after what is before .* change a copy"),
        (
            KeptInside,
            r"in layer 2.* that layer 0 or behind it has made and does not give, .*return",
        ),
        (SkipsInEvaluation, r"hands other tensors past its layers in a second pass, in evaluation"),
        (KeptWeight, r"uses a tensor \[8\] in layer 2 or .* does not give"),
        (OwnFunction, r"uses a tensor \[3, 8\] in layer 4 or .* does not give"),
        (
            CountsPasses,
            r"mean of CountsPasses changes in each pass and is used in what is before .* layer 4",
        ),
    ],
)
def test_what_cannot_travel_is_refused_by_name(kind: type[Plain], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cut_up(adapted(kind), example, [2])


def test_a_module_that_is_followed_stays_as_it_was() -> None:
    model = seeded(adapted(KeptTable), seed=3)
    model.describe_inputs(example)
    flags = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.check_mesh(num_stages=4)
    assert model.wrapped.kept is None
    assert flags == [module.training for module in model.modules()]
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_a_weight_of_another_stage_raises_by_name_at_any_use(training: bool) -> None:
    first, last = cut_up(adapted(Plain), example, [2])
    first.train(training)
    head = cast(Plain, first.wrapped).head
    absent = head.weight
    assert isinstance(absent, Absent)
    assert absent.shape == (3, WIDTH)
    says = r"head.weight of Plain, of which nothing is on this stage .* leave mesh.pp out"
    for use in (
        lambda: head(batch()),
        lambda: absent + 1,
        lambda: absent.sum().item(),
        lambda: absent.detach(),
        lambda: bool((absent > 0).all()),
        lambda: torch.zeros(3, WIDTH).copy_(absent),
        lambda: absent.tolist(),
        lambda: absent.numpy(),
    ):
        with pytest.raises(ConfigError, match=says):
            use()
    # In what a later stage runs before its own layers too.
    last.train(training)
    last.wrapped.register_forward_pre_hook(lambda module, rows: module.stem.weight.sum().item())
    with pytest.raises(ConfigError, match=r"stem.weight of Plain, of which nothing is on this"):
        last(torch.zeros(ROWS, WIDTH), batch())


def test_a_module_that_does_otherwise_than_it_was_followed_raises() -> None:
    first, last = cut_up(adapted(LongSkip), example, [2])
    hidden, skip, rows = first(batch())
    last.wrapped.register_forward_pre_hook(lambda module, rows: (rows[0] + 0,))
    with pytest.raises(ConfigError, match=r"calls TensorBase.add where it called linear"):
        last(hidden, skip, rows)


def test_what_travels_is_in_the_precision_of_the_stages() -> None:
    def halves() -> Adapted:
        return Adapted(LongSkip().bfloat16(), layers="layers")

    found, _ = run_stages(
        halves, lambda rows: example(rows).float(), batch().bfloat16(), [2], dtype=torch.bfloat16
    )
    assert found.dtype == torch.bfloat16
    with torch.no_grad():
        expected = seeded(halves, seed=3)(batch().bfloat16())
    torch.testing.assert_close(found, expected)


class PictureSkip(nn.Module):
    """The head adds what the stem made of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, 2, 1)
        self.mid = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Keep what the stem makes for the head."""
        skip = hidden = self.down(x).relu()
        for layer in self.mid:
            hidden = layer(hidden)
        found: Tensor = self.head(torch.cat([hidden, skip], 1).mean((2, 3)))
        return found


def test_bytes_of_pictures_are_prepared_before_a_pass_is_followed() -> None:
    def made() -> Adapted:
        model = Adapted(seeded(PictureSkip, seed=0).double(), layers="mid")
        model.prepare = lambda inputs, dtype: inputs.to(dtype) / 255  # type: ignore[union-attr]
        model.describe_inputs(
            lambda rows: torch.empty(rows, 3, 8, 8, dtype=torch.uint8, device="meta")
        )
        return model

    pictures = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    stages = [made(), made()]
    for number, stage in enumerate(stages):
        stage.check_mesh(num_stages=2)
        stage.keep(range(2 * number, 2 * number + 2), first=not number, last=bool(number))
    with torch.no_grad():
        assert torch.equal(stages[1](*stages[0](pictures)), made()(pictures))
