"""Every test that docs/pains.md names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_of_pains_names_tests_that_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (ROOT / "docs/pains.md").read_text())
    assert len(named) > 40
    absent = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert absent == []
