"""A run that is watched from outside."""

import json
from pathlib import Path

import pytest

from tests.trainer.run.runs import run
from tonari.trainer.errors import ConfigError

parser = pytest.importorskip("prometheus_client.parser", reason="pip install prometheus-client")


def test_a_run_shows_prometheus_what_its_log_says(config: Path, tmp_path: Path) -> None:
    run(config, "run", "run.epochs=1", "run.log_steps=2", f"run.prometheus={tmp_path}/train.prom")
    text = (tmp_path / "train-0.prom").read_text()
    found = {
        sample.name: sample
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    log = (config.parent / "run" / "metrics.jsonl").read_text().splitlines()
    epoch = next(line for line in map(json.loads, reversed(log)) if line["kind"] == "epoch")
    assert found["tonari_epoch_loss"].value == epoch["loss"]
    assert found["tonari_epoch_seconds"].value == epoch["epoch_s"]
    assert found["tonari_steps_total"].value == epoch["step"]
    assert found["tonari_loader_rows_total"].value > 0
    labels = {"run": "run", "node": "0", "rank": "0", "replica": "0"}
    assert found["tonari_epoch_loss"].labels == labels


def test_a_file_that_nobody_would_collect_is_refused_before_staging(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.prometheus is 'train\.txt', expected a file"):
        run(config, "run", "run.prometheus=train.txt")
    assert not (config.parent / "run").exists()
