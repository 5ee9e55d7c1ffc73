"""The example with tiles of a weather file, as its first lines say to start it."""

import re
import sys
from pathlib import Path

import pytest

from tests.multirank import ROOT, launch_command, run_job


@pytest.mark.multirank
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_example_learns_on_one_node_and_on_two(tmp_path: Path, num_ranks: int) -> None:
    begin = [sys.executable] if num_ranks == 1 else launch_command("mpiexec", num_ranks)
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
