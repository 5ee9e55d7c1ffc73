"""`tonari ablate`: cells go on after a kill, differences are paired, wrong studies say the cure."""

import csv
import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.multirank import job_environ, python_command
from tests.tonari.ablate.study import STUDY, make_study
from tonari import cli
from tonari.ablate.stats import (
    Difference,
    mean_over_seeds,
    paired_difference,
    verdict,
)
from tonari.ablate.study import load_study
from tonari.report.student import t_quantile
from tonari.trainer.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of two arms beside its data, in the current directory."""
    monkeypatch.chdir(tmp_path)
    return make_study(tmp_path)


def run(*args: str) -> int:
    return cli.main(["ablate", *args])


def cell_files(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.glob("cells/*.json")}


def test_a_study_ends_in_a_table_a_plot_and_a_document(study, capsys):
    assert run("study.toml", "--out", "out", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(Path("out/report/study.json").read_text())
    assert (document["cells"], document["cells_expected"]) == (4, 4)
    base, other = document["arms"]
    assert (base["arm"], base["verdict"], base["difference"]) == ("plain", "baseline", None)
    cells = [json.loads(path.read_text()) for path in Path("out/cells").glob("*.json")]
    by_arm = {
        arm: [cell["accuracy"] for cell in sorted(cells, key=lambda c: c["seed"])
              if cell["arm"] == arm]
        for arm in ("plain", "random, half")
    }  # fmt: skip
    gaps = 100 * (np.array(by_arm["random, half"]) - np.array(by_arm["plain"]))
    assert other["difference"]["mean"] == pytest.approx(gaps.mean())
    assert other["difference"]["num_seeds"] == 2
    table = Path("out/report/table.md").read_text()
    assert "| random, half |" in table
    assert "Command: `tonari ablate study.toml --out out --json`" in table
    rows = list(csv.DictReader(Path("out/report/table.csv").read_text().splitlines()))
    assert [row["arm"] for row in rows] == ["plain", "random, half"]
    assert float(rows[1]["difference_mean_points"]) == pytest.approx(gaps.mean())
    with Image.open("out/report/accuracy.png") as plot:
        assert min(plot.size) > 100


def test_cells_that_are_there_are_not_trained_again_and_changed_ones_are(study, capsys):
    assert run("study.toml", "--out", "out", "--only", "plain") == 0
    first = cell_files(Path("out"))
    assert len(first) == 2
    assert "plain, seed 1" in capsys.readouterr().err
    assert run("study.toml", "--out", "out") == 0
    both = cell_files(Path("out"))
    assert len(both) == 4
    assert first.items() <= both.items()
    assert "[2/2] random, half, seed 1" in capsys.readouterr().err
    assert run("study.toml", "--out", "out", "optimizer.lr=0.2", "--seeds", "1") == 0
    assert len(cell_files(Path("out"))) == 6
    assert "undecided with one seed" in capsys.readouterr().out


def test_two_processes_train_what_one_would(study, forks):
    assert run("study.toml", "--out", "one") == 0
    assert run("study.toml", "--out", "two", "--jobs", "2") == 0
    one, two = cell_files(Path("one")), cell_files(Path("two"))
    assert one.keys() == two.keys()
    for name in one:
        first, second = (json.loads((Path(d) / "cells" / name).read_text()) for d in ("one", "two"))
        for point in (*first["epochs"], *second["epochs"]):
            assert point.pop("train_s") > 0
        assert first["test_loss"] == second["test_loss"]
        assert first["epochs"] == second["epochs"]
        assert second["command"] == "tonari ablate study.toml --out two --jobs 2"


def test_a_killed_study_goes_on_with_the_cells_that_are_missing(study):
    command = [*python_command(), "-m", "tonari", "ablate", "study.toml", "--out", "out",
               "--seeds", "4", "run.epochs=8"]  # fmt: skip
    environment = job_environ()
    killed = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert killed.stderr is not None
    # The line after its file: at least one cell is there, and most are not
    first = killed.stderr.readline()
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert first.startswith("[1/8] plain, seed 0")
    before = cell_files(Path("out"))
    assert 1 <= len(before) < 8
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    after = cell_files(Path("out"))
    assert len(after) == 8
    assert before.items() <= after.items(), "what was there is not trained again"
    assert f"[1/{8 - len(before)}]" in ended.stderr
    assert "8 of 8 cells" in ended.stdout


def test_intervals_are_those_computed_by_hand():
    # Differences 1, 2, 3: mean 2, deviation 1, error 1 / sqrt(3), t(2) = 4.3027
    found = paired_difference({0: 11, 1: 22, 2: 33, 9: 0}, {2: 30, 1: 20, 0: 10, 8: 5})
    assert found is not None
    assert (found.mean, found.num_seeds) == (2, 3)
    assert found.low == pytest.approx(2 - 4.3027 * 0.57735, abs=1e-4)
    assert found.high == pytest.approx(2 + 4.3027 * 0.57735, abs=1e-4)
    # Five seeds, as a study has: deviation sqrt(0.025), error sqrt(0.005), t(4) = 2.7764
    five = paired_difference(dict(enumerate([1.0, 1.1, 1.2, 1.3, 1.4])), dict.fromkeys(range(5), 1))
    assert five is not None
    assert five.high == pytest.approx(0.2 + 2.7764 * 0.0707107, abs=1e-5)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    assert paired_difference({0: 3.0}, {0: 1.0}) == Difference(2, None, None, 1)
    assert mean_over_seeds([1.0, 3.0]).deviation == pytest.approx(2**0.5)


def test_quantiles_fall_to_the_normal_one_without_a_jump():
    known = {1: 12.7062, 4: 2.7764, 30: 2.0423, 31: 2.0395, 60: 2.0003, 120: 1.9799}
    for degrees, value in known.items():
        assert t_quantile(degrees) == pytest.approx(value, abs=1e-4)
    found = [t_quantile(degrees) for degrees in range(1, 200)]
    assert all(a > b > 1.9599 for a, b in pairwise(found))


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-0.4, 0.3, "within 0.5 points"),
        (-0.4, -0.1, "within 0.5 points"),
        (-2.0, -0.1, "worse"),
        (0.1, 2.0, "better"),
        (-2.0, 0.1, "undecided with 5 seeds"),
        (None, None, "undecided with one seed"),
    ],
)
def test_a_verdict_says_no_more_than_its_interval(low, high, words):
    assert verdict(Difference(0, low, high, 5), margin=0.5) == words
    assert verdict(None, margin=0.5) == "no pair yet"


@pytest.mark.parametrize(
    ("found", "replaced", "message"),
    [
        ("[study]", "[studdy]", r"studdy is unknown; did you mean study\?"),
        ("seeds = 2", "seeds = 0", r"study\.seeds is 0, expected .* >= 1"),
        ('baseline = "plain"', "", r"study\.baseline is missing; set it in the file"),
        ('baseline = "plain"', 'baseline = "plan"', r"'plan', which is no arm; expected one of"),
        ('"random"', '"randon"', r"arm 'random, half': importance\.kind is \"randon\", expected"),
        ("num_classes = 4", "num_clases = 4", r"arm 'plain': model\.num_clases is unknown; did"),
        ("[train.run]", "[train.runn]", r"train\.runn is unknown; did you mean train\.run\?"),
        ("epochs = 1", "epochs = 1\nmax_steps = 3", r"run\.max_steps is 3, expected 0: a study"),
        ('test = "test.parquet"', "", r"arm 'plain': data\.test is missing, by which the arms"),
        ("[arms.plain]", '[arms.plain]\ncontrol = "eposch"', r"control is 'eposch', expected one"),
        ("[arms.plain]", "[arms.plain]\nrun = 3", r"arm 'plain': run is 3, expected a table"),
        ("seeds = 2", 'config = "absent.toml"', r"absent\.toml: cannot be read as TOML"),
        ("seeds = 2", 'launch = "mpiexec \'"', r"study\.launch is .*expected a command"),
        ("[arms.plain]", "[arms", r"cannot be read as TOML: .* give a file like"),
        ("[arms.plain]\n", "arms = 3\n[arm]\n", r"cannot be read|arm is unknown|arms is"),
    ],
)
def test_a_broken_study_is_one_clear_message(study, found, replaced, message):
    assert found in STUDY
    study.write_text(STUDY.replace(found, replaced))
    with pytest.raises(ConfigError, match=rf"^{study}: .*{message}"):
        load_study(study)


def test_arms_that_are_judged_by_what_they_train_on_are_warned_of(study, capsys):
    for test, is_warned in (("train", True), ("test", False)):
        assert run("study.toml", "--list", f"data.test={test}.parquet") == 0
        assert ("data.test is data.train: arms" in capsys.readouterr().err) == is_warned


def test_a_study_without_arms_is_refused(study):
    study.write_text(STUDY[: STUDY.index("[arms")])
    with pytest.raises(ConfigError, match=r"arms: there is none; write \[arms\.NAME\]"):
        load_study(study)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "locl"], "--only 'locl' is no arm of the study, expected one of 'plain'"),
        (["data.train=absent.parquet"], "absent.parquet"),
        (["arms.plain=3"], "arms is unknown; did you mean"),
        (["study.seeds"], "override 'study.seeds', expected section.key=value"),
    ],
)
def test_what_cannot_be_trained_is_one_message(study, capsys, args, message):
    assert run("study.toml", "--out", "out", *args) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("tonari ablate: ")
    assert message in last


def test_a_failed_process_is_told(study, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    assert run("study.toml", "--out", "out", "--jobs", "2") == 1
    error = capsys.readouterr().err
    assert "a training process ended with status 1 before it could begin" in error
    assert error.count("\n") == 1


def test_a_pattern_names_all_arms_that_it_fits(study):
    assert run("study.toml", "--out", "out", "--only", "rand*") == 0
    assert {name.split("-seed")[0] for name in map(str, cell_files(Path("out")))} != set()
    assert all("random" in str(name) for name in cell_files(Path("out")))


def test_a_broken_cell_is_named_with_its_cure(study, capsys):
    assert run("study.toml", "--out", "out", "--only", "plain") == 0
    broken = next(Path("out/cells").glob("*.json"))
    whole = json.loads(broken.read_text())
    spoilt: list[dict[str, object]] = [
        {"train_s": "soon"}, {"cost_rows": float("nan")}, {"accuracy": None}, {"epochs": 3},
        {"epochs": ["first"]}, {"epochs": [{"train_s": 1.0}]},
        {"epochs": [{"train_s": 1.0, "accuracy": "all"}]},
    ]  # fmt: skip
    for content in ('{"accuracy"', "[]", *(json.dumps(whole | bad) for bad in spoilt)):
        broken.write_text(content)
        capsys.readouterr()
        assert run("study.toml", "--out", "out", "--only", "plain") == 1, content
        assert f"{broken}: cannot be read as a cell's results" in (error := capsys.readouterr().err)
        assert "remove it" in error


def test_counts_are_whole_numbers_from_one_on(study, capsys):
    assert run("study.toml", "--out", "out", "--jobs", "0") == 2
    assert "'0' is no whole number >= 1" in capsys.readouterr().err
