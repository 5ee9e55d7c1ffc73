"""The examples with tiles of a weather file and with volumes, as their first lines say to start."""

import re
from pathlib import Path

import pytest

from tests.multirank import ROOT, launch_command, python_command, run_job


@pytest.mark.multirank
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_example_learns_on_one_node_and_on_two(tmp_path: Path, num_ranks: int) -> None:
    begin = python_command() if num_ranks == 1 else launch_command("mpiexec", num_ranks)
    status, output = run_job(
        [*begin, str(ROOT / "examples" / "weather_tiles.py"), str(tmp_path / "weather")],
        env={"TONARI_RANKS_PER_NODE": "1"},
        timeout_s=120,
    )
    assert status == 0, output
    errors = [float(error) for error in re.findall(r"squared error (\d\.\d+)", output)]
    assert len(errors) == 3, output
    # A forecast that nothing moves has 0.12.
    assert errors[-1] < 0.06, output


@pytest.mark.multirank
def test_the_example_finds_balls_in_volumes_that_two_ranks_of_a_node_share(tmp_path: Path) -> None:
    program = [*launch_command("mpiexec", 2), str(ROOT / "examples" / "volumes.py")]
    status, output = run_job([*program, str(tmp_path)], env={}, timeout_s=120)
    assert status == 0, output
    found = [float(dice) for dice in re.findall(r"Dice (\d\.\d+)", output)]
    assert len(found) == 8, output
    assert found[-1] > 0.7 > found[0], output
    assert len([*(tmp_path / "cache").glob("*/node*")]) == 1
