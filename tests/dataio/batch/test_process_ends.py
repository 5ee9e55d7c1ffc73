"""A process that does not find its work, or ends amid it, is one message with the cure."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dataio import Loader, Reports, WorkerError, Workers
from dataio.batch.process_checks import UNGUARDED, check_sendable, why_ended
from dataio.world import single_world
from tests.dataio.batch.gather_pool import gathered, open_pool, pick_in_turn
from tests.dataio.batch.test_gather import PLAIN
from tests.memory_source import FIELDS, MemorySource
from tests.multirank import ROOT
from tests.opened import make_gather

# What runs in a process stands at module level, where it is found again.


def end_by(sample, rng, *, number):
    if number == signal.SIGINT:
        # What a shell starts in the background ignores it.
        signal.signal(number, signal.default_int_handler)
    os.kill(os.getpid(), number)
    return sample


def end_itself(sample, rng):
    os._exit(0)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (partial(end_by, number=signal.SIGKILL), r"SIGKILL.*memory.*dmesg.*fewer processes"),
        (partial(end_by, number=signal.SIGINT), r"interrupted.*start again"),
        (partial(end_by, number=signal.SIGSEGV), r"SIGSEGV.*crashed.*faulthandler.*processes=0"),
        (end_itself, r"interrupted"),
    ],
    ids=["memory", "interrupt", "crash", "exit"],
)
def test_a_process_that_ends_says_why(tmp_path, monkeypatch, transform, message):
    monkeypatch.setattr("dataio.batch.process_transform.CHECK_S", 0.2)
    with open_pool(tmp_path, PLAIN) as pool:
        with pytest.raises(WorkerError, match=f"of 1 processes not all run on.*{message}"):
            gathered(pool, PLAIN, transform=transform, num_processes=1)


def same(sample, rng):
    return sample


def test_a_process_that_ends_between_two_epochs_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("dataio.batch.process_transform.CHECK_S", 0.2)
    with open_pool(tmp_path, PLAIN) as pool:
        gather = make_gather(pool, PLAIN, num_threads=0, num_processes=2, transform=same)
        try:
            assert len([*gather.batches(pick_in_turn(40), range(5), epoch=0)]) == 5
            assert gather._workers is not None
            first = gather._workers._processes()[0]
            first.kill()
            first.join(60)
            with pytest.raises(WorkerError, match=r"of 2 processes not all run on.*SIGKILL.*dmesg"):
                [*gather.batches(pick_in_turn(40), range(5), epoch=1)]
            # Processes are started anew for whoever goes on.
            assert len([*gather.batches(pick_in_turn(40), range(5), epoch=1)]) == 5
        finally:
            gather.close()


def test_one_that_starts_the_script_again_is_named_before_all_others():
    assert '`if __name__ == "__main__":`' in why_ended([None, UNGUARDED, -signal.SIGKILL, 0])
    assert "printed why above" in why_ended([None, 1]), "pytest's own script has its guard"


def local(name):
    def inner(sample, rng):
        return sample

    return {"lambda": lambda sample, rng: sample, "local": inner}[name]


class Unsendable:
    """A transform that holds what cannot be sent."""

    def __init__(self):
        self.rows = iter(lambda: 0, 1)

    def __call__(self, sample, rng):
        return sample


@pytest.mark.parametrize(
    "transform", [local("lambda"), local("local"), Unsendable()], ids=["lambda", "local", "object"]
)
def test_what_cannot_be_sent_is_refused_before_a_row_is_staged(tmp_path, transform):
    source = MemorySource(40)
    with pytest.raises(ValueError, match=r"transform: .*cannot be sent.*top of a module.*threads"):
        Loader(
            source,
            batch_size=4,
            fields=FIELDS,
            cache=tmp_path,
            world=single_world(),
            transform=transform,
            workers=Workers(processes=1),
            reports=Reports(progress=False),
        )
    assert len(source.rows_read) == 0


SCRIPT = """
    import sys
    import numpy as np
    import dataio

    def double(sample, rng):
        return {"x": sample["x"] * 2}

    def train():
        source = dataio.NumpySource({"x": np.arange(8.0)})
        fields = {"x": dataio.Array("x", (), "float64")}
        with dataio.Loader(
            source, batch_size=4, fields=fields, cache=sys.argv[1], transform=TRANSFORM,
            workers=dataio.Workers(processes=2), reports=dataio.Reports(progress=False),
        ) as loader:
            print(sorted(x for batch in loader for x in batch["x"].tolist()))
"""
UNGUARDED_SCRIPT = textwrap.dedent(SCRIPT) + "\ntrain()\n"
GUARDED_SCRIPT = textwrap.dedent(SCRIPT) + '\nif __name__ == "__main__":\n    train()\n'


def run(arguments: list[str], root: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{root}"},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
        **options,
    )


def last_line(done):
    """The message: what is printed last, of one error alone."""
    assert done.returncode == 1, done.stderr
    assert "bootstrapping" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def write(root, text, transform="double"):
    path = root / "mine.py"
    path.write_text(text.replace("TRANSFORM", transform))
    return path


@pytest.mark.thorough
def test_a_script_without_a_guard_says_so_once(tmp_path):
    script = write(tmp_path, UNGUARDED_SCRIPT)
    done = run([str(script), str(tmp_path / "cache")], tmp_path)
    said = last_line(done)
    assert re.search(rf'WorkerError: .*{script}.*`if __name__ == "__main__":`', said), said
    assert done.stderr.count("Traceback") == 1, "no process prints one of its own"


def test_a_script_with_a_guard_trains(tmp_path):
    done = run([str(write(tmp_path, GUARDED_SCRIPT)), str(tmp_path / "cache")], tmp_path)
    assert done.stdout.strip() == str([2.0 * i for i in range(8)]), done.stderr


def test_a_script_read_from_standard_input_says_so(tmp_path):
    text = GUARDED_SCRIPT.replace("TRANSFORM", "double")
    done = run(["-", str(tmp_path / "cache")], tmp_path, input=text)
    assert re.search("ValueError: Workers: .*<stdin>.*save it", last_line(done))


def test_a_function_of_a_notebook_says_so_and_one_of_a_file_beside_it_runs(tmp_path):
    """A notebook's cells are like a command line: a main module without a file."""
    text = GUARDED_SCRIPT.replace("TRANSFORM", "double")
    done = run(["-c", text, str(tmp_path / "cache")], tmp_path)
    assert re.search("transform: .*double.*notebook.*import it from there", last_line(done))
    write(tmp_path, GUARDED_SCRIPT)
    done = run(["-c", "import mine; mine.train()", str(tmp_path / "cache")], tmp_path)
    assert done.stdout.strip() == str([2.0 * i for i in range(8)]), done.stderr


def test_an_error_of_the_script_as_it_is_imported_is_pointed_to(tmp_path):
    broken = 'import multiprocessing\nassert __name__ == "__main__", "imported"\n'
    script = write(tmp_path, broken + GUARDED_SCRIPT)
    done = run([str(script), str(tmp_path / "cache")], tmp_path)
    assert re.search("WorkerError: .*failed as it started.*above", last_line(done))
    assert "AssertionError: imported" in done.stderr


def test_looking_whether_a_transform_can_be_sent_leaves_its_tensors_where_they_are():
    weights = torch.ones(3)
    check_sendable({"transform": partial(end_by, number=weights)})
    assert not weights.is_shared()
