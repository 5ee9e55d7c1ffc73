"""Who trains which cell: claims, several processes, failures, signals, and what is said of it."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.multirank import job_environ, python_command
from tests.tonari.ablate.study import make_study
from tests.tonari.ablate.study_cells import make_cell
from tonari import cli
from tonari.ablate.progress import seconds_left
from tonari.ablate.study import load_study
from tonari.ablate.training import train_cell

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]

# Holds a lock as a process that trains would; torch is not needed for that
HOLDER = """
import fcntl, json, os, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
own = {"pid": os.getpid(), "host": "elsewhere", "job": "77", "since_s": time.time() - 1000}
file.write(json.dumps(own)); file.flush()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_study(tmp_path)


def run(*args: str) -> int:
    return cli.main(["ablate", "study.toml", "--out", "out", *args])


def cell_files() -> set[str]:
    return {path.name for path in Path("out/cells").glob("*.json")}


@contextlib.contextmanager
def held(cell):
    Path("out/claims").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", HOLDER, f"out/claims/{cell.file_name}"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def test_a_cell_that_another_process_trains_is_left_to_it_until_that_is_killed(study, capsys):
    cell = load_study(study).cells()[1]
    with held(cell):
        assert run() == 0
        assert len(cell_files()) == 3
        assert "1 of 4 cells are left to processes that train them now" in capsys.readouterr().err
        assert run("--status") == 0
        said = capsys.readouterr().out
        assert "running for 17 minutes: random, half, seed 0: process" in said
        assert "on elsewhere, job 77" in said
        assert run("--status", "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["counts"] == {"there": 3, "running": 1, "missing": 0, "failed": 0}
        assert cell.file_name not in cell_files(), "looking lets nobody in"
    assert run() == 0
    assert cell.file_name in cell_files()
    assert run("--status") == 0
    assert "all cells are there" in capsys.readouterr().out


@pytest.fixture
def broken_arm(monkeypatch):
    """An arm whose seed 0 fails; the list of tries."""
    tried: list[tuple[str, int]] = []

    def train(study, cell, out):
        tried.append((cell.arm.name, cell.seed))
        if tried[-1] == ("random, half", 0):
            raise RuntimeError("the numbers were too large")
        return train_cell(study, cell, out)

    monkeypatch.setattr("tonari.ablate.cells.train_cell", train)
    return tried


def test_a_failed_cell_is_named_and_kept_and_the_others_go_on(
    study, capsys, monkeypatch, broken_arm
):
    assert run() == 1
    assert len(cell_files()) == 3
    assert broken_arm.count(("random, half", 0)) == 1, "tried once in a call"
    said = capsys.readouterr()
    assert "[2/4] random, half, seed 0: failed: RuntimeError: the numbers" in said.err
    assert "1 of 4 cells failed: 'random, half' seed 0: RuntimeError: the numbers" in said.err
    assert "the same command tries them again" in said.err
    assert "3 of 4 cells" in said.out, "a report of what is there"
    (error,) = Path("out/cells").glob("*.error")
    kept = json.loads(error.read_text())
    assert (kept["arm"], kept["seed"]) == ("random, half", 0)
    assert any("in train" in line for line in kept["trace"])
    assert run("--status") == 0
    said = capsys.readouterr().out
    assert "failed: random, half, seed 0: RuntimeError" in said
    assert "for the rest with one process" in said
    assert len(cell_files()) == 3, "asking trains nothing"
    monkeypatch.undo()
    monkeypatch.chdir(study.parent)
    assert run() == 0
    assert len(cell_files()) == 4
    assert not list(Path("out/cells").glob("*.error"))


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)
def test_a_signal_ends_it_with_how_far_it_is(study, capsys, monkeypatch, number, status):
    def train(*args, **kwargs):
        if cell_files():
            os.kill(os.getpid(), number)
        return train_cell(*args, **kwargs)

    monkeypatch.setattr("tonari.ablate.cells.train_cell", train)
    assert run() == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "tonari ablate: stopped with 1 of 4 cells there; the same command goes on with the others"
    )
    assert not list(Path("out/cells").glob("*.error")), "stopped is not failed"
    monkeypatch.undo()
    monkeypatch.chdir(study.parent)
    assert run() == 0
    assert len(cell_files()) == 4


@pytest.fixture
def start(study):
    """Starts `tonari ablate` on the study; what was started ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*args: str) -> "subprocess.Popen[str]":
            command = [*python_command(), "-m", "tonari", "ablate", "study.toml", "--out", "out"]
            process = stack.enter_context(
                subprocess.Popen(
                    [*command, *args], env=job_environ(), stderr=subprocess.PIPE,
                    stdout=subprocess.DEVNULL, text=True,
                )
            )  # fmt: skip
            stack.callback(process.kill)
            return process

        yield start


def next_event(process: "subprocess.Popen[str]") -> str:
    """The next line on a cell; a cell may wait for the cache of another before."""
    assert process.stderr is not None
    for line in process.stderr:
        if re.match(r"\[\d+/\d+\] ", line):
            return line
    pytest.fail("the parent goes on")


def claimed() -> dict[str, int]:
    """Processes that hold claims, by cell."""
    texts = {path.name: path.read_text() for path in Path("out/claims").iterdir()}
    return {
        name: json.loads(text)["pid"]
        for name, text in texts.items()
        if text and name not in cell_files()
    }


def stop_one_at_work() -> tuple[int, str]:
    """Stop a process in the middle of a cell; its id, and the cell's file."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        for pid in claimed().values():
            os.kill(pid, signal.SIGSTOP)
            while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
                time.sleep(0.001)
            for name, holder in claimed().items():
                if holder == pid:
                    return pid, name
            os.kill(pid, signal.SIGCONT)  # it was between two cells
        time.sleep(0.001)
    pytest.fail("no process claimed a cell within 60 s")


def test_a_killed_process_costs_its_cell_and_a_killed_parent_takes_the_others_along(start):
    parent = start("--jobs", "2", "--seeds", "4", "run.epochs=10")
    assert next_event(parent).startswith("[1/8]")
    victim, name = stop_one_at_work()
    os.kill(victim, signal.SIGKILL)
    said = ""
    while "failed" not in said:
        said = next_event(parent)
    assert "its process was ended by signal 9 (SIGKILL)" in said
    assert next_event(parent), "others go on"
    assert parent.poll() is None
    parent.kill()
    parent.communicate(timeout=60)
    for path in Path("out/claims").iterdir():
        with open(path, "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)  # granted when whoever held it has ended
    there = cell_files()
    assert name not in there
    assert len(there) < 8
    assert run("--seeds", "4", "run.epochs=10", "--jobs", "1") == 0
    assert len(cell_files()) == 8


@given(
    st.lists(st.floats(0, 1e4), max_size=4), st.lists(st.floats(0, 1e4), max_size=20),
    st.integers(4, 8),
)  # fmt: skip
def test_the_rest_takes_no_less_than_its_work_and_no_more_than_one_cell_longer(
    running, waiting, jobs
):
    cells = [*running, *waiting]
    left, work, longest = (
        seconds_left(running, waiting, jobs=jobs), sum(cells) / jobs, max(cells, default=0),
    )  # fmt: skip
    assert max(work, longest) <= left + 1e-6
    assert left <= work + longest + 1e-6


def test_cells_and_reports_can_be_had_without_training(study, capsys):
    assert cli.main(["ablate", "study.toml", "--list"]) == 0
    cells = load_study(study).cells()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [cell.file_name for cell in cells]
    assert run("--status") == 0
    assert "no cell is there yet to say" in capsys.readouterr().out
    assert run("--only", "plain") == 0
    capsys.readouterr()
    assert run("--report-only") == 0
    assert "2 of 4 cells" in capsys.readouterr().out
    assert len(cell_files()) == 2
    assert cli.main(["ablate", "study.toml"]) == 2
    assert "required: --out" in capsys.readouterr().err


OLD = json.dumps(make_cell({}, accuracy=1, train_s=1) | {"accuracy": "1"}).encode()


def spoil(path: Path, content: bytes | None) -> None:
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("study.toml", b"[study\n", "study.toml: cannot be read as TOML"),
        ("study.toml", b"\xff\xfe", "study.toml: cannot be read as TOML"),
        ("study.toml", None, "study.toml: cannot be read as TOML: .*Is a directory"),
        ("out", b"", "--out out: is a file, expected a directory; name another"),
        ("out/claims", b"", "--out out: .*claims.*; the cells that are there are whole"),
        ("out/cells/CELL", b"{", "cannot be read as a cell's results: .*; remove it"),
        ("out/cells/CELL", b"[]", "cannot be read as a cell's results: .*; remove it"),
        ("out/cells/CELL", b'{"accuracy": 1}', "hidden_fraction, .* is missing; remove it"),
        ("out/cells/CELL", None, "cannot be read as a cell's results: .*; remove it"),
        ("out/cells/CELL", OLD, "accuracy is '1', expected a number; remove it"),
    ],
)  # fmt: skip
def test_what_is_broken_is_one_clear_message_before_any_training(
    study, capsys, monkeypatch, file, content, message
):
    name = load_study(study).cells()[2].file_name
    path = Path(file.replace("CELL", name))
    path.parent.mkdir(parents=True, exist_ok=True)
    spoil(path, content)
    assert run() == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("tonari ablate: ")
    assert re.search(message, error)
    assert not Path("out/cells").is_dir() or cell_files() <= {name}


@pytest.mark.parametrize(
    ("file", "content"), [("train.parquet", b"no parquet"), ("test.parquet", None)]
)
def test_data_that_cannot_be_read_is_told_for_every_cell(study, capsys, file, content):
    spoil(Path(file), content)
    assert run() == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "4 of 4 cells failed" in last
    assert last.count(file) <= 3, "of all cells at once"


def test_a_filesystem_without_locks_is_named(study, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert run() == 1
    error = capsys.readouterr().err
    assert "cannot be locked (No locks available), expected a filesystem with locks" in error


def test_a_signal_to_the_parent_of_several_ends_all_with_how_far_it_is(start):
    parent = start("--jobs", "2", "--seeds", "4", "run.epochs=2000")
    limit = time.monotonic() + 60
    while len(list(Path("out/runs").glob("*/metrics.jsonl"))) < 2:
        assert time.monotonic() < limit
        time.sleep(0.05)
    workers = list(claimed().values())
    parent.terminate()
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == 143
    assert "Traceback" not in said
    assert "stopped with 0 of 8 cells there; the same command goes on" in said.splitlines()[-1]
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
