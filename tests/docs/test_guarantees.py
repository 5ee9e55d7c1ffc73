"""The page of guarantees: CI runs a test of each file that proves one."""

import re
import subprocess
import sys

import pytest

from tests.multirank import ROOT


@pytest.mark.thorough
def test_ci_runs_a_test_of_every_file_that_a_guarantee_names():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    files = set(re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", page))
    assert len(files) > 30
    makefile = (ROOT / "Makefile").read_text()
    (taken,) = re.findall(r"^test-ci: TAKEN := (.+)$", makefile, re.MULTILINE)
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", taken, *sorted(files)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=True,
    ).stdout  # fmt: skip
    assert files - {line.partition("::")[0] for line in found.splitlines()} == set()
