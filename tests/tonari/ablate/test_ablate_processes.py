"""The processes that train cells side by side: one that dies is replaced, and all end together."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tonari.ablate.jobs import AGAIN, ORPHANED, physical_cores, train_in_processes, visible_gpus
from tonari.ablate.progress import Event
from tonari.errors import CommandError

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


FAKE = """
import json, os, signal, sys
def notify(**event): print(json.dumps(event), flush=True)
tries = {tries!r}
with open(tries, "a") as file: file.write("x")
count = os.path.getsize(tries)
{body}
"""


def train_with(tmp_path, body: str, *, jobs: int = 1, gpus=()) -> tuple[list[Event], list[object]]:
    """Run small programs as the processes; returns their events, and what was lost."""
    program = FAKE.format(tries=str(tmp_path / "tries"), body=body)
    events: list[Event] = []
    lost: list[object] = []
    try:
        train_in_processes(
            [sys.executable, "-c", program], jobs=jobs, gpus=gpus, notify=events.append,
            lost=lambda cell, why: lost.append((cell, why)),
        )  # fmt: skip
    except CommandError as error:
        lost.append(str(error))
    return events, lost


def test_a_process_that_dies_amid_a_cell_is_replaced(tmp_path):
    events, lost = train_with(
        tmp_path,
        "notify(kind='begun', cell=f'c{count}')\n"
        "if count < 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "notify(kind='done', cell=f'c{count}')",
    )
    assert lost == [(f"c{n}", "its process was ended by signal 9 (SIGKILL)") for n in (1, 2)]
    assert [(event.kind, event.cell) for event in events if event.kind != "begun"] == [
        ("failed", "c1"), ("failed", "c2"), ("done", "c3"),
    ]  # fmt: skip


def test_a_process_that_cannot_begin_is_not_started_for_ever(tmp_path):
    assert train_with(tmp_path, "sys.exit(3)", jobs=2) == (
        [],
        ["a training process ended with status 3 before it could begin; what it said is above. The "
         "same command goes on from here"],
    )  # fmt: skip
    assert (tmp_path / "tries").stat().st_size == 2


def test_what_all_processes_refuse_is_said_once(tmp_path):
    body = "notify(kind='refused', error='no data'); sys.exit(1)"
    assert train_with(tmp_path, body, jobs=3) == ([], ["no data"])


def test_a_process_that_asks_to_be_replaced_is(tmp_path):
    body = f"if count < 4: sys.exit({AGAIN})\nnotify(kind='done', cell='c')"
    events, lost = train_with(tmp_path, body)
    assert [event.cell for event in events] == ["c"]
    assert not lost


def test_gpus_are_taken_in_turn(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ["3", "5"]
    body = "notify(kind='done', cell=os.environ['CUDA_VISIBLE_DEVICES'])"
    events, _ = train_with(tmp_path, body, jobs=3, gpus=visible_gpus())
    assert sorted(event.cell for event in events) == ["3", "3", "5"]


def test_a_process_ends_when_its_parent_has(tmp_path):
    program = (
        "import threading; from tonari.ablate.jobs import serve\n"
        "from tonari.ablate.progress import Event\n"
        "def train(notify): print('stray'); notify(Event(kind='begun')); threading.Event().wait()\n"
        "serve(train, ends_on_failure=False)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=ENVIRONMENT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert json.loads(process.stdout.readline())["kind"] == "begun", "and nothing stray"
        process.send_signal(signal.SIGINT)  # a Ctrl-C is the parent's to answer
        process.stdin.close()
        assert process.wait(60) == ORPHANED
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_cores_are_counted_within_what_this_process_may_use():
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))
