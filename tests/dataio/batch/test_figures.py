import json

import numpy as np
import pytest

from dataio import Reports
from dataio.batch.figures import Waits, summarise
from dataio.world import run_threads, single_world, thread_worlds
from tests.dataio.loaders import make


def test_percentiles_of_waits_are_right_within_a_tenth():
    rng = np.random.default_rng(0)
    durations = np.exp(rng.normal(-7, 2, 5000)).clip(2e-6)
    waits = Waits()
    for duration in durations.tolist():
        waits.add(duration)
    assert waits.total_s == pytest.approx(durations.sum())
    for percent in (50, 95, 99):
        exact = np.percentile(durations, percent, method="inverted_cdf")
        assert waits.percentile(percent) == pytest.approx(exact, rel=0.1)


def test_no_wait_and_endless_waits_are_counted_too():
    waits = Waits()
    assert waits.percentile(99) == 0
    waits.add(0.0)
    waits.add(1e9)
    assert waits.percentile(50) < 2e-6
    assert waits.percentile(99) > 3000


def test_the_straggler_is_the_rank_that_waits_longest():
    line = summarise(
        3, np.array([[2.0, 0.5, 100, 7, 0], [2.5, 1.5, 90, 3, 2], [2.0, 0.1, 100, 0, 3]])
    )
    assert line["straggler_rank"] == 1
    assert line["samples"] == 290
    assert line["samples_per_s"] == pytest.approx(290 / 2.5)
    assert line["source_bytes"] == 10
    assert line["skipped_rows"] == 5
    assert line["wait_mean_s"] == pytest.approx(0.7)


def test_rank_0_writes_a_line_an_epoch_for_all_ranks(tmp_path):
    def run(world):
        with make(
            world, tmp_path / "cache", reports=Reports(metrics=tmp_path / "metrics.jsonl")
        ) as loader:
            for _ in loader.epochs(3):
                list(loader)
            return loader.stats()

    stats = run_threads(thread_worlds([1, 1]), run)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert lines[0]["source_bytes"] > 0
    assert lines[1]["source_bytes"] == lines[2]["source_bytes"] == 0
    assert all(line["samples"] == 61 for line in lines), "padding is not counted"
    assert stats[0]["straggler_rank"] == stats[1]["straggler_rank"] in (0, 1)
    assert stats[0]["wait_p50_s"] <= stats[0]["wait_p95_s"] <= stats[0]["wait_p99_s"]
    assert stats[0]["peer_bytes"] > 0


def test_a_file_of_metrics_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"metrics: .*file/m.jsonl cannot be written .*; give a"):
        make(
            single_world(),
            tmp_path / "cache",
            reports=Reports(metrics=tmp_path / "file" / "m.jsonl"),
        )
    assert not list(tmp_path.glob("cache/*/node*")), "before anything was staged"


def test_figures_that_can_no_longer_be_written_do_not_end_the_job(tmp_path, caplog):
    path = tmp_path / "new" / "m.jsonl"
    with make(single_world(), tmp_path / "cache", reports=Reports(metrics=path)) as loader:
        path.unlink()
        path.mkdir()
        epochs = [len(list(loader)) for _ in loader.epochs(2)]
    assert epochs == [13, 13]
    assert "the epoch's figures are lost" in caplog.text
