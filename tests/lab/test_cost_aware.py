"""Rows behind a slow link, beyond a quota: a policy that goes by cost reads less for each row."""

import argparse
import io
import json
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from benchmarks.studies.cost_aware import Cell, make_shards, read_lines
from tests.lab import cost_aware
from tests.lab.cluster import Lab
from tests.lab.conftest import MakeLab

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]
TRAIN_S = (20.0, 60.0, 180.0)
"""Each arm's time; the next where a busy machine does not train three epochs in it."""


def write_images(path: Path, num: int) -> Path:
    """Write pictures of noise, labelled by number."""
    rng = np.random.default_rng(0)
    images = []
    for _ in range(num):
        made = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(made, "JPEG")
        images.append(made.getvalue())
    pq.write_table(pa.table({"jpg": images, "cls": np.arange(num) % 10}), path)
    return path


def test_fewer_bytes_are_read_for_each_row_that_is_trained(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    images, shards = write_images(tmp_path / "images.parquet", 400), tmp_path / "shards"
    make_shards(images, shards, num_samples=400, num_shards=4)
    lab = make_lab(2, "80mbit")
    with cost_aware.serve(lab, shards):
        for train_s in TRAIN_S:
            random, aware = train_arms(lab, images, shards, tmp_path, train_s=train_s)
            if min(len(epochs_s(line)) for line in (random, aware)) > 2:
                break
    assert (random["arm"], aware["arm"]) == ("random", "aware")
    assert 0.2 < float(str(aware["resident_fraction"])) < 0.6
    for line in (random, aware):
        # It trains until its time is over, which may be at an epoch's end: then it begins one more.
        assert sum(epochs_s(line)[:-2]) < train_s <= sum(epochs_s(line))
        assert len(epochs_s(line)) > 2, "what a row costs is learned in one epoch, used in the next"
        line["row_bytes"] = float(str(line["source_bytes"])) / float(str(line["rows"]))
    assert aware["row_bytes"] < 0.8 * random["row_bytes"]  # type: ignore[operator]


def epochs_s(line: dict[str, object]) -> list[float]:
    return cast("list[float]", line["epoch_s"])


def train_arms(
    lab: Lab, images: Path, shards: Path, directory: Path, *, train_s: float
) -> list[dict[str, object]]:
    """Train rows left out at random, and those left out by what they cost."""
    settings = {"budget": 0.3, "floor": 0.05, "value": "rows"}
    cells = [
        Cell(arm="random", policy="random", settings={"fraction": 0.7, "delta": 1.0},
             train_s=train_s, seed=0, batch_size=8),
        Cell(arm="aware", policy="cost_aware", settings=settings,
             train_s=train_s, seed=0, batch_size=8),
    ]  # fmt: skip
    (directory / "cells.json").write_text(json.dumps([vars(cell) for cell in cells]))
    out = directory / f"found-{train_s}.jsonl"
    args = argparse.Namespace(test=images, cells=directory / "cells.json", out=out, quota=0.5)
    cost_aware.train(lab, shards, args)
    return read_lines(out)
