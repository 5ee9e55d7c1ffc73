"""A cell is a run of `tonari train`: the same figures, kills and launchers included."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dataio.base import toml
from tests import hub
from tests.multirank import job_environ, python_command
from tests.tonari.ablate.study import STUDY, make_study
from tonari import cli
from tonari.ablate.cells import train_missing
from tonari.ablate.progress import Event
from tonari.ablate.study import Study, load_study
from tonari.ablate.training import as_toml, read_metrics
from tonari.trainer.config.config import load_config
from tonari.trainer.run.loop import train

ROOT = Path(__file__).parents[3]


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_study(tmp_path)


def trained(study: Study, out: str = "out") -> tuple[list[dict[str, Any]], list[str]]:
    """Train all cells; what their files hold, and what went wrong."""
    events: list[Event] = []
    cells = study.cells()
    train_missing(study, cells, Path(out), command="c", call="call", notify=events.append)
    files = [Path(out, "cells", cell.file_name) for cell in cells]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    return found, [event.error for event in events if event.error]


def test_a_cell_has_the_figures_of_the_run_that_its_settings_say(study):
    found, errors = trained(load_study(study, ("run.epochs=3", "study.keep_runs=true")))
    assert errors == []
    for cell, name in zip(found[:2], ("plain", "random--half"), strict=True):
        (directory,) = Path("out/runs").glob(f"{name}-seed0-*")
        train(load_config(directory / "train.toml", [f"run.directory={name}"]), quiet=True)
        lines = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        epochs = [line for line in lines if line["kind"] == "epoch"]
        assert [point["loss"] for point in cell["epochs"]] == [line["loss"] for line in epochs]
        assert cell["accuracy"] == epochs[-1]["accuracy"]
        assert cell["test_loss"] == epochs[-1]["evaluation_loss"]
        trained_rows = 3 * (64 if name == "plain" else 32)
        assert cell["rows_trained"] == cell["epochs"][-1]["rows_trained"] == trained_rows
        assert cell["cost_rows"] > trained_rows
        assert cell["wall_s"] > cell["train_s"] > 0


def test_what_was_left_out_is_held_against_what_is_known_to_be_wrong(study):
    study.write_text(
        STUDY + '[arms.oracle]\nimportance.kind = "tonari.ablate.oracle:Oracle"\n'
        'importance.args.data = "train.parquet"\ncontrol = "oracle"\n'
    )
    found, errors = trained(load_study(study, ("run.epochs=4", "study.wrong=is_wrong")))
    assert errors == []
    by_arm = {cell["arm"]: cell for cell in found}
    plain, half, oracle = (by_arm[name] for name in ("plain", "random, half", "oracle"))
    assert plain["hidden_precision"] is plain["hidden_recall"] is None
    assert (oracle["hidden_precision"], oracle["hidden_recall"]) == (1.0, 1.0)
    assert oracle["hidden_fraction"] == pytest.approx(1 / 8)
    # An eighth of all samples is wrong, and random pruning knows nothing of it.
    assert half["hidden_precision"] == pytest.approx(1 / 8, abs=0.08)
    assert half["hidden_recall"] == pytest.approx(half["hidden_fraction"], abs=0.25)
    missing = load_study(study, ("study.wrong=is_rong", "study.seeds=1", "run.epochs=2"))
    assert all("study.wrong is 'is_rong', expected a field" in e for e in trained(missing, "b")[1])


def test_averaged_weights_are_what_is_judged(study):
    overrides = ("run.epochs=2", "optimizer.ema=0.5", "study.seeds=1", "study.keep_runs=true")
    (cell, *_), _ = trained(load_study(study, overrides))
    (directory,) = Path("out/runs").glob("plain-*")
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert cell["test_loss"] == last["ema_evaluation_loss"] != last["evaluation_loss"]


def test_an_accuracy_is_measured_where_it_is_asked_for_and_at_the_end(study):
    (cell, *_), _ = trained(
        load_study(study, ("run.epochs=5", "run.evaluate_epochs=2", "study.seeds=1"))
    )
    measured = [point["accuracy"] is not None for point in cell["epochs"]]
    assert measured == [False, True, False, True, True]


def test_no_run_is_left_unless_it_is_kept(study):
    trained(load_study(study, ("study.seeds=1",)))
    assert list(Path("out/runs").iterdir()) == []


def start(*overrides: str) -> "subprocess.Popen[str]":
    command = [*python_command(), "-m", "tonari", "ablate", "study.toml", "--out", "out", "--seeds",
               "1", "--only", "plain", *overrides]  # fmt: skip
    return subprocess.Popen(
        command, env=job_environ(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def wait_for_epochs(count: int, *, limit_s: float = 100) -> None:
    """Wait until a run has so many epochs behind it."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        for metrics in Path("out/runs").glob("*/metrics.jsonl"):
            if metrics.read_text().count('"epoch_s"') >= count:
                return
        time.sleep(0.01)
    pytest.fail(f"no run had {count} epochs within {limit_s} s")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="term", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, id="kill"),
    ],
)
def test_a_run_that_is_killed_goes_on_within_its_cell_and_ends_as_if_it_had_not(study, number):
    overrides = ("run.epochs=40", "run.evaluate_epochs=40", "study.keep_runs=true")
    whole, _ = trained(load_study(study, (*overrides, "study.seeds=1")), "whole")
    killed = start(*overrides)
    wait_for_epochs(3)
    killed.send_signal(number)
    _, said = killed.communicate(timeout=100)
    (directory,) = Path("out/runs").iterdir()
    first = (directory / "metrics.jsonl").read_text().splitlines()[0]
    if number == signal.SIGTERM:
        assert killed.returncode == 143
        assert "stopped with 0 of 1 cells there; the same command goes on" in said
    assert not list(Path("out/cells").glob("*"))
    again = start(*overrides)
    again.communicate(timeout=200)
    assert again.returncode == 0
    again_first = (directory / "metrics.jsonl").read_text().splitlines()[0]
    assert again_first == first, "seconds too: it was not begun anew"
    (file,) = Path("out/cells").glob("*.json")
    found = json.loads(file.read_text())
    assert [point["loss"] for point in found["epochs"]] == [
        point["loss"] for point in whole[0]["epochs"]
    ]
    for figure in ("accuracy", "test_loss", "rows_trained"):
        assert found[figure] == whole[0][figure]


@pytest.mark.multirank
@pytest.mark.thorough
def test_ranks_are_launched_as_the_study_says_and_their_last_words_are_told(study, forks):
    launch = "study.launch=env OMP_NUM_THREADS=1 mpiexec -n 2"
    overrides = (launch, "study.seeds=1", "data.batch_size=4", "run.epochs=2")
    found, errors = trained(load_study(study, overrides))
    assert errors == []
    assert found[0]["epochs"][0]["rows_trained"] == 64
    Path("train.parquet").unlink()
    found, errors = trained(load_study(study, overrides), "broken")
    assert found == []
    assert all("mpiexec -n 2" in error and "train.parquet: no such file" in error
               for error in errors)  # fmt: skip


OWN = """
from dataclasses import dataclass

import numpy as np

from dataio import Selection


@dataclass(frozen=True)
class LongestFirst:
    '''Leaves out a share of the rows, those whose loss is lowest.'''
    share: float = 0.25
    columns = ("loss",)

    def select(self, rows, *, epoch, num_epochs):
        if not epoch:
            return Selection()
        order = np.argsort(rows.scores["loss"], kind="stable")
        return Selection(hidden=np.sort(order[: int(self.share * len(order))]))

    def due(self, hidden, *, epoch):
        return hidden
"""
HUB_STUDY = """
[study]
baseline = "full"
seeds = 2
cost = "cost_rows"
[train.data]
kind = "text"
train = "text.txt"
test_fraction = 0.25
sequence_length = 8
batch_size = 16
workers.threads = 0
cache.path = "cache"
[train.model]
kind = "tests.trainer.foreign_models:text_gpt2"
[train.optimizer]
kind = "adamw"
lr = 0.01
[train.run]
epochs = 4
device = "cpu"
[arms.full]
[arms.own]
importance.kind = "own_policy:LongestFirst"
importance.args.share = 0.5
[grid.fewer]
name = "full, {run.epochs} epochs"
run.epochs = [1, 2]
control = "epochs"
[grid.random]
name = "random {importance.fraction}"
importance.kind = "random"
importance.fraction = [0.3, 0.6]
control = "random"
"""


@pytest.mark.thorough
def test_a_hub_model_and_a_policy_of_ones_own_are_ablated_with_both_controls_after_a_kill(
    tmp_path, monkeypatch, capsys
):
    hub.import_or_skip()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_policy.py").write_text(OWN)
    Path("study.toml").write_text(HUB_STUDY)
    Path("text.txt").write_bytes(b"to be or not to be, that is the question: " * 60)
    command = [*python_command(), "-m", "tonari", "ablate", "study.toml", "--out", "out"]
    killed = subprocess.Popen(command, env=job_environ(), stderr=subprocess.PIPE, text=True)
    assert killed.stderr is not None
    while not killed.stderr.readline().startswith("[2/12]"):
        assert killed.poll() is None
    killed.kill()
    killed.communicate()
    before = {path: path.stat().st_mtime_ns for path in Path("out/cells").glob("*.json")}
    assert 2 <= len(before) < 12
    assert cli.main(["ablate", "study.toml", "--out", "out", "--json"]) == 0
    assert before.items() <= {p: p.stat().st_mtime_ns for p in Path("out/cells").iterdir()}.items()
    document = json.loads(capsys.readouterr().out)
    assert (document["cells"], document["measure"]) == (12, "loss")
    own = next(line for line in document["arms"] if line["arm"] == "own")
    assert {one["control"] for one in own["controls"]} == {"epochs", "random"}
    assert all(one["difference"]["num_seeds"] == 2 for one in own["controls"])
    assert own["costs"]["hidden_fraction"] == pytest.approx(0.5 * 3 / 4, abs=0.05)
    assert own["control_verdict"]


def test_tables_are_written_as_they_are_read(tmp_path):
    tables = {
        "data": {"train": ["a b", 'c"d\\'], "cache": {"path": "é\n", "quota": "1GB"}},
        "optimizer": {"lr": 1e-9, "betas": [0.9, 0.5], "args": {"a.b": True, "n": [[1], [2.0]]}},
        "run": {"epochs": 3},
    }
    assert toml.loads(as_toml(tables)) == tables


def test_a_run_that_was_not_ended_gives_no_figures(study):
    config = load_study(study).arms[0].config(0)
    train(config, quiet=True)
    directory = Path(config.run.directory)
    assert read_metrics(directory).rows_trained == 64
    kept = json.loads((directory / "config.json").read_text())
    assert kept["run"]["epochs"] == 1
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    (directory / "metrics.jsonl").write_text("\n".join(lines[:-1]))
    with pytest.raises(KeyboardInterrupt, match="0 of 1 epochs are trained"):
        read_metrics(directory)


def test_a_run_is_kept_until_its_cell_is(study, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    one = load_study(study, ("study.seeds=1",))
    monkeypatch.setattr("tonari.ablate.cells.write_json", full)
    with pytest.raises(OSError, match="No space left"):
        trained(one)
    (directory,) = Path("out/runs").iterdir()
    before = (directory / "metrics.jsonl").read_bytes()
    monkeypatch.undo()
    monkeypatch.chdir(study.parent)
    found, errors = trained(load_study(study, ("study.seeds=1", "study.keep_runs=true")))
    assert (len(found), errors) == (2, [])
    assert (directory / "metrics.jsonl").read_bytes() == before, "it was not trained anew"


def test_a_secret_of_a_url_stays_out_of_all_files(study):
    url = "memory://user:hunter2@nowhere/train.parquet?sig=hunter2"
    one = load_study(study, (f"data.train={url}", "study.seeds=1"))
    found, errors = trained(one)
    assert (found, len(errors)) == ([], 2)
    launched = load_study(study, (f"data.train={url}", "study.seeds=1", "study.launch=mpiexec"))
    assert all("a URL of the settings holds a secret" in error for error in trained(launched)[1])
    files = [path for path in Path("out").rglob("*") if path.is_file()]
    assert any(path.name == "train.toml" for path in files)
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_a_launcher_that_is_not_there_is_named(study):
    _, errors = trained(load_study(study, ("study.seeds=1", "study.launch=mpiexek -n 2")))
    assert all("study.launch: 'mpiexek' cannot be started" in error for error in errors)
    assert len(errors) == 2
