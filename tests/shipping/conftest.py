"""A wheel of this checkout, built once from its sdist, and programs that run on it."""

import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest
from filelock import FileLock  # torch brings it

ROOT = Path(__file__).parents[2]
JUNK = (
    "runs/a/metrics.jsonl examples/runs/a/metrics.jsonl docs/runs/log tests/.hypothesis/x "
    "examples/__pycache__/x.pyc build/x .venv/x"
)
PACKAGES = "dataio importance shuffle tonari".split()
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"

Layout = Literal["checkout", "wheel"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def build(what: str, source: Path, out: Path) -> Path:
    """Build an sdist or a wheel as a build frontend does, with the setuptools that is here."""
    ended = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}", str(out)],
        cwd=source, env=os.environ | {"PYTHONPATH": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (made,) = out.glob("*.tar.gz" if what == "sdist" else "*.whl")
    return made


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, of the sdist alone, and unpack it; processes of xdist share one."""
    base = tmp_path_factory.getbasetemp()
    work = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shipping"
    with FileLock(f"{work}.lock"):
        if not work.exists():
            make_wheel(base / "made")
            (base / "made").rename(work)
    (made,) = work.glob("*.whl")
    return made


def tracked() -> list[str]:
    """List the files of the tree that are git's, or are about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip(f"needs the repository: {listed.stderr}")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def make_wheel(work: Path) -> None:
    source = work / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for name in JUNK.split():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    with tarfile.open(build("sdist", source, work)) as sdist:
        sdist.extractall(work / "sdist", filter="data")
    (unpacked,) = (work / "sdist").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked, work)) as files:
        files.extractall(work / "installed")


@pytest.fixture(scope="session")
def installed(wheel: Path) -> Path:
    """Give the unpacked wheel: a directory of packages."""
    return wheel.parent / "installed"


@pytest.fixture
def run_on(installed: Path) -> Run:
    """Run Python with Tonari of a checkout or of a wheel, and nothing else of ours in sight."""

    def run(
        layout: Layout, *args: str, before: Sequence[Path] = (), tonari: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        ours = tonari or (ROOT if layout == "checkout" else installed)
        paths = [*before, ours, *site.getsitepackages()]
        # -S: an editable install of a checkout would lend its packages to the wheel.
        return subprocess.run(
            [sys.executable, "-S", "-P", *args],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
            cwd=installed.parent, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return run
