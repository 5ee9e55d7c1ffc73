"""Copy the tests to where no checkout lies, with import statements as a wheel needs them.

    python -m tests.shipping.move_tests DIRECTORY

A wheel has no package `trainer`, `oracle` or `benchmarks`, which tests of a checkout import: the
rule of `setup.py`, by which the wheel's own code was moved below `tonari`, moves them too. How they
are run then: docs/packaging.md.
"""

import contextlib
import runpy
import shutil
import sys
from pathlib import Path
from unittest import mock

import setuptools

from tests.shipping.conftest import ROOT


def move(directory: Path) -> None:
    """Copy the tests, and the pages and examples that they read."""
    with mock.patch.object(setuptools, "setup"):
        below_tonari = runpy.run_path(str(ROOT / "setup.py"))["below_tonari"]
    for name in ("tests", "examples", "docs"):
        shutil.copytree(ROOT / name, directory / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, directory)
    for path in (directory / "tests").rglob("*.py"):
        # `import dataio.plan`, of which a wheel has the short name, cannot be moved.
        with contextlib.suppress(ValueError):
            path.write_text(below_tonari(path.read_text(), str(path)))


if __name__ == "__main__":
    move(Path(sys.argv[1]))
