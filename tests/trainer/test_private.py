"""Torch's insides are used in one folder, and what is used is there on the torch at hand."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest

from tests.multirank import ROOT
from tonari.trainer import private

PACKAGES = ("benchmarks", "dataio", "examples", "importance", "shuffle", "tonari")
FOLDER = ROOT / "tonari" / "trainer" / "private"
MODULES = [module.name for module in pkgutil.iter_modules(private.__path__)]
OPERATORS = "torch.ops."
PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")
ANYWHERE = ("._cdata", "._execution_engine")
"""Of whatever object they are asked: none of ours has such names."""


def uses(source: str) -> Iterator[str]:
    """Find the names of torch that begin with an underscore, and what patches torch."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            of_torch = PRIVATE.fullmatch(name) and not name.startswith(OPERATORS)
            if of_torch or name.endswith(ANYWHERE):
                yield name
        if isinstance(node, ast.Call) and "patch" in ast.unparse(node.func):
            yield from (ast.unparse(node) for each in node.args[:1] if "torch" in ast.unparse(each))


def test_no_other_file_touches_what_torch_does_not_promise() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): used
        for path in files
        if not path.is_relative_to(FOLDER) and (used := sorted(set(uses(path.read_text()))))
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
    ],
)
def test_each_way_to_touch_it_is_found(source: str, name: str) -> None:
    assert name in set(uses(source))


@pytest.mark.parametrize("name", MODULES)
def test_every_name_is_there_and_every_module_says_why(name: str) -> None:
    module = importlib.import_module(f"{private.__name__}.{name}")
    for each in getattr(module, "__all__", ()):
        assert getattr(module, each) is not None
    words = " ".join((module.__doc__ or "").split())
    assert "Why:" in words
    assert "Public instead:" in words
