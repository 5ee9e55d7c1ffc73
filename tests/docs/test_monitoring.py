"""docs/monitoring.md explains every figure of a loader, and names none that there is not."""

import re

import numpy as np

import dataio
import importance
from dataio.batch.figures import CAUSES
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
        # A cause is there where there was a wait for it: the page has one for all.
        causes = {f"wait_{cause}_" for cause in CAUSES}
        given = {key for key in loader.stats() if not key.startswith(tuple(causes))}
        of_one = {key for key in explained if key.startswith("wait_decode_")}
        assert len(of_one) == 4
        assert given == explained - {*FIGURES} - of_one
