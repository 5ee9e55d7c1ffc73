"""What the first pages say: which extras there are, and when staging has paid."""

import re
from dataclasses import fields
from typing import Any

import pytest

from dataio.base import toml
from tests.docs.blocks import blocks_of
from tests.multirank import ROOT
from tonari.oracle.epoch import PlannedEpoch

PROJECT: Any = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"dev", "docs", "published", "s3-test", "test", "transforms"}
"""Extras for those who change Tonari."""


def test_the_page_lists_every_extra_and_the_wheel_of_this_version():
    page = (ROOT / "docs/install.md").read_text()
    listed = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert {*listed} == {*PROJECT["optional-dependencies"]} - OURS
    wheels = set(re.findall(r"tonari-[\w.-]+\.whl", page))
    start = f"tonari-{PROJECT['version']}-py3-none"
    assert wheels == {f"{start}-any.whl", f"{start}-linux_x86_64.whl"}
    (least,) = re.findall(r"Python (\d\.\d+) or later\. It", page)
    assert PROJECT["requires-python"] == f">={least}"


def test_the_page_names_no_registry():
    page = (ROOT / "docs/install.md").read_text()
    assert not re.search(r"https?://|pypi|index-url", page, re.IGNORECASE)


def test_a_loop_is_timed_with_data_and_on_a_batch_that_is_kept():
    blocks = [block.text for block in blocks_of(ROOT / "docs/is_this_for_me.md")]
    seen: list[str] = []
    given: dict[str, Any] = {"loader": ["first", "second"], "train_step": seen.append}
    exec(next(block for block in blocks if "seconds_of" in block), given)
    assert seen == ["first", "second"] + 100 * ["first"]
    assert given["with_data_s"] >= 0 <= given["without_data_s"]


@pytest.mark.parametrize(("compute_s", "expected"), [(600.0, 2), (1400.0, 15), (1500.0, None)])
def test_staging_has_paid_when_the_plan_says_so(compute_s, expected):
    (formula,) = [
        block.text for block in blocks_of(ROOT / "docs/is_this_for_me.md") if "math" in block.text
    ]
    given: dict[str, Any] = {}
    exec(formula.replace("compute_s = 600.0", f"compute_s = {compute_s}"), given)
    planned: dict[str, Any] = {each.name: 0 for each in fields(PlannedEpoch)} | {
        "staging_s": given["staging_s"], "unstaged_s": given["now_s"], "train_s": compute_s,
    }  # fmt: skip
    assert given["pays_after"] == PlannedEpoch(**planned).pays_after == expected
