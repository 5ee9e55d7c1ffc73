"""A job of several ranks that does not end says where each of them is."""

import os
import subprocess
import sys
import time

import pytest

from tests.multirank import Launcher, launch_command, run_job, write_stacks

HANG = """
import os, pathlib, sys, time
def waits_for_ever():
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)
waits_for_ever()
"""


@pytest.mark.multirank
@pytest.mark.parametrize(
    "launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.nightly)]
)
def test_a_job_that_hangs_shows_the_stacks_of_all_its_ranks(launcher: Launcher, tmp_path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "hangs.py").write_text(HANG)
    command = [*launch_command(launcher, 2), str(tmp_path / "hangs.py"), str(tmp_path / "begun")]
    with open(tmp_path / "output", "wb") as output:
        job = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, "PYTHONFAULTHANDLER": "1"}
        )
        while len(list((tmp_path / "begun").iterdir())) < 2:
            assert job.poll() is None
            time.sleep(0.05)
        write_stacks(job.pid)
        job.wait()
    assert (tmp_path / "output").read_text(errors="replace").count("in waits_for_ever") == 2


def test_a_job_that_takes_too_long_is_ended_with_what_it_wrote():
    program = "import time; print('begun', flush=True); time.sleep(600)"
    with pytest.raises(TimeoutError, match=r"still running after 2 s\n(?s:.)*begun"):
        run_job([sys.executable, "-c", program], env=None, timeout_s=2)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_variable_that_one_test_sets_is_gone_in_the_next(turn: int):
    assert "LEFT_BY_A_TEST" not in os.environ
    os.environ["LEFT_BY_A_TEST"] = f"{turn}"
