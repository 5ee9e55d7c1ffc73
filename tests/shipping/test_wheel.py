"""What the wheel holds: one package, and a file for each of three short names."""

import ast
import re
import runpy
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

from tests.shipping.conftest import FOLDERS, ROOT

pytestmark = pytest.mark.thorough

PARTS = FOLDERS.split()[1:-1]
PUBLIC = PARTS[:3]


@pytest.fixture(scope="session")
def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def below_tonari():
    """The function of setup.py that rewrites imports."""
    patch = pytest.MonkeyPatch()
    patch.setattr(setuptools, "setup", lambda **given: None)
    patch.setattr(sys, "argv", ["setup.py", "bdist_wheel"])
    patch.chdir(ROOT)
    try:
        return runpy.run_path(str(ROOT / "setup.py"))["below_tonari"]
    finally:
        patch.undo()


def test_no_name_lands_at_the_top_but_tonari_and_the_three_short_ones(files) -> None:
    top = {name.partition("/")[0] for name in files}
    importable = {name for name in top if not name.endswith((".dist-info", "-stubs"))}
    assert importable == {"tonari", *(f"{name}.py" for name in PUBLIC)}


def test_every_module_and_every_file_that_one_reads_is_there(files) -> None:
    kinds = {".py", ".typed", ".jinja", ".html"}
    for part in ("tonari", *PARTS):
        for path in (ROOT / part).rglob("*"):
            if path.is_file() and path.suffix in kinds:
                below = path.relative_to(ROOT / part).as_posix()
                place = f"tonari/{below}" if part == "tonari" else f"tonari/{part}/{below}"
                assert place in files, place
    for path in (ROOT / "examples").rglob("*.toml"):
        assert f"tonari/{path.relative_to(ROOT).as_posix()}" in files


def test_tests_stay_out(files) -> None:
    assert not [name for name in files if re.search(r"(^|/)(tests|test_\w+|conftest)\b", name)]


def test_no_import_is_left_that_another_distribution_could_answer(files) -> None:
    left = []
    for name, text in files.items():
        if not name.startswith("tonari/") or not name.endswith(".py") or "/examples/" in name:
            continue
        for node in ast.walk(ast.parse(text)):
            named = []
            if isinstance(node, ast.Import):
                named = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                named = [node.module or ""]
            left += [(name, each) for each in named if each.partition(".")[0] in PARTS]
    assert left == []


def test_no_string_names_a_module_by_what_it_is_in_a_checkout(files) -> None:
    found = set()
    for name, text in files.items():
        if name.startswith("tonari/") and name.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    path = node.value.replace(".", "/")
                    module = f"tonari/{path}.py" in files or f"tonari/{path}/__init__.py" in files
                    if module and path.partition("/")[0] in PARTS and "/" in path:
                        found.add((name, node.value))
    # A key of settings files, which has the name of a module too, would be listed here.
    assert found == set()


def test_types_are_found_by_the_short_names(files) -> None:
    assert files["dataio-stubs/__init__.pyi"] == b"from tonari.dataio import *\n"
    assert files["dataio-stubs/plan/order.pyi"] == b"from tonari.dataio.plan.order import *\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from dataio.base import x", "from tonari.dataio.base import x"),
        ("from dataio import x as y", "from tonari.dataio import x as y"),
        ("import shuffle", "from tonari import shuffle"),
        ("import shuffle as s", "from tonari import shuffle as s"),
        ("é = 1; import trainer  # import x", "é = 1; from tonari import trainer  # import x"),
        ("if a:\n    from oracle import (\n  b)", "if a:\n    from tonari.oracle import (\n  b)"),
        ("'''\nimport dataio\n'''", "'''\nimport dataio\n'''"),
        ("import dataiox, os", "import dataiox, os"),
        ("from tonari.dataio import x", "from tonari.dataio import x"),
    ],
)  # fmt: skip
def test_import_statements_alone_are_rewritten(below_tonari, before: str, after: str) -> None:
    assert below_tonari(before, "module.py") == after


@pytest.mark.parametrize("source", ["import dataio.plan", "import os, dataio"])
def test_an_import_that_cannot_be_rewritten_stops_the_build(below_tonari, source: str) -> None:
    with pytest.raises(ValueError, match=r"module\.py:1: .* import one package a line"):
        below_tonari(source, "module.py")


def test_examples_and_pages_import_only_what_a_wheel_has():
    short = re.compile(r"^\s*(?:from|import) (?:trainer|oracle|benchmarks)\b", re.MULTILINE)
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]
    assert len(pages) > 60
    found = {
        str(page.relative_to(ROOT)): match[0]
        for page in pages
        if (match := short.search(page.read_text()))
    }
    assert not found, "write `from tonari.trainer import ...`"
