"""The page of guarantees names tests, and CI runs each."""

import re
import subprocess
import sys

import pytest

from tests.multirank import ROOT


def named_tests() -> set[str]:
    """Tests that the page links to, as pytest names them."""
    page = (ROOT / "docs" / "guarantees.md").read_text()
    return {f"{path}::{name}" for name, path in re.findall(r"\[(\w+)\]\(\.\./(tests/.+?)\)", page)}


def test_every_guarantee_names_tests_not_files():
    rows = re.findall(
        r"^\| (?!it holds).+ \| (.+) \|$", (ROOT / "docs/guarantees.md").read_text(), re.M
    )
    assert len(rows) > 15
    for row in rows:
        assert re.fullmatch(r"(\[test_\w+\]\(\.\./tests/[\w/]+\.py\)(, )?)+", row), row


@pytest.mark.thorough
def test_ci_runs_every_test_that_a_guarantee_names():
    named = named_tests()
    assert len(named) > 60
    makefile = (ROOT / "Makefile").read_text()
    (taken,) = re.findall(r"^test-ci: TAKEN := (.+)$", makefile, re.MULTILINE)
    files = sorted({name.partition("::")[0] for name in named})
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", taken, *files],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=True,
    ).stdout  # fmt: skip
    assert named - {line.partition("[")[0] for line in found.splitlines()} == set()
