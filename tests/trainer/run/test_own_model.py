"""Models that a caller brings: named in the settings, or given to `train`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dataio
from tests import hub
from tests.multirank import ROOT, RunRanks, launch_command, run_job
from tests.trainer.digits import write_config
from tests.trainer.foreign_models import PlainImages
from tests.trainer.run.runs import lines, run
from tonari.trainer.config.config import load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import Adapted, seeded
from tonari.trainer.run.loop import train
from tonari.trainer.run.words import Summary

PLAIN = (
    "model.kind=tests.trainer.foreign_models:PlainImages", "model.args.num_classes=2",
    "model.layers=middle",
)  # fmt: skip
IMAGES = """
[data]
train = "{shards}"
image = "png"
image_size = 8
batch_size = 8
workers.threads = 0
[shuffle]
exchange = 0.1
[run]
log_steps = 1
device = "cpu"
"""
TEXT = """
[data]
kind = "text"
train = "{text}"
sequence_length = 8
test_fraction = 0.25
batch_size = 16
workers.threads = 0
[model]
kind = "tests.trainer.foreign_models:text_gpt2"
[shuffle]
exchange = 0.3
[optimizer]
kind = "adamw"
lr = 0.01
clip = 1.0
ema = 0.9
schedule = "steps"
[mesh]
dtype = "float64"
microbatches = 4
[run]
log_steps = 1
epochs = 2
device = "cpu"
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Settings of a run on pictures that name no model."""
    text = write_config(tmp_path).read_text()
    (shards,) = [line.split('"')[1] for line in text.splitlines() if line.startswith("train")]
    path = tmp_path / "images.toml"
    cache = tmp_path / "cache"
    settings = IMAGES.format(shards=shards) + f'[data.cache]\npath = "{cache}"\n'
    path.write_text(settings)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Settings of a run on text by GPT-2."""
    hub.import_or_skip()
    rng = torch.Generator().manual_seed(1)
    words = bytes(torch.randint(97, 123, (8 * 96 + 1,), generator=rng).tolist())
    (tmp_path / "text.txt").write_bytes(words)
    path = tmp_path / "text.toml"
    path.write_text(TEXT.format(text=tmp_path / "text.txt"))
    return path


class Ambiguous(PlainImages):
    """Scatters by an operation of which torch does not know that places differ."""

    was = True

    def forward(self, images: Tensor) -> Tensor:
        """Add each logit to zeros by it."""
        type(self).was = torch.are_deterministic_algorithms_enabled()
        logits = super().forward(images)
        places = torch.arange(logits.numel())
        return torch.zeros_like(logits).put_(places, logits.detach()) + logits


def test_a_deterministic_run_refuses_what_is_not_and_leaves_torch_as_it_was(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    settings = ("run.deterministic=true", "run.epochs=1", f"run.directory={images.parent}/same")
    config = load_config(images, settings)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        train(config, model=lambda: Ambiguous(2))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert (cudnn.deterministic, cudnn.benchmark) == before
    plain = load_config(images, ("run.epochs=1", f"run.directory={images.parent}/plain"))
    assert train(plain, model=lambda: Ambiguous(2)).finished
    assert not Ambiguous.was


def test_a_module_is_named_in_the_settings_and_learns(images: Path) -> None:
    ended = run(images, "named", *PLAIN, "run.epochs=3", "optimizer.lr=0.05")
    assert isinstance(ended, Summary)
    losses = [line["loss"] for line in lines(images.parent / "named") if line["kind"] == "epoch"]
    assert losses[-1] < losses[0]


def test_a_model_a_loss_and_an_optimizer_are_given(images: Path) -> None:
    seen: list[tuple[int, ...]] = []

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        seen.append(tuple(logits.shape))
        return F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)

    given = train(
        load_config(images, (f"run.directory={images.parent / 'given'}", "run.epochs=1")),
        model=lambda: PlainImages(2), loss=loss,
        optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=0.001),
    )  # fmt: skip
    assert given.finished
    assert seen[-1] == (8, 2)


def half_the_loss(*, share: float = 0.5) -> dict[str, Any]:
    """A recipe: a loss, and the optimizer that it was written for."""
    return {
        "loss": lambda logits, target: share * F.cross_entropy(logits, target, reduction="none"),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }


HALF = ("recipe.kind=tests.trainer.run.test_own_model:half_the_loss", "recipe.args.share=0.25")


def test_a_recipe_is_named_in_the_settings_and_is_as_if_it_were_given(images: Path) -> None:
    def losses(name: str, recipe: tuple[str, ...] = (), **given: Any) -> list[float]:
        directory = images.parent / name
        overrides = [*PLAIN, *recipe, "run.epochs=2", f"run.directory={directory}"]
        train(load_config(images, overrides), quiet=True, **given)
        return [line["loss"] for line in lines(directory)]

    expected = losses("given", **half_the_loss(share=0.25))
    assert losses("named", HALF) == expected
    assert losses("both", HALF[:1], loss=half_the_loss(share=0.25)["loss"]) == expected
    assert losses("other", HALF[:1]) != expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.kind=half"], r'recipe\.kind is "half", expected package\.module:name'),
        (["recipe.args.share=1"], r"recipe\.args is given without recipe\.kind"),
        (["recipe.kind=absent:it"], r'recipe\.kind is "absent:it", which cannot be imported'),
        ([HALF[0], "recipe.args.shara=1"], r"recipe\.args\.shara is unknown; did you mean"),
        (["recipe.kind=tests.multirank:ROOT"], r"a \w*Path, expected a function"),
        (["recipe.kind=builtins:list"], r"returns a list, expected a dict with some of task, "),
        ([HALF[0].replace("half_the_loss", "model_too")], r"returns \['model'\], expected a dict"),
    ],
)  # fmt: skip
def test_a_recipe_that_gives_nothing_that_train_takes_is_refused(
    images: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(load_config(images, [*PLAIN, *overrides]), quiet=True)
    assert not Path("runs").exists()


def model_too() -> dict[str, Any]:
    return {"model": PlainImages}


@pytest.mark.multirank
def test_gpt2_with_dropout_is_the_same_run_on_every_mesh_and_after_a_resume(
    text: Path, run_ranks: RunRanks
) -> None:
    root = text.parent

    def start(num_ranks: int, *cases: tuple[str, ...]) -> None:
        given = [
            "|".join([f"run.directory={root / name}", f"data.cache={root / name / 'cache'}", *its])
            for name, *its in cases
        ]
        run_ranks("trainer/own_train", num_ranks, str(text), *given, timeout_s=240)

    start(
        2,
        ("split", "mesh.tp=2"),
        ("moved", "mesh.pp=2", "mesh.schedule=zbv", "run.epochs=1"),
        ("cut", "mesh.pp=2", "run.epochs=1"),
        ("cut", "mesh.tp=2"),
        # Both copies of the tied weight on one rank, and back there after a resume.
        ("folded", "mesh.pp=2", "mesh.schedule=zbv", "run.epochs=1"),
        ("folded", "mesh.pp=2", "mesh.schedule=zbv"),
        ("sharded", "mesh.dp_shard=2", "data.batch_size=8", "mesh.microbatches=2"),
        ("copied", "data.batch_size=8", "mesh.microbatches=2"),
    )
    start(1, ("alone",), ("moved",), ("again", "run.epochs=1"))
    steps, averaged = dict[str, list[Any]](), dict[str, list[float]]()
    for name in ("alone", "split", "moved", "cut", "folded", "again", "sharded", "copied"):
        found = lines(root / name)
        averaged[name] = [line["ema_evaluation_loss"] for line in found if line["kind"] == "epoch"]
        steps[name] = [line for line in found if line["kind"] == "step"]
    alone = steps["alone"]
    assert steps["again"] == alone[: len(steps["again"])]
    for name in ("split", "moved", "cut", "folded"):
        assert len(steps[name]) == len(alone) > 4
        for line, expected in zip(steps[name], alone, strict=True):
            for figure in ("loss", "gradient_norm"):
                assert line[figure] == pytest.approx(expected[figure], rel=1e-9), (line, figure)
        assert averaged[name] == pytest.approx(averaged["alone"], rel=1e-9), name
    for line, expected in zip(steps["sharded"], steps["copied"], strict=True):
        assert line["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-9)


@pytest.mark.multirank
def test_the_example_trains_over_a_pipeline(text: Path) -> None:
    program = (
        "from tests import hub; hub.import_or_skip(); import sys; "
        "from tonari.train.command import main; sys.exit(main(sys.argv[1:]))"
    )
    example = str(ROOT / "examples" / "hf_gpt2.toml")
    settings = [
        f"data.train={text.parent / 'text.txt'}", f"run.directory={text.parent / 'example'}",
        f"data.cache={text.parent / 'example' / 'cache'}", "data.sequence_length=8",
        "model.args.depth=2", "model.args.width=8", "run.log_steps=1", "mesh.pp=2",
        "data.test_fraction=0", "run.device=cpu",
    ]  # fmt: skip
    command = [*launch_command("mpiexec", 2), "-c", program, example, *settings]
    status, output = run_job(command, env=None, timeout_s=90)
    assert status == 0, output
    assert len(lines(text.parent / "example")) > 2


class Meddles(nn.Module):
    """Computes between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        """Add one between two layers."""
        for layer in self.layers:
            values = layer(values) + 1
        return values


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), "model.kind is missing; set it in the file, .*train"),
        (("model.kind=nowhere:Net",), r'"nowhere:Net", which cannot be imported: .*PYTHONPATH'),
        (("model.kind=torch:nowhere",), r'"torch:nowhere", which cannot be imported'),
        (("model.kind=small_cn",), r"\"small_cn\", expected one of 'small_cnn', .*package.module:"),
        ((*PLAIN[:2], "model.layers=nothing"), r"no module 'nothing'; .*hold a list are middle"),
        ((*PLAIN, "model.width=3"), r"model.width is given, but .* takes args, layers only"),
        (("model.kind=builtins:dict",), "the model is dict, expected a torch.nn.Module"),
    ],
)
def test_what_does_not_fit_is_refused_before_data_is_staged(
    images: Path, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run(images, "refused", *overrides)
    assert not (images.parent / "cache").exists()


def test_a_model_that_is_given_and_named_is_refused(images: Path) -> None:
    with pytest.raises(ConfigError, match=r'kind is "small_cnn".* is given model=, .*; leave'):
        train(load_config(images, ("model.num_classes=2",)), model=lambda: PlainImages(2))
    assert not (images.parent / "cache").exists()


def test_a_loss_that_is_not_one_a_row_is_refused(images: Path) -> None:
    config = load_config(images, (f"run.directory={images.parent / 'loss'}",))
    with pytest.raises(ConfigError, match=r"the loss of 2 rows is \[\], expected \[2\].*none"):
        train(config, model=lambda: Adapted(PlainImages(2), layers="middle"), loss=F.cross_entropy)
    assert not (images.parent / "cache").exists()


def test_a_module_whose_sizes_the_first_batch_decides_is_refused(images: Path) -> None:
    config = load_config(images, (f"run.directory={images.parent / 'lazy'}",))
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    with pytest.raises(ConfigError, match=r"Sequential has weights without a size: 1.weight, 1.b"):
        train(config, model=lambda: lazy)
    assert not (images.parent / "cache").exists()


def test_fields_that_draw_are_no_evaluation_s(images: Path) -> None:
    fields: dict[str, dataio.Field] = {
        "image": dataio.Image("png", crop=dataio.RandomCrop(6), flip=0.5),
        "label": dataio.Int("cls"),
    }
    config = load_config(images, (f"run.directory={images.parent / 'cut'}", "run.epochs=2"))
    config = replace(config, data=replace(config.data, test=config.data.train))
    with pytest.raises(ConfigError, match=r"fields: 'image' is cropped .*evaluation_fields="):
        train(config, model=lambda: PlainImages(2), fields=fields)
    assert not (images.parent / "cache").exists()
    middle = fields | {"image": dataio.Image("png", crop=dataio.CenterCrop(6))}
    ended = train(config, model=lambda: PlainImages(2), fields=fields, evaluation_fields=middle)
    assert ended.last is not None
    assert float(ended.last["evaluation_loss"] or 0) > 0


def test_a_module_without_layers_is_refused_over_a_pipeline() -> None:
    model = Adapted(PlainImages(2))
    with pytest.raises(ConfigError, match=r"mesh.pp: PlainImages names no layers .*layers="):
        model.check_mesh(num_stages=2)


def test_a_plan_that_names_no_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp_plan: heads names no layer of PlainImages"):
        Adapted(PlainImages(2), tp_plan={"heads": "colwise"})
    with pytest.raises(ConfigError, match=r'style "diagonal", expected one of colwise'):
        Adapted(PlainImages(2), tp_plan={"head": "diagonal"})


def test_a_module_that_computes_between_its_blocks_is_refused_over_a_pipeline() -> None:
    model = Adapted(Meddles(), layers="layers")
    model.describe_inputs(lambda rows: torch.empty(rows, 4, device="meta"))
    with pytest.raises(ConfigError, match=r"layer 1 of Meddles takes another tensor"):
        model.check_mesh(num_stages=2)


class Maps(nn.Module):
    """Layers that give their attention maps too, as GPT-J's and Bloom's do.

    Args:
        adds: Whether the next layer is given the map.
    """

    def __init__(self, *, adds: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_GivesMap() for _ in range(3)])
        self.adds = adds

    def forward(self, values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Give what the last layer gives, and all maps."""
        maps: list[Tensor] = []
        seen = None
        for layer in self.layers:
            values, seen = layer(values, seen if self.adds else None)
            maps.append(seen)
        return values, maps


class _GivesMap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, values: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weigh the features by themselves."""
        given = self.line(values).softmax(dim=-1)
        return values * given if seen is None else values * given * seen, given


def test_what_blocks_give_beside_is_left_out_where_nobody_uses_it() -> None:
    values = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    whole = seeded(Maps, seed=3)
    hidden = values
    for blocks in (range(1), range(1, 2), range(2, 3)):
        stage = Adapted(seeded(Maps, seed=3), layers="layers")
        stage.describe_inputs(lambda rows: torch.empty(rows, 4, device="meta"))
        first, last = blocks.start == 0, blocks.stop == 3
        stage.keep(blocks, first=first, last=last)
        given = stage(values) if first else stage(hidden, values)
        hidden = given if last else given[0]
    assert torch.equal(hidden, whole(values)[0])
