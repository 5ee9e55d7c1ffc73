"""What a policy or a model takes can be set in every file, and one key means one thing in all."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dataio
import importance
from dataio.base.checked import Count
from dataio.plan.policies import Local, Shuffle
from dataio.world import World, run_threads, thread_worlds
from importance import policies
from shuffle import Partial
from tonari.ablate.study import load_study
from tonari.trainer.config.config import Config, build_config
from tonari.trainer.config.kinds import hints_of
from tonari.trainer.config.model import MODELS
from tonari.trainer.config.model import NAMED as MODEL
from tonari.trainer.config.shuffle import SHUFFLES
from tonari.trainer.errors import ConfigError
from tonari.trainer.models import Rope
from tonari.trainer.run.build import make_importance, make_model

VALUES: tuple[object, ...] = (
    0.25, 3, 0.5, 7, True, False, "pool", "loss", "none", "group", "token", "field", ["loss"],
    "zstd", [0.2, 0.5, 0.7], [1, 0.5], [0.5, 1.0, 2.0],
)  # fmt: skip
"""As a file has them; each setting of each policy takes one of these that is not its default."""


def settings() -> Iterator[tuple[str, str]]:
    for name, its in policies().items():
        yield from ((name, setting) for setting in inspect.signature(its).parameters)


def another(made_by: Any, setting: str) -> Any:
    """Find a value that a class takes and that is not its default."""
    default = inspect.signature(made_by).parameters[setting].default
    for value in VALUES:
        try:
            made_by(**{setting: value})
        except (ValueError, TypeError):
            continue
        if value != default:
            return value
    raise AssertionError(f"add a value for {setting} of {made_by}")


def as_run(tables: dict[str, Any], *, model: str = "small_cnn") -> Config:
    models = {"model": {"kind": model, "num_classes": 10}}
    return build_config({"data": {"train": "x"}} | models | tables)


def as_arm(path: Path, importance: dict[str, Any]) -> Config:
    def toml(value: object) -> str:
        return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)

    lines = [f"importance.{key} = {toml(value)}" for key, value in importance.items()]
    path.write_text(
        '[study]\nbaseline = "a"\n[train.data]\ntrain = "x"\ntest = "x"\n[train.model]\n'
        'kind = "small_cnn"\nnum_classes = 10\n[arms.a]\n' + "\n".join(lines)
    )
    return load_study(path).arms[0].config(0)


@pytest.mark.parametrize(("name", "setting"), list(settings()))
def test_every_setting_of_every_policy_can_be_set_in_every_file(
    tmp_path: Path, name: str, setting: str
) -> None:
    made_by = policies()[name]
    value = another(made_by, setting)
    wanted = getattr(made_by(**{setting: value}), setting)
    run = as_run({"importance": {"kind": name, setting: value}})
    study = as_arm(tmp_path / "s.toml", {"kind": name, setting: value})
    for made in map(make_importance, (run, study)):
        assert type(made) is made_by
        assert np.array_equal(getattr(made, setting), wanted)


NONE: dict[object, object] = {Count | None: 0, str | None: ""}
"""What a file says in place of None, by the annotation of a setting."""


@pytest.mark.parametrize(
    ("name", "setting"), [its for its in settings() if hints_of(policies()[its[0]])[its[1]] in NONE]
)
def test_in_a_file_0_or_an_empty_text_says_none_where_a_policy_takes_it(
    tmp_path: Path, name: str, setting: str
) -> None:
    none = NONE[hints_of(policies()[name])[setting]]
    run = as_run({"importance": {"kind": name, setting: none}})
    study = as_arm(tmp_path / "s.toml", {"kind": name, setting: none})
    for made in map(make_importance, (run, study)):
        assert getattr(made, setting) is None


def test_every_policy_that_the_package_exports_has_a_name_and_a_module_of_its_own() -> None:
    exported = [getattr(importance, name) for name in importance.__all__]
    classes = {its for its in exported if inspect.isclass(its)}
    assert classes == set(policies().values())
    assert len(policies()) == len(classes) == 13


@pytest.mark.parametrize("kind", MODELS)
def test_every_setting_of_every_model_can_be_set_in_a_file(kind: str) -> None:
    text = kind in ("gpt", "llama")
    values: dict[str, object] = {
        "patch": 8, "num_classes": 4, "heads": 4, "width": 16, "depth": 8, "image_size": 16,
        "kv_heads": 2, "head_width": 8, "rope": {"theta": 500.0}, "tied": True, "norm": "batch",
        "pooling": "token", "norm_eps": 1e-3, "inner_width": 24, "vocabulary": 300,
        "layers": [1, 1, 2, 1],
    }  # fmt: skip
    takes = MODEL.takes(kind)
    given = {name: values[name] for name in takes}
    data = {"train": "x", "kind": "text" if text else "images"}
    config = build_config({"data": data, "model": {"kind": kind, **given}})
    in_python = {**given, **({"rope": Rope(theta=500.0)} if "rope" in takes else {})}
    with torch.device("meta"):
        made, wanted = make_model(config), MODELS[kind](**in_python)  # type: ignore[arg-type]
    assert repr(made) == repr(wanted)
    shapes = [(name, its.shape) for name, its in made.state_dict().items()]
    assert shapes == [(name, its.shape) for name, its in wanted.state_dict().items()]
    assert getattr(made, "rope", None) == getattr(wanted, "rope", None)


def test_what_the_data_decides_of_a_model_is_said_to_be_set_there() -> None:
    for name, key in MODEL.elsewhere.items():
        kind = next(kind for kind, its in MODELS.items() if name in hints_of(its))
        with pytest.raises(ConfigError, match=f"model.{name} is given, but it is set by {key}"):
            build_config({"data": {"train": "x"}, "model": {"kind": kind, name: 3}})


@pytest.mark.parametrize("kind", SHUFFLES)
def test_every_setting_of_every_shuffle_can_be_set_in_a_file(kind: str) -> None:
    for setting in hints_of(SHUFFLES[kind]):
        value = another(SHUFFLES[kind], setting)
        wanted = SHUFFLES[kind](**{setting: value})
        assert as_run({"shuffle": {"kind": kind, setting: value}}).shuffle.make() == wanted


def test_a_shuffle_that_is_left_out_is_the_same_everywhere(tmp_path: Path) -> None:
    assert as_run({}).shuffle.make() == Local()
    assert as_arm(tmp_path / "s.toml", {}).shuffle.make() == Local()
    left_out, local, partial = (
        order_of(tmp_path / name, its)
        for name, its in (("none", None), ("local", Local()), ("partial", Partial(0.5)))
    )
    assert left_out == local != partial


def order_of(root: Path, its: Shuffle | None) -> list[list[int]]:
    """List the samples of three epochs on each of two nodes."""

    def train(world: World) -> list[int]:
        loader = dataio.Loader(
            {"x": np.arange(40.0)}, batch_size=2, fields={"x": dataio.Float("x")}, world=world,
            cache=root / str(world.rank), shuffle=its, workers=dataio.Workers(threads=0),
            reports=dataio.Reports(progress=False),
        )  # fmt: skip
        with loader:
            return [i for _ in loader.epochs(3) for b in loader for i in b["sample_id"].tolist()]

    return run_threads(thread_worlds([1, 1], timeout_s=20), train)
