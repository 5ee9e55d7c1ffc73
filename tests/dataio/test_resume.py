"""A new process goes on from any step of any epoch as if nothing had happened."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.dataio.loaders import POLICIES
from tests.multirank import job_environ, python_command

PROGRAM = Path(__file__).parents[1] / "ranks" / "loader_resume.py"


def start(part, work, policy):
    """Run one process to its end; what each of its ranks saw."""
    command = [*python_command(), str(PROGRAM), part, str(work), policy]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=job_environ(), check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.multirank
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=() if name == "kakurenbo" else pytest.mark.nightly)
        for name in POLICIES
    ],
)
def test_a_new_process_goes_on_from_every_step_byte_for_byte(tmp_path, policy):
    uninterrupted = start("whole", tmp_path, policy)
    ends = start("rest", tmp_path, policy)
    assert len(ends) >= 15, "a save at every step of three epochs"
    for number, ranks in ends.items():
        rest = [seen[int(number) :] for seen in uninterrupted]
        assert ranks == rest, f"from save {number}"
