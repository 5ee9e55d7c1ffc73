"""Every argument of every public class is checked against what it may be, before any effect."""

import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import dataio
import importance
import shuffle
from dataio.world import run_threads, single_world, thread_worlds
from dataio.world.discover import SingleTransport
from dataio.world.topology import Topology
from tests.dataio.source.shards import numbered, write_tar
from tests.memory_source import FIELDS, MemorySource

ANY: Any = SimpleNamespace(dataio=dataio, shuffle=shuffle, importance=importance)
"""The packages without their types, which would not let wrong values pass."""
LOADER: dict[str, Any] = {"source": MemorySource(20), "batch_size": 4, "fields": FIELDS}
WRONG = [object(), -1, math.nan, "nonsense"]
"""Each argument refuses one of these at least, and the first always."""


def world():
    return single_world()


def arguments() -> dict[type, dict[str, Any]]:
    """For each public class arguments that it takes; those left out have defaults."""
    model = torch.nn.Linear(2, 2)
    return {
        dataio.Array: {"key": "x", "shape": (2,), "dtype": "float32"},
        dataio.Bytes: {"key": "x"},
        dataio.ByStep: {"weights": [(0, {"web": 1})]},
        dataio.Float: {"key": "x"},
        dataio.Image: {"key": "x"},
        dataio.CenterCrop: {"size": 2},
        dataio.ImageSize: {"key": "x"},
        dataio.Mask: {"key": "x"},
        dataio.Pad: {"size": 2},
        dataio.RandomCrop: {"size": 2},
        dataio.RandomPatch: {"shape": (2,), "num": 3},
        dataio.RandomResizedCrop: {"size": 2},
        dataio.Resize: {"size": 2},
        dataio.ResizeLong: {"size": 2},
        dataio.ResizeShort: {"size": 2},
        dataio.Int: {"key": "x"},
        dataio.Text: {"key": "x"},
        dataio.Tokens: {"key": "x"},
        dataio.DatasetSource: {"dataset": TensorDataset(torch.ones(3)), "name": "n"},
        dataio.NumpySource: {"arrays": {"x": np.ones(3)}},
        dataio.TransformedSource: {
            "source": MemorySource(3), "fields": FIELDS, "transform": lambda sample: sample,
        },
        dataio.Retry: {},
        dataio.Throttle: {"path": "state"},
        dataio.Tuples: {"batches": []},
        dataio.NodeCache: {},
        dataio.Reports: {},
        dataio.Sequences: {"length": 8},
        dataio.Shards: {"names": "train.tar"},
        dataio.Anemoi: {"dataset": "a.zarr"},
        dataio.ArrayFiles: {"names": "a.h5"},
        dataio.Tiles: {"axes": (0,), "parts": (2,)},
        dataio.Staging: {},
        dataio.Workers: {},
        dataio.World: {"transport": SingleTransport(), "topology": Topology((0,))},
        dataio.Loader: {**LOADER, "world": world(), "cache": "never-made"},
        dataio.Mixture: {"loaders": {}, "weights": {}},
        shuffle.Global: {},
        shuffle.Local: {},
        shuffle.Partial: {},
        shuffle.ModelExchange: {"model": model, "world": world(), "every": 2},
        importance.Auto: {},
        importance.CostAware: {},
        importance.Forgetting: {},
        importance.Full: {},
        importance.InfoBatch: {},
        importance.Kakurenbo: {},
        importance.KeepAgreed: {},
        importance.Learnable: {},
        importance.RandomPrune: {},
        importance.Weighted: {},
        importance.SelectiveBackprop: {},
        importance.SeTa: {},
        importance.StoppedLearning: {},
    }  # fmt: skip


def public_classes():
    for package in (dataio, shuffle, importance):
        for name in package.__all__:
            value = getattr(package, name)
            is_abstract = getattr(value, "_is_protocol", False)
            # Candidates and selections are what the loader and a policy hand to one another, jobs
            # and watchdogs what `join` hands to a loop.
            handed = (dataio.Candidates, dataio.Selection, dataio.Job, dataio.LiveJob)
            takes_anything = value in (dataio.AsList, dataio.Watchdog, *handed) or is_abstract
            if inspect.isclass(value) and not takes_anything and not issubclass(value, Exception):
                yield value


CASES = [
    (kind, name)
    for kind in public_classes()
    for name, its in inspect.signature(kind).parameters.items()
    if its.kind is not its.VAR_POSITIONAL
]


def test_a_loader_takes_at_most_fifteen_options():
    parameters = inspect.signature(dataio.Loader).parameters.values()
    options = [each.name for each in parameters if each.default is not inspect.Parameter.empty]
    assert len(options) <= 15, options


def test_every_public_class_is_here():
    assert set(arguments()) == set(public_classes())
    assert len(CASES) > 80


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_each_argument_refuses_what_it_may_not_be(tmp_path, monkeypatch, kind, name):
    monkeypatch.chdir(tmp_path)
    given = arguments()[kind]
    with pytest.raises((TypeError, ValueError)) as caught:
        kind(**{**given, name: WRONG[0]})
    said = str(caught.value)
    assert re.match(rf"{kind.__name__}: {name} is <object object.*, expected .*; ", said), said
    assert list(tmp_path.iterdir()) == [], "no directory was made"


WRONG_FOR_A_LOADER = {
    "on_error": ("ignore", r'on_error is .ignore., expected "raise" or "skip"'),
    "shuffle": (shuffle.Partial, r"shuffle is the class Partial, .*Partial\("),
    "importance": ("kakurenbo", r"importance is .kakurenbo., .*importance\.Kakurenbo"),
    "fields": ({"image": "jpg"}, r"fields is \{'image': 'jpg'\}, .*dataio\.Image"),
    "source": (
        5,
        "source is 5, expected .*; give shards by their names, a dataset that has __len__",
    ),
    "transform": (3, "transform is 3, expected a function"),
    "seed": ("0", "seed is '0', expected a whole number"),
    "workers": (2, r"workers is 2, expected .*Workers"),
    "staging": ("overlap", r"staging is .overlap., expected .*Staging"),
    "reports": (False, r"reports is False, expected .*Reports"),
    "cache": (3, "cache is 3, expected a str, a path or a dataio.NodeCache"),
    "batch_size": (True, "batch_size is True, expected a whole number"),
    "drop_last": (1, "drop_last is 1, expected True or False"),
    "device": ("gpu", "device is 'gpu', expected one that torch knows"),
    "world": ("mpi", r"world is 'mpi', .*discover_world"),
}


@pytest.mark.parametrize("name", WRONG_FOR_A_LOADER)
def test_a_loader_says_what_is_wrong_on_all_ranks_before_any_effect(tmp_path, name):
    value, message = WRONG_FOR_A_LOADER[name]
    cache = tmp_path / "cache"

    def run(its_world):
        given = {**LOADER, "cache": cache, "world": its_world, name: value}
        with pytest.raises((TypeError, ValueError), match=message):
            dataio.Loader(**given)
        return True

    assert run_threads(thread_worlds([1, 1], timeout_s=5.0), run) == [True, True]
    assert not cache.exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ANY.dataio.Image("jpg", channels=2), "channels is 2"),
        (
            lambda: ANY.dataio.Image("jpg", resize="224"),
            r"Image: resize is '224', expected",
        ),
        (lambda: ANY.dataio.Int(3), "Int: key is 3, expected a str"),
        (lambda: ANY.dataio.Array("x", (3,), np.float32), 'Array: dtype .*"float32"'),
        (lambda: ANY.shuffle.Partial("0.1"), "Partial: exchange is '0.1', expected a number"),
        (lambda: ANY.shuffle.Global(moves="no"), "Global: moves is 'no', expected True or False"),
        (
            lambda: ANY.importance.Kakurenbo("0.3"),
            "Kakurenbo: fraction is '0.3', expected",
        ),
        (lambda: ANY.importance.Full(columns=("lost",)), "columns is .*did you mean 'loss'"),
        (
            lambda: ANY.dataio.NodeCache(verify="Always"),
            r'NodeCache: verify is .Always., expected "once", "always" or "never"',
        ),
        (
            lambda: ANY.dataio.NodeCache(quota="much"),
            r"NodeCache: quota: found .much., expected a ",
        ),
        (lambda: ANY.dataio.Workers(threads=2.5), "Workers: threads is 2.5, expected a whole"),
        (
            lambda: ANY.dataio.Workers(processes=-1),
            "Workers: processes is -1, expected a whole number >= 0",
        ),
        (
            lambda: ANY.dataio.Workers(prefetch=-1),
            "Workers: prefetch is -1, expected a whole number >= 0",
        ),
        (
            lambda: ANY.dataio.Staging(readers=0),
            "Staging: readers is 0, expected a whole number >= 1",
        ),
        (
            lambda: ANY.dataio.Staging(bandwidth=math.nan),
            "Staging: bandwidth is nan, expected a number >= 0",
        ),
        (
            lambda: ANY.dataio.Staging(when="after"),
            'Staging: when is .after., expected "before" or "overlap"',
        ),
        (lambda: ANY.dataio.Retry(retry_s=-1), "retry_s"),
        (lambda: ANY.dataio.Tuples([], "image", 3), r"Tuples: names is \('image', 3\), expected"),
        (lambda: ANY.dataio.Throttle("state", bytes_per_s=-1), "bytes_per_s is -1"),
        (lambda: ANY.dataio.open_source(5), "open_source: spec is 5"),
        (lambda: ANY.dataio.open_source([]), "open_source: spec is empty"),
    ],
)
def test_others_say_it_too(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_calls_are_checked_too(tmp_path):
    with ANY.dataio.Loader(
        **LOADER, cache=tmp_path, world=world(), reports=ANY.dataio.Reports(progress=False)
    ) as loader:
        batch = next(iter(loader))
        for call in (
            lambda: next(loader.epochs("3")), lambda: loader.set_epoch(1.5),
            lambda: loader.max_steps("1"), lambda: loader.evaluation(3), lambda: loader.save(3),
            lambda: loader.restore(3), lambda: loader.load_state_dict(3),
            lambda: loader.report(3, torch.ones(4)), lambda: loader.report(batch, 1.0),
        ):  # fmt: skip
            with pytest.raises(TypeError, match=r"Loader\.\w+: \w+ is .*, expected"):
                call()


@pytest.mark.parametrize("as_list", [False, True])
def test_a_path_is_a_source(tmp_path, as_list):
    path = write_tar(tmp_path / "train.tar", numbered(8))
    source: Any = [path] if as_list else path
    given: dict[str, Any] = {"fields": {"label": dataio.Int("cls")}, "batch_size": np.int64(4)}
    with dataio.Loader(
        source,
        cache=tmp_path / "cache",
        world=world(),
        reports=dataio.Reports(progress=False),
        **given,
    ) as loader:
        assert len(list(loader)) == 2
        assert len(loader.evaluation(source)) == 2
    with dataio.Loader(
        str(path),
        cache=tmp_path / "cache",
        world=world(),
        reports=dataio.Reports(progress=False),
        **given,
    ) as loader:
        assert loader.stats()["staging_s"] == 0, "the same cache"
    assert Path(path).exists()
