"""A job of several ranks that does not end says where each of them is."""

import pytest

from tests.multirank import Launcher, launch_command, run_job

HANG = """
import time
def waits_for_ever():
    time.sleep(600)
print("begun", flush=True)
waits_for_ever()
"""


@pytest.mark.multirank
@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_a_job_that_hangs_shows_the_stacks_of_all_its_ranks(launcher: Launcher, tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(HANG)
    with pytest.raises(TimeoutError, match="still running after") as caught:
        run_job([*launch_command(launcher, 2), str(script)], env=None, timeout_s=15)
    said = str(caught.value)
    assert said.count("begun") == 2
    assert said.count("in waits_for_ever") == 2
