"""Figures for monitoring, read by Prometheus's own client."""

import math

import numpy as np
import pytest

from dataio import Int, Loader, Reports, write_prometheus
from dataio.metrics import loader_metrics, metric_name, prometheus_text

parser = pytest.importorskip("prometheus_client.parser", reason="pip install prometheus-client")


def samples(text):
    """Parse text; returns the values by name and labels, and the families' types."""
    families = list(parser.text_string_to_metric_families(text))
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
    return found, {family.name: family.type for family in families}


@pytest.fixture(scope="module")
def by_epoch(tmp_path_factory):
    """A loader's figures at each of three epochs' ends."""
    source = {"x": np.arange(64, dtype=np.int64)}
    with Loader(
        source, batch_size=8, fields={"x": Int("x")}, reports=Reports(progress=False),
        cache=tmp_path_factory.mktemp("cache"),
    ) as loader:  # fmt: skip
        found = []
        for _ in loader.epochs(3):
            list(loader)
            found.append(loader.stats())
    return found


def test_the_official_client_reads_every_figure_of_a_loader(by_epoch):
    stats, labels = by_epoch[-1], {"run": 'a "run"\\of\nmine', "rank": 3}
    found, types = samples(prometheus_text(loader_metrics(stats), labels))
    of_all = {"run": 'a "run"\\of\nmine', "rank": "3"}
    assert all(of_all.items() <= dict(own).items() for _, own in found)
    values = {(name, dict(own).get("quantile")): value for (name, own), value in found.items()}
    assert values["tonari_loader_rows_total", None] == stats["rows"] == 3 * 64
    assert values["tonari_loader_disk_written_bytes_total", None] == stats["disk_bytes_written"]
    assert values["tonari_loader_hidden_ratio", None] == 0
    assert values["tonari_loader_wait_seconds_sum", None] == stats["wait_s"]
    assert values["tonari_loader_wait_seconds_count", None] == stats["batches"] == 24
    assert values["tonari_loader_wait_seconds", "0.99"] == stats["wait_p99_s"]
    # The three percentiles and the sum are one summary, with the count of batches.
    assert len(found) == len([value for value in stats.values() if math.isfinite(value)]) + 1
    assert types["tonari_loader_wait_seconds"] == "summary"
    assert types["tonari_loader_queue_depth"] == "gauge"


def test_what_is_named_a_counter_never_falls(by_epoch):
    texts = [prometheus_text(loader_metrics(stats), {}) for stats in by_epoch]
    read = [samples(text) for text in texts]
    counters = [name for name, kind in read[0][1].items() if kind == "counter"]
    assert len(counters) >= 20
    for name in counters:
        values = [found[f"{name}_total", ()] for found, _ in read]
        assert values == sorted(values), name


def test_a_file_is_replaced_whole_and_may_be_read_by_all(by_epoch, tmp_path):
    path = tmp_path / "loader.prom"
    for stats in by_epoch:
        write_prometheus(path, stats, run="mine", rank=0)
    assert [path] == list(tmp_path.iterdir())
    assert path.stat().st_mode & 0o044
    found, _ = samples(path.read_text())
    assert found["tonari_loader_epoch", (("rank", "0"), ("run", "mine"))] == 2


def test_what_is_not_finite_is_left_out():
    assert "loss" not in prometheus_text(loader_metrics({"loss": math.nan, "rows": 1.0}), {})


@pytest.mark.parametrize(
    ("subject", "key", "name"),
    [
        ("loader", "wait_max_s", "tonari_loader_wait_max_seconds"),
        ("step", "samples_per_s", "tonari_step_samples_per_second"),
        ("epoch", "epoch_s", "tonari_epoch_seconds"),
        ("epoch", "epoch", "tonari_epoch"),
        ("loader", "resident_fraction", "tonari_loader_resident_ratio"),
        ("loader", "disk_bytes_written", "tonari_loader_disk_written_bytes"),
    ],
)
def test_names_have_their_units_at_the_end(subject, key, name):
    assert metric_name(subject, key) == name
