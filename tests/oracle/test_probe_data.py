"""What a probe times of the loader."""

import json
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataio.job.launch import join
from tests.oracle.test_trace import IMAGES
from tests.tonari.test_hardest import png
from tonari.oracle.probe.data import TIMED_ENDS, DataTimes, _time_epochs, data_times, time_data
from tonari.oracle.windows import Pieces
from tonari.trainer.config.config import load_config


class Slow:
    """A loader, and the world of its ranks, by a clock of their own."""

    def __init__(self):
        self.now_s = 0.0
        self.ended_after = []
        self.met = False
        self.waited_s = 0.0

    def spend(self, seconds):
        self.now_s += seconds

    def barrier(self, *, doing):
        self.spend(10.0)
        self.met = True

    def __len__(self):
        return 100

    def __iter__(self):
        for _ in range(100):
            self.spend(0.25 + 4.0)
            self.waited_s += 4.0
            yield None

    def stats(self):
        return {"window_wait_s": self.waited_s}

    def epochs(self, num):
        for epoch in range(num):
            if epoch:
                self.ended_after.append(self.met)
                self.met = False
                self.spend(1.0)
            yield epoch


def test_no_wait_for_other_ranks_or_for_windows_of_rows_is_counted(monkeypatch):
    slow: Any = Slow()
    monkeypatch.setattr(time, "perf_counter", lambda: slow.now_s)
    monkeypatch.setattr(time, "process_time", lambda: (slow.now_s - slow.waited_s) / 2)
    assert _time_epochs(slow, slow) == (0.25, 0.5, 1.0)
    assert slow.ended_after == [True] * TIMED_ENDS


def test_times_are_the_same_when_they_are_read_again():
    times = DataTimes(
        readers=2, num_rows=1000, evaluated_rows=0, row_bytes=100.0, source_row_bytes=125.0,
        batch_s=0.5, batch_cores=1.0, staging_bytes_per_s=1e4, epoch_end_s=0.0,
        write_bytes_per_s=0.0,
        pieces=Pieces(rows=50.0, read_bytes=1e4), guessed_row_bytes=130.0,
    )  # fmt: skip
    document = json.loads(json.dumps(asdict(times)))
    assert data_times(document) == times
    # As of a probe that did not look
    del document["pieces"], document["guessed_row_bytes"]
    assert data_times(document).pieces is None


def test_rows_are_as_large_where_not_all_are_staged_and_where_none_is(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images = [png(rng.integers(0, 256, (16, 16, 3), np.uint8)) for _ in range(400)]
    table = pa.table({"png": images, "cls": [0] * len(images)})
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=5)
    settings = tmp_path / "run.toml"
    settings.write_text(IMAGES)
    overrides = [
        f"data.train={tmp_path}/train.parquet", "data.test=", "data.image=png",
        f"data.cache.path={tmp_path}", f"run.directory={tmp_path}/run",
    ]  # fmt: skip
    config = load_config(settings, overrides)
    found = []
    with join(device="cpu") as job:
        for quota in ("1GB", "700KB", "150KB"):
            monkeypatch.setattr("tonari.oracle.probe.data.QUOTA", quota)
            found.append(time_data(config, job, readers=1))
    whole, *others = found
    assert whole is not None
    assert whole.source_row_bytes > 800
    for part in others:
        assert part is not None
        assert part.num_rows == whole.num_rows == 400
        assert part.row_bytes == pytest.approx(whole.row_bytes, rel=0.03)
        assert part.source_row_bytes == pytest.approx(whole.source_row_bytes, rel=0.1)
