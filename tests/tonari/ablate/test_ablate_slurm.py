"""Studies as array jobs: the scripts run under bash, with a stand-in for sbatch."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.multirank import job_environ
from tests.tonari.ablate.study import make_study
from tonari import cli

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]

# Keeps what it is called with, a line a call, and numbers jobs as Slurm does
SBATCH = """#!/bin/sh
for part in "$@"; do printf '%s\\n' "$part"; done > call-$(ls | grep -c ^call-)
echo "$(ls | grep -c ^call-)00;lab"
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_study(tmp_path)


@pytest.fixture
def sbatch(tmp_path, monkeypatch, forks):
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def run(*args: str) -> int:
    return cli.main(["ablate", "study.toml", "--out", "out", *args])


def calls() -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(Path().glob("call-*"))]


def bash(script: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", script], env=job_environ(variables), cwd="/", capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip  # fmt: skip


def test_the_tasks_of_an_array_train_all_cells_and_its_second_job_reports(study, sbatch, capsys):
    args = ["--slurm", "--cells-per-task", "2", "--jobs", "3"]
    Path("base.toml").write_text("[optimizer]\nlr = 0.05\n")
    study.write_text(study.read_text().replace("seeds = 2", 'seeds = 2\nconfig = "base.toml"'))
    assert run(*args, "--slurm-args", "--partition=x --array=7") == 0
    assert "submitted job 100 (2 tasks) and job 200" in capsys.readouterr().out
    array, report = calls()
    assert array[-2] == "--array=0-1%3", "after the user's, so that it counts"
    assert "--partition=x" in array
    assert report[-2] == "--dependency=afterany:100"
    assert "--partition=x" in report
    # What was submitted is trained, whatever becomes of the file
    study.write_text("[study")
    Path("base.toml").write_text("[run")
    second = bash(array[-1], SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="100")
    assert second.returncode == 0, second.stderr
    trained = [json.loads(path.read_text()) for path in Path("out/cells").glob("*.json")]
    assert sorted((cell["arm"], cell["seed"]) for cell in trained) == [
        ("plain", 1), ("random, half", 1),
    ]  # fmt: skip
    assert trained[0]["settings"]["optimizer.lr"] == 0.05
    expected = ["tonari", "ablate", "study.toml", "--out", "out", *args]
    assert shlex.split(trained[0]["command"])[: len(expected)] == expected
    # Killed before its end and requeued, it takes what is left
    again = bash(array[-1], SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="100")
    assert again.returncode == 0, again.stderr
    assert len(list(Path("out/cells").glob("*.json"))) == 4
    assert not Path("out/report").exists()
    assert bash(report[-1]).returncode == 0
    assert json.loads(Path("out/report/study.json").read_text())["cells"] == 4


def test_any_path_is_a_path_to_bash_and_to_sbatch(tmp_path, monkeypatch, sbatch):
    here = tmp_path / "a $HOME 'b' \"c\" 100%j"
    here.mkdir()
    make_study(here)
    monkeypatch.chdir(here)
    assert run("--slurm", "--only", "plain") == 0
    array, report = calls()
    for line, log in ((array, "cells-%A_%a.log"), (report, "report-%j.log")):
        (output,) = [part for part in line if part.startswith("--output=")]
        escaped = str(here).replace("%", "%%")
        assert output.startswith(f"--output={escaped}/out/slurm/")
        assert output.endswith(log)
    ended = bash(array[-1], SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_JOB_ID="100")
    assert ended.returncode == 0, ended.stderr
    assert len(list(Path("out/cells").glob("*.json"))) == 1


def test_only_missing_cells_are_submitted(study, sbatch, capsys):
    assert run("--only", "plain") == 0
    assert run("--slurm") == 0
    assert "--array=0-1" in calls()[0], "two of four are there; no limit unless asked for"
    assert run() == 0
    capsys.readouterr()
    assert run("--slurm") == 0
    assert "4 of 4 cells" in capsys.readouterr().out, "with nothing missing, the report"
    assert len(calls()) == 2


def test_a_dry_run_shows_all_and_does_nothing(study, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert run("--slurm", "--dry-run", "--slurm-args", "--time=1:00:00 --gres=gpu:1") == 0
    shown = capsys.readouterr().out
    assert '--task "$SLURM_ARRAY_TASK_ID"' in shown
    assert "--array=0-3 " in shown
    assert "--time=1:00:00 --gres=gpu:1" in shown
    assert "--dependency=afterany:$JOB" in shown.replace("'", "")
    assert not Path("out").exists()
    assert run("--dry-run") == 2
    assert "--dry-run shows what --slurm would submit" in capsys.readouterr().err


@pytest.mark.parametrize("in_file", [True, False])
def test_a_secret_gets_into_no_script_and_no_copy(study, sbatch, capsys, in_file):
    url = "https://host/train.parquet?sig=hunter2"
    if in_file:
        study.write_text(study.read_text().replace("train.parquet", url))
    assert run("--slurm", *([] if in_file else [f"data.train={url}"])) == 1
    error = capsys.readouterr().err
    assert "has a URL with a secret" in error
    assert "hunter2" not in error
    files = [path for path in Path("out").rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_where_there_is_no_slurm_it_says_so(study, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert run("--slurm") == 1
    error = capsys.readouterr().err
    assert "found no `sbatch` in PATH, expected Slurm's; call this on a login node" in error
    assert not Path("out/slurm").exists()


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("cells", "ended with status 1, expected 0: Invalid partition; correct --slurm-args"),
        ("report", "job 5 is submitted and will train the cells, but not the job that writes"),
    ],
)
def test_what_sbatch_refuses_is_said(study, sbatch, capsys, at, message):
    sbatch.write_text(
        f'#!/bin/sh\ncase "$*" in *.{at}.sh) echo Invalid partition >&2; exit 1;; esac; echo 5\n'
    )
    assert run("--slurm") == 1
    assert message in capsys.readouterr().err
