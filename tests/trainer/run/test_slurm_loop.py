"""examples/slurm/loop.sbatch as it is, with stand-ins for srun and scontrol.

On a real Slurm: tests/lab/test_sbatch.py.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.multirank import ROOT, find_descendants, job_environ, launch_command, run_job
from tests.trainer.digits import write_shard

EPOCHS, STEPS, LIMIT_S = 20, 20 * 6, 120
STEP = re.compile(r"^epoch (\d+), step (\d+): loss (\S+)$", re.MULTILINE)


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Arguments of the loop: a hundred pictures, six steps an epoch on two ranks."""
    write_shard(tmp_path / "train-000000.tar")
    shards = str(tmp_path / "train-{000000..000000}.tar")
    return [shards, "--image", "png", "--classes", "2", "--batch-size", "8", f"--epochs={EPOCHS}"]


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """What a job's environment holds, and programs in place of Slurm's."""
    programs = tmp_path / "bin"
    programs.mkdir()
    drops = 'while [[ $1 == --* ]]; do shift; done; [[ $1 == */false ]] && exec "$@"; shift\n'
    # What follows Python, with the variables that ranks may be forked with
    begin = shlex.join(["env", "-uPYTHON", "-uLOOP", *launch_command("mpiexec", 2)])
    for name, text in {
        "srun": f'{drops}PATH={os.environ["PATH"]} exec {begin} "$@"',
        "scontrol": f'echo "$@" >> {tmp_path}/asked-of-slurm',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = job_environ(
        {
            "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "loop", "PYTHON": sys.executable,
            "LOOP": str(ROOT / "examples/slurm/loop.py"), "TONARI_CACHE": str(tmp_path / "cache"),
            "TONARI_RANKS_PER_NODE": "1",
        }
    )  # fmt: skip
    return {**environment, "PATH": f"{programs}:{environment['PATH']}"}


@contextmanager
def started(slurm: dict[str, str], log: Path, *end: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the script as Slurm would: its log goes on where it was."""
    command = ["bash", str(ROOT / "examples/slurm/loop.sbatch"), *end]
    with log.open("ab") as file:
        job = subprocess.Popen(command, env=slurm, cwd=log.parent, stdout=file, stderr=file)
    try:
        yield job
    finally:
        for pid in [*find_descendants(job.pid), job.pid] if job.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


@pytest.mark.multirank
@pytest.mark.thorough
def test_on_usr1_two_ranks_save_the_job_is_queued_again_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path, data: list[str], slurm: dict[str, str]
) -> None:
    program = [*launch_command("mpiexec", 2), slurm["LOOP"], *data, "--saved"]
    environment = {"TONARI_RANKS_PER_NODE": "1", "TONARI_CACHE": str(tmp_path / "other")}
    status, whole = run_job([*program, str(tmp_path / "whole")], env=environment, timeout_s=LIMIT_S)
    assert status == 0, whole
    log, asked_of_slurm = tmp_path / "loop-7.log", tmp_path / "asked-of-slurm"
    with started(slurm, log, *data) as job:
        deadline = time.monotonic() + LIMIT_S
        while len(STEP.findall(log.read_text())) < 8 and job.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        job.send_signal(signal.SIGUSR1)  # to the script alone
        assert job.wait(LIMIT_S) == 0, log.read_text()
    said = log.read_text()
    stopped = len(STEP.findall(said))
    assert 8 <= stopped < STEPS, said
    assert f"queued again to go on from runs/loop-7/{stopped:08d}\n" in said
    assert asked_of_slurm.read_text() == "requeue 7\n"
    with started(slurm, log, *data) as job:
        assert job.wait(LIMIT_S) == 0, log.read_text()
    assert STEP.findall(log.read_text()) == STEP.findall(whole)
    assert len(STEP.findall(whole)) == STEPS
    assert asked_of_slurm.read_text() == "requeue 7\n", "it has come to its end"
    kept = sorted(path.parent.name for path in (tmp_path / "runs/loop-7").glob("*/parts.pt"))
    assert kept == [f"{STEPS - 6:08d}", f"{STEPS:08d}"]


def test_a_loop_that_fails_before_it_saved_is_not_queued_again(
    tmp_path: Path, data: list[str], slurm: dict[str, str]
) -> None:
    log = tmp_path / "loop-7.log"
    with started({**slurm, "PYTHON": "/bin/false"}, log, *data) as job:
        assert job.wait(LIMIT_S) == 1
    assert "status 1 and no save after the start: not queued again" in log.read_text()
    assert not (tmp_path / "asked-of-slurm").exists()
