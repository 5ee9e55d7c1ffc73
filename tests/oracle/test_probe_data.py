"""What a probe times of the loader."""

import json
import time
from dataclasses import asdict
from typing import Any

from oracle.probe.data import TURNS, DataTimes, _time_epochs, data_times
from oracle.windows import Pieces


class Slow:
    """A loader, and the world of its ranks, by a clock of their own."""

    def __init__(self):
        self.now_s = 0.0
        self.turned_after = []
        self.met = False

    def spend(self, seconds):
        self.now_s += seconds

    def barrier(self, *, doing):
        self.spend(10.0)
        self.met = True

    def __len__(self):
        return 100

    def __iter__(self):
        for _ in range(100):
            self.spend(0.25)
            yield None

    def epochs(self, num):
        for epoch in range(num):
            if epoch:
                self.turned_after.append(self.met)
                self.met = False
                self.spend(1.0)
            yield epoch


def test_the_end_of_an_epoch_does_not_count_the_wait_for_ranks_that_are_behind(monkeypatch):
    slow: Any = Slow()
    monkeypatch.setattr(time, "perf_counter", lambda: slow.now_s)
    monkeypatch.setattr(time, "process_time", lambda: slow.now_s / 2)
    assert _time_epochs(slow, slow) == (0.25, 0.5, 1.0)
    assert slow.turned_after == [True] * TURNS


def test_times_are_the_same_when_they_are_read_again():
    times = DataTimes(
        readers=2, num_rows=1000, evaluated_rows=0, row_bytes=100.0, source_row_bytes=125.0,
        batch_s=0.5, batch_cores=1.0, staging_bytes_per_s=1e4, turn_s=0.0, write_bytes_per_s=0.0,
        pieces=Pieces(rows=50.0, read_bytes=1e4), guessed_row_bytes=130.0,
    )  # fmt: skip
    document = json.loads(json.dumps(asdict(times)))
    assert data_times(document) == times
    # As of a probe that did not look
    del document["pieces"], document["guessed_row_bytes"]
    assert data_times(document).pieces is None
