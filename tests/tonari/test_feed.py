"""`tonari feed`, and what else of the command line is about feeders."""

import json
from pathlib import Path

import pytest

from dataio.batch.feeders import directory as found
from tests.oracle.test_trace import GPT
from tonari.cli import main


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A tiny GPT on made-up text."""
    path, text = tmp_path / "run.toml", tmp_path / "text.txt"
    path.write_text(GPT)
    text.write_bytes(bytes(range(97, 122)) * 64 + b"a")
    return [
        str(path), f"data.train={text}", "model.depth=1", "data.workers.threads=1",
        f"data.cache={tmp_path}", "run.epochs=1", f"run.directory={tmp_path / 'run'}",
    ]  # fmt: skip


def test_no_core_is_none(tmp_path, capsys):
    assert main(["feed", str(tmp_path / "feeders"), "--cores", "0"]) == 1
    assert "--cores is 0, expected at least 1" in capsys.readouterr().err
    assert main(["feed", str(tmp_path / "a" / "b")]) == 1
    assert "feeders: " in capsys.readouterr().err


def test_the_end_of_a_run_ends_its_feeders(settings, tmp_path):
    feeders = tmp_path / "feeders"
    feeders.mkdir(mode=0o700)
    assert main(["train", *settings, f"data.workers.feeders={feeders}"]) == 0
    assert [path.name for path in feeders.iterdir()] == [found.OVER]


def test_a_plan_says_whether_feeders_pay(settings, tmp_path, capsys):
    kept = str(tmp_path / "probe.json")
    assert main(["probe", *settings, "--steps", "1", "--out", kept]) == 0
    plan = ["plan", *settings, "--probe", kept, "--feeders", "2", "--feeder-cores", "8"]
    capsys.readouterr()
    assert main(plan) == 0
    assert "feeders do not pay for this job" in capsys.readouterr().out
    document = json.loads(Path(kept).read_text())
    assert document["data"]["trade_row_s"] > 0
    assert document["data"]["made_row_bytes"] > 0
    # Were its rows as slow as large pictures
    document["data"] |= {"batch_s": 60.0, "batch_cores": 1.0}
    Path(kept).write_text(json.dumps(document))
    assert main([*plan, "--json"]) == 0
    none, one, two = json.loads(capsys.readouterr().out)["feeders"]
    assert none["bottleneck"] == "threads"
    assert none["step_s"] > 8 * one["step_s"] > 8 * two["step_s"]
    assert one["sent_bytes_per_s"] > 0
    assert main(plan) == 0
    assert "2 of them make a step" in capsys.readouterr().out
    del document["data"]["trade_row_s"]
    Path(kept).write_text(json.dumps(document))
    assert main(plan) == 1
    assert "run tonari probe again" in capsys.readouterr().err
