"""A function of torch's that is called on a tile computes what it would of the whole, or raises."""

import contextlib
import re
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.studies.tiles import measure, played
from tests.trainer.tiles.cases import CALLS, LAYERS, REFUSED, SHAPE
from tonari.trainer.errors import ConfigError
from tonari.trainer.models.adapted import Adapted
from tonari.trainer.tiles import Grid, TiledTensor, tile_model, tile_stages, tiled
from tonari.trainer.tiles.exchange import FILLED, Move
from tonari.trainer.tiles.grid import even_starts, starts_within
from tonari.trainer.tiles.positions import CHANGES, POSITIONWISE
from tonari.trainer.tiles.tensor import FUNCTIONS, METADATA


@pytest.fixture
def grid() -> Iterator[Grid]:
    """The third of four ranks, whose messages go nowhere."""
    with played(4, 2) as group:
        yield Grid((2, 2), group)


@pytest.fixture
def tile(grid: Grid) -> TiledTensor:
    tile = tiled(grid.part_of(torch.rand(SHAPE), 2), grid, SHAPE[2:])
    tile.learns = True
    return tile


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_what_needs_the_whole_sample_is_refused(name: str, tile: TiledTensor) -> None:
    with pytest.raises((ConfigError, TypeError)) as refused:
        REFUSED[name](tile)
    # What Python's operators make of a refusal.
    assert "tiles: " in str(refused.value) or refused.type is TypeError, refused.value


def test_no_other_function_of_torchs_gives_anything(tile: TiledTensor) -> None:
    """Call each with arguments of several kinds; most raise for these alone, none gives a value."""
    overridable = torch.overrides.get_overridable_functions()
    others = [
        (str(holder), func)
        for holder, functions in overridable.items()
        for func in functions
        if func not in FUNCTIONS and func not in METADATA
    ]
    assert len(others) > 900
    given = set()
    for (_, func), more in product(others, [(), (1,), (0, 1), ((2, 3),), (tile,)]):
        try:
            value = func(tile, *more)
        except (ConfigError, TypeError, AttributeError, RuntimeError, ValueError):
            continue
        if value is not NotImplemented:
            given.add(getattr(func, "__name__", str(func)))
    assert given == {"__div__"}  # which calls div


SAME = {
    "concat", "concatenate", "_threshold", "log_sigmoid", "dropout_", "feature_dropout",
    "__matmul__", "layer_norm", "__repr__", "__str__", "__format__", "__get__", "torch.cpu",
    "_is_view", "register_hook",
}  # fmt: skip
"""Other names of what is compared; the norm is in a model."""


def test_every_function_that_is_computed_is_compared_with_one_process(
    tile: TiledTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, known = set[str](), dict(FUNCTIONS)
    for func, compute in known.items():

        def seen(func: Any, *args: Any, compute: Any = compute, **named: Any) -> Any:
            called.add(func.__name__)
            return compute(func, *args, **named)

        monkeypatch.setitem(FUNCTIONS, func, seen)
    for call in CALLS.values():
        call(tile.double())
    for make in LAYERS.values():
        make().double()(tile.double())
    names = {getattr(func, "__name__", "1d") for func in known} - {*POSITIONWISE, *CHANGES}
    # Those of other numbers of dimensions are in models; properties and other names remain.
    others = {name for name in names - called if not name.endswith(("1d", "3d"))}
    assert others == SAME


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "addcdiv": (0.6, 0.7), "addcmul": (0.6, 0.7), "lerp": (0.6, 0.7), "where": (0.6, 0.7),
    "masked_fill": (torch.tensor(True), 0.5), "full_like": (0.5,), "threshold": (0.5, 0.1),
    "clamp": (0.2, 0.6), "clip": (0.2, 0.6), "to": (torch.float32,),
}  # fmt: skip


@pytest.mark.parametrize("name", [*POSITIONWISE, *CHANGES])
def test_each_position_is_computed_by_itself(name: str, grid: Grid) -> None:
    plain = name.strip("_").removeprefix("i") if name in CHANGES else name
    is_of_bits = re.fullmatch("_*i?(bitwise_)?(and|or|xor|not|invert|rand|ror)_*|where", name)
    compared = 0
    for holder, kind in product((torch, Tensor, F), (Tensor, float)):
        if not hasattr(holder, name) or isinstance(getattr(holder, name), torch.dtype):
            continue
        func = getattr(holder, name)
        sample = torch.rand(SHAPE) * 0.8 + 0.1
        if is_of_bits:
            sample = sample > 0.5
        more = ARGUMENTS.get(plain, (True,) if is_of_bits else (0.5,))
        if kind is Tensor:
            more = tuple(
                torch.full(SHAPE, each) if isinstance(each, float | bool) else each for each in more
            )
        given = []
        for values in (tiled(grid.part_of(sample, 2).clone(), grid, SHAPE[2:]), sample.clone()):
            for args in ((values, *more), (values,)):
                with contextlib.suppress(TypeError, RuntimeError):
                    given.append(func(*args))
                    break
        if len(given) == 2 and isinstance(given[1], Tensor):
            torch.testing.assert_close(given[0].local, grid.part_of(given[1], 2), equal_nan=True)
            compared += 1
    assert compared, name


def test_a_model_names_the_layer_that_cannot_be_tiled_before_it_trains(grid: Grid) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.attention = nn.Conv2d(3, 8, 3), nn.MultiheadAttention(8, 2)

        def forward(self, values: Tensor) -> Tensor:
            tokens = self.stem(values).permute(0, 2, 3, 1)[0]
            return cast(Tensor, self.attention(tokens, tokens, tokens)[0])

    model = Attends()
    with pytest.raises(ConfigError, match=r"tiles: attention \(MultiheadAttention\): .*; compute"):
        tile_model(model, grid, (3, 13, 22))
    assert model(torch.rand(1, 3, 13, 22)).shape == (11, 20, 8)  # it is as it was


def test_a_model_that_needs_numbers_is_tried_as_it_is_called(
    grid: Grid, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.AdaptiveMaxPool2d(1))
    tile_model(model, grid, (3, 13, 22))
    assert "cannot be tried without data (Tensor.item() cannot be called on meta" in caplog.text
    with pytest.raises(ConfigError, match=r"tiles: 1 \(AdaptiveMaxPool2d\): .*; compute"):
        model(torch.rand(1, 3, 6, 11))


def test_the_stages_of_a_module_that_is_no_model_of_stages_are_refused(grid: Grid) -> None:
    model = Adapted(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), layers="")
    model.describe_inputs(lambda rows: torch.empty(rows, 3, 13, 22, device="meta"))
    tile_stage = tile_stages(model, grid, (3, 13, 22))
    model.keep(range(1), first=True, last=False)
    with pytest.raises(ConfigError, match=r"mesh.pp: the stages of Sequential .*; leave one"):
        tile_stage(model)


def test_what_is_not_this_ranks_tile_is_refused(grid: Grid) -> None:
    model = tile_model(nn.Conv2d(3, 4, 3), grid, (3, 13, 22))
    with pytest.raises(ConfigError, match=r"expected 6 in dimension 2, of 13 in 2 x 2 parts; give"):
        model(torch.rand(1, 3, 13, 22))
    with pytest.raises(ConfigError, match=r"parts are \[3, 1\], expected a product of 4"):
        Grid((3, 1), grid.group)
    with pytest.raises(ConfigError, match=r"3 positions cannot be cut into 4; choose fewer"):
        even_starts(3, 4)


def test_passes_without_gradients_are_taken_as_a_whole(grid: Grid) -> None:
    model = tile_model(nn.Conv2d(3, 4, 3), grid, (3, 13, 22), try_it=False)
    local = torch.rand(1, 3, 6, 11)
    with torch.no_grad():
        assert model(local).argmax(1).shape == (1, 11, 20)
    output = model(local)
    with torch.no_grad():
        assert output.detach().sigmoid().local.grad_fn is None
        assert output.sigmoid().local.grad_fn is None


def test_half_precision_is_as_autocast_has_it(grid: Grid) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    tile_model(model, grid, (3, 13, 22), try_it=False)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.rand(1, 3, 6, 11))
    assert output.dtype == output.local.dtype == torch.bfloat16
    output.float().square().mean().backward()
    assert all(
        each.grad is not None and each.grad.dtype == torch.float32 for each in model.parameters()
    )


@pytest.mark.parametrize(
    ("case", "kept", "peak"),
    [
        ("CosmoFlow", (0.52, 0.27), (0.57, 0.32)),
        ("U-Net, volumes", (0.52, 0.27), (0.57, 0.32)),
        pytest.param("ViT, pictures", (0.57, 0.29), (0.58, 0.32), marks=pytest.mark.thorough),
    ],
)
def test_a_rank_keeps_its_share_and_needs_little_more_at_a_time(
    case: str, kept: tuple[float, float], peak: tuple[float, float]
) -> None:
    for number, parts in enumerate([(2,), (2, 2)]):
        found = measure(case, parts)
        assert found["kept_fraction"] < kept[number]
        assert found["peak_fraction"] < peak[number]


def test_keys_that_were_changed_behind_attention_are_not_gathered_again() -> None:
    with played(2, 0) as group:
        places = tiled(torch.rand(1, 2, 4, 3, requires_grad=True), Grid((2,), group), (8, 3))
        keys = cast(TiledTensor, places * 2)
        looked = cast(TiledTensor, F.scaled_dot_product_attention(places, keys, keys))
        keys.local.zero_()
        with pytest.raises(RuntimeError, match="tiles: keys or values were changed in place"):
            looked.local.sum().backward()


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_what_each_rank_needs_comes_once_and_in_order(
    size: int, parts: int, low: int, high: int, around: bool
) -> None:
    size += parts
    held = even_starts(size, parts)
    assert [b - a for a, b in pairwise(held)] == sorted((b - a for a, b in pairwise(held)))[::-1]
    low, high = min(low, size), min(high, size)
    needed = tuple((a - low, b + high) for a, b in pairwise(held))
    grid = Grid((1,))
    move = Move(grid, 0, 0, held, needed, None if around else 0.0)
    for (first, end), spans in zip(needed, move.spans, strict=True):
        found: list[int] = []
        for span in spans:
            start = held[span.holder] + span.start
            found += (
                [*range(start, start + span.size)] if span.holder != FILLED else [-1] * span.size
            )
        inside = range(size)
        assert found == [
            at % size if around else at if at in inside else -1 for at in range(first, end)
        ]


@given(st.lists(st.integers(-5, 30), max_size=4), st.integers(1, 25))
def test_cuts_leave_no_part_empty(inner: list[int], size: int) -> None:
    starts = starts_within(sorted(inner), size)
    if starts is None:
        assert size <= len(inner)
    else:
        assert starts[0] == 0
        assert starts[-1] == size
        assert all(a < b for a, b in pairwise(starts))
