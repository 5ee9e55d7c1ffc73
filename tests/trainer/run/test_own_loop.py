"""The example with a loop of one's own, as its first lines say to start it."""

import re
from pathlib import Path

import pytest

from tests.multirank import ROOT, launch_command, python_command, run_job
from tests.trainer.digits import write_shard


@pytest.mark.multirank
@pytest.mark.parametrize(
    "launcher",
    [
        "mpiexec",
        pytest.param("torchrun", marks=pytest.mark.nightly),
        pytest.param("python", marks=pytest.mark.nightly),
    ],
)
def test_the_example_learns_under_every_launcher(tmp_path: Path, launcher: str) -> None:
    write_shard(tmp_path / "train-000000.tar")
    begin = {
        "python": python_command(),
        "mpiexec": launch_command("mpiexec", 2),
        "torchrun": launch_command("torchrun", 2),
    }
    shards = str(tmp_path / "train-{000000..000000}.tar")
    command = [*begin[launcher], str(ROOT / "examples" / "own_loop.py"), shards]
    status, output = run_job(
        [*command, "--classes", "2", "--batch-size", "8"],
        env={"TONARI_CACHE": str(tmp_path / "cache"), "TONARI_RANKS_PER_NODE": "1"},
        timeout_s=90,
    )
    assert status == 0, output
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d\.\d+), \d+% hidden", output)]
    assert len(losses) == 3, output
    assert losses[-1] < losses[0]
