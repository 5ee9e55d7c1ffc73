"""Torch's insides are used in one folder, and what is used is there on the torch at hand."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.multirank import ROOT
from tonari.trainer import private
from tonari.trainer.private import autograd, foreach, modules, storages

PACKAGES = ("benchmarks", "dataio", "examples", "importance", "shuffle", "tonari")
FOLDER = ROOT / "tonari" / "trainer" / "private"
DATA_LAYER = ROOT / "dataio" / "batch" / "feed.py"
MODULES = [module.name for module in pkgutil.iter_modules(private.__path__)]
OPERATORS = "torch.ops."
PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")
OF_OBJECTS = {
    "_apply", "_backward_hooks", "_buffers", "_cdata", "_concatenate", "_execution_engine",
    "_flatten", "_forward_hooks", "_forward_pre_hooks", "_fsdp_param_groups", "_is_view",
    "_local_tensor", "_modules", "_non_persistent_buffers_set", "_parameters",
    "_post_accumulate_grad_hooks", "_post_forward", "_pre_forward", "_register_post_backward_hook",
    "_schema", "_type", "_version",
}  # fmt: skip
"""Of tensors, storages, modules, meshes, operators and FSDP's state, whatever holds the object."""


def uses(source: str) -> Iterator[str]:
    """Find the names of torch that begin with an underscore, and what patches torch."""
    nodes = [*ast.walk(ast.parse(source))]
    # What was imported from torch -> its full name
    known = {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [each for each in node.names if each.name.startswith("torch.") and each.asname]
            known |= {str(each.asname): each.name for each in found}
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    own = {ast.unparse(each) for each in nodes if isinstance(getattr(each, "ctx", None), ast.Store)}
    own |= {f"self.{each.name}" for each in nodes if isinstance(each, ast.FunctionDef)}
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute):
            first, _, others = ast.unparse(node).partition(".")
            names = [f"{known.get(first, first)}.{others}"]
            if node.attr in OF_OBJECTS and not (first == "self" and names[0] in own):
                yield names[0]
        elif isinstance(node, ast.Constant) and node.value in OF_OBJECTS:
            yield str(node.value)  # as `getattr` takes it
        elif isinstance(node, ast.Assign):
            for each in node.targets:
                first, _, others = ast.unparse(each).partition(".")
                if isinstance(each, ast.Attribute) and first in known:
                    yield ast.unparse(node)
        for name in names:
            of_torch = PRIVATE.fullmatch(name) and not name.startswith(OPERATORS)
            if of_torch:
                yield name
        if isinstance(node, ast.Call) and "patch" in ast.unparse(node.func):
            root = re.match(r"\w*", ast.unparse(node.args[0]) if node.args else "")
            if root is not None and root[0] in known:
                yield ast.unparse(node)


def test_no_other_file_touches_what_torch_does_not_promise() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): used
        for path in files
        if path != DATA_LAYER
        and not path.is_relative_to(FOLDER)
        and (used := sorted(set(uses(path.read_text()))))
    }
    assert len(files) > 500
    assert found == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._C import Graph", "torch._C.Graph"),
        ("from torch.nn.modules.loss import _Loss", "torch.nn.modules.loss._Loss"),
        ("from torch.testing._internal import common", "torch.testing._internal.common"),
        ("torch._foreach_add_(a, b)", "torch._foreach_add_"),
        ("a.untyped_storage()._cdata", "a.untyped_storage()._cdata"),
        ("patch.object(torch.Tensor, 'add', f)", "patch.object(torch.Tensor, 'add', f)"),
        (
            "from torch import Tensor\npatch.object(Tensor, 'add', f)",
            "patch.object(Tensor, 'add', f)",
        ),
        ("import torch.distributed as dist\ndist._world", "torch.distributed._world"),
        (
            "from torch import nn\nnn.modules.batchnorm._NormBase",
            "torch.nn.modules.batchnorm._NormBase",
        ),
        ("from torch.autograd import profiler\nprofiler._on", "torch.autograd.profiler._on"),
        ("torch.Tensor.add = f", "torch.Tensor.add = f"),
        ("a._version", "a._version"),
        ("self._parameters", "self._parameters"),
        ("module._buffers[name] = a", "module._buffers"),
        ("getattr(a, '_local_tensor', a)", "_local_tensor"),
    ],
)
def test_each_way_to_touch_it_is_found(source: str, name: str) -> None:
    assert name in set(uses(source))


@pytest.mark.parametrize("name", MODULES)
def test_every_name_is_there_and_every_module_says_why(name: str) -> None:
    module = importlib.import_module(f"{private.__name__}.{name}")
    for each in getattr(module, "__all__", ()):
        assert getattr(module, each) is not None
    says(module.__doc__)


def test_the_data_layers_own_says_why() -> None:
    says(importlib.import_module("dataio.batch.feed").is_profiling.__doc__)


def test_what_is_a_classs_own_is_not_found() -> None:
    assert not [
        *uses("class A:\n    def f(self):\n        self._buffers = {}\n        self._buffers")
    ]
    assert not [*uses("torch.ops.aten._grouped_mm")]


def says(docstring: str | None) -> None:
    words = " ".join((docstring or "").split())
    assert "Why:" in words
    assert "Public instead:" in words


def test_what_tensors_hold_is_there() -> None:
    value = torch.zeros(3)
    before = autograd.version_of(value)
    value += 1
    assert autograd.version_of(value) == before + 1
    assert autograd.is_view(value[1:])
    assert not autograd.is_view(value)
    number = storages.storage_id(value.untyped_storage())
    assert storages.storage_id(value[1:].untyped_storage()) == number
    assert storages.storage_id(value.clone().untyped_storage()) != number
    weight = nn.Parameter(torch.zeros(3))
    assert not modules.hooks_of(weight)
    assert not modules.has_late_hooks(weight)
    handle = weight.register_hook(lambda grad: grad)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert len(modules.hooks_of(weight)) == 1
    assert modules.has_late_hooks(weight)
    handle.remove()
    assert not modules.hooks_of(weight)


def test_what_modules_hold_is_there() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("seen", torch.zeros(1), persistent=False)
    assert [*modules.parameters_of(norm)] == ["weight", "bias"]
    assert {"running_mean", "running_var", "seen"} < {*modules.buffers_of(norm)}
    assert modules.unsaved_buffers_of(norm) == {"seen"}
    assert modules.children_of(nn.Sequential(norm)) == {"0": norm}


def test_a_backward_pass_is_known_and_has_an_end() -> None:
    seen: list[object] = []

    def hook(_: torch.Tensor) -> None:
        seen.append(autograd.in_backward())
        autograd.call_after_backward(lambda: seen.append("end"))

    value = torch.ones(2, requires_grad=True)
    value.register_hook(hook)
    assert not autograd.in_backward()
    value.sum().backward()
    assert seen == [True, "end"]


def test_many_tensors_change_in_one_call() -> None:
    own, others = [torch.zeros(2), torch.ones(3)], [torch.ones(2), torch.ones(3)]
    foreach.copy_(own, others)
    foreach.add_(own, others)
    foreach.lerp_(own, others, 0.5)
    assert [each.tolist() for each in own] == [[1.5] * 2, [1.5] * 3]
