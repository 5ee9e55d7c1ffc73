"""docs/monitoring.md explains every figure of a loader, and names none that there is not."""

import re

import numpy as np

import dataio
import importance
from dataio.plan.costs import FIGURES
from tests.multirank import ROOT


def test_the_page_explains_each_key_of_stats(tmp_path):
    page = (ROOT / "docs/monitoring.md").read_text()
    section = page.partition("## Figures of a loader")[2].partition("\n## ")[0]
    explained = {
        key
        for first in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", first)
    } | set(re.findall(r"`(hidden_cap|moved_back)`", section))
    with dataio.Loader(
        {"x": np.arange(8)}, batch_size=4, fields={"x": dataio.Int("x")}, cache=tmp_path,
        importance=importance.Kakurenbo(0.3),
    ) as loader:  # fmt: skip
        for _ in loader.epochs(2):
            for batch in loader:
                loader.report(batch, *(batch["weight"],) * 3)
        assert set(loader.stats()) == explained - {*FIGURES}
