"""A run's figures, read by Prometheus's own client and by OpenTelemetry's own reader."""

import sys
from pathlib import Path

import pytest

from tonari.trainer.errors import ConfigError
from tonari.trainer.watch.monitoring import Monitored, PrometheusFile, Telemetry, import_exporter

Written = dict[str, str | int | float | None]
LINE: Written = {
    "kind": "step", "epoch": 1, "step": 40, "loss": 0.5, "samples_per_s": 10.0, "mfu": None
}  # fmt: skip
EPOCH: Written = {"kind": "epoch", "epoch": 1, "step": 48, "loss": float("nan"), "epoch_s": 3.0}
STATS = {"rows": 640.0, "batches": 40.0, "wait_s": 1.5} | dict.fromkeys(
    ("wait_p50_s", "wait_p95_s", "wait_p99_s"), 0.25
)


def monitored(rank: int = 0) -> Monitored:
    return Monitored(lambda: STATS, {"run": "mine", "node": 0, "rank": rank, "replica": rank})


def read(path: Path) -> dict[str, float]:
    parser = pytest.importorskip("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(path.read_text()))
    assert len({family.name for family in families}) == len(families)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_file_shows_the_newest_line_of_each_kind_and_the_loader(tmp_path: Path) -> None:
    log = PrometheusFile(tmp_path / "run.prom", monitored())
    for line in (LINE | {"step": 39}, LINE, EPOCH):
        log.write(line)
    found = read(tmp_path / "run-0.prom")
    assert found["tonari_steps_total"] == 48
    assert found["tonari_step_loss"] == 0.5
    assert found["tonari_epoch_seconds"] == 3
    assert found["tonari_loader_rows_total"] == 640
    assert "tonari_epoch_loss" not in found, "it is not finite"
    assert "tonari_step_mfu" not in found, "it is not known"


def test_another_rank_shows_its_own_loader_alone(tmp_path: Path) -> None:
    PrometheusFile(tmp_path / "run.prom", monitored(rank=1)).write(LINE)
    assert all(name.startswith("tonari_loader_") for name in read(tmp_path / "run-1.prom"))


def test_a_directory_that_is_gone_ends_no_run_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "collector"
    directory.mkdir()
    log = PrometheusFile(directory / "run.prom", monitored())
    directory.rmdir()
    log.write(LINE)
    log.write(EPOCH)
    (record,) = caplog.records
    assert str(directory / "run-0.prom") in record.getMessage()
    directory.mkdir()
    log.write(EPOCH)
    assert read(directory / "run-0.prom")["tonari_epoch_seconds"] == 3


@pytest.mark.parametrize("name", ["run.txt", "nowhere/run.prom"])
def test_a_file_that_the_collector_passes_over_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a file that ends in \.prom, in a directory"):
        PrometheusFile(tmp_path / name, monitored())


def test_opentelemetry_reads_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    reader = export.InMemoryMetricReader()
    with Telemetry(monitored(), reader) as log:
        log.write(LINE)
        log.write(LINE | {"step": 41, "loss": 0.25})
        (of_run,) = reader.get_metrics_data().resource_metrics
    metrics = of_run.scope_metrics[0].metrics
    found = {metric.name: metric.data.data_points[0].value for metric in metrics}
    sums = {metric.name for metric in metrics if isinstance(metric.data, export.Sum)}
    assert found["tonari_steps_total"] == 41
    assert found["tonari_step_loss"] == 0.25
    assert found["tonari_loader_wait_seconds_p99"] == 0.25
    assert {"tonari_steps_total", "tonari_loader_rows_total"} <= sums
    assert "tonari_step_loss" not in sums
    assert of_run.resource.attributes["tonari.run"] == "mine"
    assert of_run.resource.attributes["tonari.rank"] == 0


def test_without_opentelemetry_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[otel\]', or set run\.otel=false"):
        import_exporter()
