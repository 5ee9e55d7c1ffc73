"""Copy the tests to where no checkout lies, with the names that a wheel has.

    python -m tests.shipping.move_tests DIRECTORY

A wheel has no package `trainer`, `oracle` or `benchmarks`, which tests of a checkout import and
patch. How they are run then: docs/packaging.md.
"""

import re
import shutil
import sys
from pathlib import Path

from tests.shipping.conftest import ROOT

NAMES = re.compile(r'(from |setattr\(\s*f?"|find_spec\(")(?=(?:trainer|oracle|benchmarks)[. ])')


def move(directory: Path) -> None:
    """Copy the tests, and the pages and examples that they read."""
    for name in ("tests", "examples", "docs"):
        shutil.copytree(ROOT / name, directory / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, directory)
    for path in (directory / "tests").rglob("*.py"):
        path.write_text(NAMES.sub(r"\1tonari.", path.read_text()))


if __name__ == "__main__":
    move(Path(sys.argv[1]))
