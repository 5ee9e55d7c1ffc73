"""The tutorial, from an empty directory by its own blocks alone, prints what its pages show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import Block, blocks_of
from tests.multirank import ROOT, job_environ, python_command

PAGES = ("first_epoch", "two_nodes", "leave_out", "filesystem")
MARK = "=== end of a block ==="


def run_page(name: str, directory: Path) -> list[tuple[Block, str]]:
    """Run a page's blocks in order in one shell; each with what it printed."""
    blocks = blocks_of(ROOT / f"docs/tutorial/{name}.md")
    script = ["set -eu"]
    for block in blocks:
        if block.title:
            (directory / block.title).write_text(block.text)
        elif block.language == "sh":
            script += [block.text, f"echo '{MARK}'"]
    pythons = [str(Path(python).parent) for python in (*python_command(), sys.executable)]
    env = job_environ({"PATH": os.pathsep.join([*pythons, os.environ["PATH"]])})
    ended = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=directory, env=env, text=True, timeout=240,
        capture_output=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"docs/tutorial/{name}.md: {ended.stdout}{ended.stderr}"
    shells = [block for block in blocks if block.language == "sh"]
    return list(zip(shells, ended.stdout.split(f"{MARK}\n")[:-1], strict=True))


def lines(text: str) -> set[str]:
    """Lines without what differs from run to run: numbers, their units, the room for them."""
    kept = re.sub(r"(?<=\d) ([kKMG]?B(/s)?|[mµ]?s)\b( \?)?", " unit", text)
    spaced = [re.sub(r"[\s─━]+", " ", line) for line in kept.splitlines()]
    return {re.sub(r"[-+]?[\d.,]+(e-\d+)?", "#", line).strip() for line in spaced} - {""}


@pytest.mark.multirank
@pytest.mark.thorough
def test_the_four_steps_print_what_the_pages_show(tmp_path):
    assert [*tmp_path.iterdir()] == []
    for name in PAGES:
        printed = lines("".join(out for _, out in run_page(name, tmp_path)))
        for block in blocks_of(ROOT / f"docs/tutorial/{name}.md"):
            if block.language == "text":
                shown = lines(block.text)
                assert shown <= printed, f"docs/tutorial/{name}.md: {shown - printed}"
