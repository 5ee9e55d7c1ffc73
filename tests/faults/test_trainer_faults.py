"""A rank of a training job dies, fails, stops or hangs: all end in time, and it is named."""

import re
import time
from pathlib import Path

import pytest

from tests.multirank import ROOT, Launcher, RunRanks, ends, launch_command, run_job

pytestmark = pytest.mark.multirank

WORDS = {
    "kill": r"is silent after \d steps: its process was killed",
    "stop": r"is silent after \d steps: its process was killed or stopped",
    "raise": r"failed: ValueError: this model is on fire",
    "spin": r"hangs after 3 steps in .*watched.py:\d+ \(spin\): look there",
}
OF_THE_LAUNCHER = {
    # Faster than any of ours, and as clear.
    # It may end all others before one of them can speak; ranks.txt says whose process it was.
    ("mpiexec", "kill"): r"PID {pid} RUNNING",
    ("torchrun", "kill"): r"rank +: {rank} \(local_rank: {rank}\)\n *exitcode +: -9",
    ("mpiexec", "raise"): r"\[rank {rank}\] ValueError: this model is on fire",
    ("torchrun", "raise"): r"\[rank {rank}\] ValueError: this model is on fire",
}
LIMIT_S = 30.0


@pytest.mark.parametrize(
    ("launcher", "way", "rank"),
    [
        pytest.param("mpiexec", "kill", 0, marks=pytest.mark.slow),
        ("mpiexec", "raise", 1),
        pytest.param("mpiexec", "stop", 2, marks=pytest.mark.slow),
        pytest.param("mpiexec", "spin", 3, marks=pytest.mark.slow),
        pytest.param("mpiexec", "stop", 0, marks=pytest.mark.slow),
        pytest.param("torchrun", "kill", 3, marks=pytest.mark.nightly),
        pytest.param("torchrun", "raise", 0, marks=pytest.mark.slow),
        pytest.param("torchrun", "stop", 1, marks=pytest.mark.slow),
        pytest.param("torchrun", "spin", 2, marks=pytest.mark.slow),
        pytest.param("torchrun", "kill", 0, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_end_within_the_limit_and_the_message_names_the_culprit(
    tmp_path: Path, launcher: Launcher, way: str, rank: int
) -> None:
    program = str(ROOT / "tests/ranks/trainer/watched.py")
    arguments = [str(tmp_path), str(tmp_path / "checkpoints"), str(rank), way]
    command = [*launch_command(launcher, 4), program, *arguments]
    status, said = run_job(command, env=None, timeout_s=120)
    ended_s = time.time() - (tmp_path / "fallen").stat().st_mtime
    assert status != 0
    assert ended_s < LIMIT_S, said
    named = rf"rank {rank} \(dp_replicate {rank // 2}, dp_shard {rank % 2}\): {WORDS[way]}"
    pid = (tmp_path / f"{rank}.pid").read_text()
    by_launcher = OF_THE_LAUNCHER.get((launcher, way), "never").format(rank=rank, pid=pid)
    assert f"shard {rank % 2}): process {pid} on" in (tmp_path / "ranks.txt").read_text()
    assert re.search(named, said) or re.search(by_launcher, said), said
    others = "".join(str(other) for other in range(4) if other != rank)
    assert not re.search(rf"rank [{others}] \(dp_[^)]*\): (is silent|hangs|failed)", said), said
    for path in tmp_path.glob("*.pid"):
        assert ends(int(path.read_text())), f"rank {path.stem} is still there"


@pytest.mark.nightly
def test_a_job_that_fell_goes_on_from_its_checkpoint_to_the_same_weights(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    whole = run_ranks("trainer/watched", 4, str(tmp_path / "whole"), "-1", "none")
    fallen = run_ranks("trainer/watched", 4, str(tmp_path / "cut"), "2", "kill", check=False)
    assert fallen.returncode != 0
    again = run_ranks("trainer/watched", 4, str(tmp_path / "cut"), "-1", "none")
    assert [report["first"] for report in again.reports] == [2] * 4
    assert [r["weights"] for r in again.reports] == [r["weights"] for r in whole.reports]
