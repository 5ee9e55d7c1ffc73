"""What the source archive holds, what runs from it, and that all that names a version agrees."""

import importlib
import os
import re
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomllib
import yaml  # type: ignore[import-untyped]
from packaging.metadata import Metadata

from dataio.base.seeding import ORDER_VERSION
from dataio.state.resume import STATE_VERSION
from dataio.store.state import FORMAT_VERSION
from shuffle.models.state import STATE_VERSION as OF_MODELS
from tests.shipping.conftest import PACKAGES, ROOT, tracked

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture
def unpacked(wheel: Path, tmp_path: Path) -> Path:
    """Unpack the sdist."""
    with tarfile.open(wheel.parent / f"tonari-{VERSION}.tar.gz") as sdist:
        sdist.extractall(tmp_path, filter="data")
    return tmp_path / f"tonari-{VERSION}"


@pytest.mark.thorough
def test_the_sdist_holds_what_git_has_and_nothing_else(unpacked: Path) -> None:
    held = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    made = {
        path for path in held if re.match(r"(PKG-INFO|setup\.cfg|tonari\.egg-info/.*)$", f"{path}")
    }
    assert held - made == {Path(name) for name in tracked() if not name.startswith(".")}


@pytest.mark.thorough
def test_the_metadata_of_the_wheel_are_valid(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        raw = files.read(f"tonari-{VERSION}.dist-info/METADATA")
    found = Metadata.from_email(raw, validate=True)  # what an index refuses is an error
    assert (found.description_content_type, found.license_expression) == (
        "text/markdown",
        "Apache-2.0",
    )
    assert found.description == (ROOT / "README.md").read_text()


@pytest.mark.thorough
@pytest.mark.multirank
def test_the_two_commands_of_the_readme_run_from_the_sdist(unpacked: Path, tmp_path: Path) -> None:
    venv = unpacked / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "-q"]
    alone = ["--no-deps", "--no-index", "--no-build-isolation", "-e", str(unpacked)]
    subprocess.run([*pip, *alone], check=True, timeout=120)
    (venv / "bin" / "pytest").write_text(f'#!/bin/sh\nexec {venv}/bin/python -m pytest "$@"\n')
    (venv / "bin" / "pytest").chmod(0o755)
    (venv / ".installed").touch()  # what `make install` fetches is in others.pth
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYT", "TONARI_"))}
    small = "--json --ranks 1 --nodes 1 --epochs 1 --workers 0 --pfs-bandwidth 0 --pfs-latency 0"
    for target, arguments, shown in (
        ("demo", small, '"tonari_hiding"'),
        ("test", f"--basetemp={tmp_path}/base tests/shuffle/test_golden.py", " passed"),
    ):
        ended = subprocess.run(
            ["make", target, f"ARGS={arguments}", "WORKERS=1"],
            cwd=unpacked, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert shown in ended.stdout
    assert (unpacked / "tonari-demo.html").exists()


def test_all_that_names_a_version_names_this_one() -> None:
    for package in PACKAGES:
        assert importlib.import_module(package).__version__ == VERSION
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
    wheels = re.findall(r"tonari-([\d.]+)-py3", (ROOT / "docs" / "install.md").read_text())
    assert {*wheels} == {VERSION}
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE) == [VERSION]


def test_the_changelog_and_the_page_on_changes_name_the_formats_of_the_code() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (\d+) \|", changelog, re.MULTILINE)
    assert rows == [str(FORMAT_VERSION), str(STATE_VERSION), str(OF_MODELS)]
    assert f"`ORDER_VERSION` is {ORDER_VERSION}." in changelog
    assert re.search(rf"^- {ORDER_VERSION}: ", changelog, re.MULTILINE)
    page = (ROOT / "docs" / "stability.md").read_text()
    for said in (
        f"`ORDER_VERSION`, now {ORDER_VERSION} ",
        f"[version {FORMAT_VERSION}]",
        f"version {STATE_VERSION} of a loader's state",
    ):
        assert said in page
