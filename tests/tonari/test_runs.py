"""`tonari runs` on directories as runs leave them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataio.base.atomic import write_record
from dataio.base.lines import checked_line
from tonari import cli
from tonari.trainer.watch.record import Noted, Record, Start

HOLD = """
import sys
from pathlib import Path
from dataio.base.claim import claim
with claim(Path(sys.argv[1])) as taken:
    print(taken, flush=True)
    sys.stdin.read()
"""


def leave(
    directory: Path, at_s: float, how: str, *, ended_s: float | None, checkpoint: bool = False
) -> None:
    """Write what a run of 2 epochs and 20 steps, of which it did 12, leaves in a directory."""
    directory.mkdir(parents=True)
    settings = {
        "model": {"kind": "resnet"}, "data": {"train": "cifar/train.parquet"}, "run": {"epochs": 2}
    }  # fmt: skip
    write_record(directory / "config.json", settings)
    Noted(directory, Record([Start(at_s, 8, 0, ended_s, how)], 20)).write()
    lines: list[dict[str, object]] = [
        {"kind": "step", "epoch": 0, "step": 10, "loss": 0.5},
        {"kind": "epoch", "epoch": 0, "step": 10, "loss": 0.5, "accuracy": 0.75},
        {"kind": "step", "epoch": 1, "step": 12, "loss": 0.25},
    ]
    metrics = directory / "metrics.jsonl"
    metrics.write_text("".join(f"{checked_line(line)}\n" for line in lines))
    os.utime(metrics, (at_s, at_s + 50))
    if checkpoint:
        (directory / "checkpoints" / "step-00000010").mkdir(parents=True)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """Runs of each state, of which one holds its lock."""
    leave(tmp_path / "done", 1e6, "complete", ended_s=1e6 + 3700)
    leave(tmp_path / "study" / "asked", 2e6, "stopped by SIGTERM", ended_s=2e6 + 9, checkpoint=True)
    leave(tmp_path / "study" / "killed", 3e6, "", ended_s=None, checkpoint=True)
    leave(tmp_path / "lost", 4e6, "", ended_s=None)
    leave(tmp_path / "wrong", 5e6, "ValueError: no", ended_s=5e6 + 1, checkpoint=True)
    leave(tmp_path / "now", 6e6, "", ended_s=None)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "now" / "run.lock")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "True\n"
        yield tmp_path
        holder.communicate(timeout=60)


def test_each_run_is_listed_with_its_state_newest_first(runs, capsys) -> None:
    assert cli.main(["runs", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(Path(run["directory"]).name, run["state"]) for run in found] == [
        ("now", "running"), ("wrong", "failed"), ("lost", "failed"), ("killed", "stopped"),
        ("asked", "stopped"), ("done", "complete"),
    ]  # fmt: skip
    assert [run["duration_s"] for run in found[1:]] == [1, 50, 50, 9, 3700]
    of_one = {
        "epochs": 1, "planned_epochs": 2, "steps": 12, "planned_steps": 20, "ranks": 8,
        "last": {"loss": 0.25, "accuracy": 0.75}, "model": "resnet", "data": "cifar/train.parquet",
    }  # fmt: skip
    assert all(of_one.items() <= run.items() for run in found)


def test_the_table_fits_80_columns(runs, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["runs", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = [line.split() for line in lines if "study/asked" in line]
    assert [row[0], row[1], *row[-4:]] == ["study/asked", "stopped,", "1/2", "0.25", "75.0%", "8"]


def test_one_run_is_described_with_where_its_page_lies(runs, capsys) -> None:
    run = runs / "wrong"
    assert cli.main(["runs", str(run)]) == 0
    out = capsys.readouterr().out
    assert "failed: ValueError: no" in out
    assert "1 of 2 epochs, 12 of 20 steps" in out
    assert "none; --html FILE writes one" in out
    (run / "run.html").touch()
    assert cli.main(["runs", str(run)]) == 0
    assert str(run / "run.html") in capsys.readouterr().out


def test_nothing_to_list_is_said(tmp_path, capsys) -> None:
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no run of tonari train lies here or below\n"
    assert cli.main(["runs", str(tmp_path / "none")]) == 1
    assert "found no such directory; give one" in capsys.readouterr().err
    assert cli.main(["runs", str(tmp_path), "--html", str(tmp_path / "x.html")]) == 1
    assert "is no run, expected one" in capsys.readouterr().err


def test_a_run_that_is_damaged_is_named_and_hides_no_other(runs, capsys) -> None:
    (runs / "lost" / "config.json").write_text("{")
    assert cli.main(["runs", str(runs), "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"{runs / 'lost'}: cannot be read as a run" in err
    assert len(json.loads(out)) == 5
    assert cli.main(["runs", str(runs / "lost")]) == 1
