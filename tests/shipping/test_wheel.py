"""What the wheel holds: the tree's packages as they lie there, and the examples below `tonari`."""

import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.shipping.conftest import PACKAGES, ROOT, build, tracked

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="session")
def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def tree() -> dict[str, bytes]:
    """Read what a wheel is to hold, by its place there."""
    found = {}
    for name in tracked():
        top = name.partition("/")[0]
        if top in (*PACKAGES, "examples"):
            found[f"tonari/{name}" if top == "examples" else name] = (ROOT / name).read_bytes()
    return found


def test_the_wheel_is_the_tree_file_by_file_and_byte_by_byte(files) -> None:
    shipped = {name: text for name, text in files.items() if ".dist-info/" not in name}
    compiled = [name for name in shipped if name.endswith(".so")]
    assert compiled == (["dataio/rows/_pictures.abi3.so"] if shutil.which("cc") else [])
    shipped = {name: text for name, text in shipped.items() if name not in compiled}
    wanted = tree()
    assert shipped.keys() == wanted.keys()
    assert [name for name in wanted if shipped[name] != wanted[name]] == []
    assert len(wanted) > 600


def test_a_wheel_is_made_for_all_machines_where_nothing_compiles(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unpacked,) = (wheel.parent / "sdist").iterdir()
    source = shutil.copytree(
        unpacked, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.so")
    )
    monkeypatch.setenv("CC", "false")
    made = build("wheel", source, tmp_path)
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    if shutil.which("cc"):
        assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)


def test_tests_and_benchmarks_stay_out(files) -> None:
    assert not [name for name in files if re.search(r"(^|/)(tests|test_\w+|conftest)\b", name)]
    assert not [name for name in files if name.startswith("benchmarks/")]
    top = {name.partition("/")[0] for name in files}
    assert {name for name in top if not name.endswith(".dist-info")} == {*PACKAGES}


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
