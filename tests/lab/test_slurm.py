"""A study on a real Slurm: an array over two nodes; ranks by srun that go on without a node."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dataio.job.live_ranks import write_samples
from tests.dataio.job.test_live import check, steps_of
from tests.lab.slurm import start_slurm, what_is_missing
from tests.tonari.ablate.study import make_study

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


@pytest.mark.lab
def test_an_array_trains_a_study_and_a_requeued_task_trains_what_is_missing(make_lab, tmp_path):
    if reason := what_is_missing():
        pytest.skip(reason)
    lab = make_lab(2)
    slurm = start_slurm(lab, tmp_path / "slurm")
    shared = tmp_path / "shared"
    shared.mkdir()
    make_study(shared)

    def on_node0(*command: str) -> str:
        ended = subprocess.run(
            [*lab.enter("node0"), "env", "-C", str(shared), *command],
            env={**slurm, "PYTHONPATH": str(ROOT)}, timeout=TIMEOUT_S, capture_output=True,
            text=True,
        )  # fmt: skip
        assert not ended.returncode, ended.stderr
        return ended.stdout

    def wait_for(job: str) -> None:
        on_node0("sbatch", "--wait", f"--dependency=afterany:{job}", "--wrap=true")

    ablate = [sys.executable, "-m", "tonari", "ablate", "study.toml", "--out", "out"]
    said = on_node0(*ablate, "--slurm", "--slurm-args", "--partition=all")
    job, report = re.findall(r"job (\d+)", said)
    wait_for(report)
    logs = "\n".join(path.read_text() for path in (shared / "out/slurm").glob("*.log"))
    document = json.loads((shared / "out/report/study.json").read_text())
    assert document["cells"] == 4, logs
    assert logs.count("failed") == 0
    claims = [json.loads(path.read_text()) for path in (shared / "out/claims").iterdir()]
    assert {claim["host"] for claim in claims} == {"node0", "node1"}
    assert len({claim["pid"] for claim in claims}) == 4, "a task trains one cell"
    # As if it had been killed amid its cell
    lost = sorted((shared / "out/cells").glob("*.json"))[0]
    lost.unlink()
    on_node0("scontrol", "requeue", f"{job}_3")
    on_node0("scontrol", "update", f"JobId={job}_3", "StartTime=now")  # not in two minutes
    wait_for(f"{job}_3")
    assert lost.exists()


@pytest.mark.lab
def test_srun_loses_a_node_the_others_train_on_and_another_srun_joins_them(make_lab, tmp_path):
    if reason := what_is_missing():
        pytest.skip(reason)
    lab = make_lab(4)
    slurm = start_slurm(lab, tmp_path / "slurm")
    write_samples(tmp_path / "samples.parquet", 240)
    given = json.dumps({"cache": str(lab.scratch / "cache"), "timeout_s": 60, "patience_s": 8})
    called = json.dumps({"0": ["call", "forward", 40]})

    def srun(*where: str, **environ: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [*lab.enter("node0"), "srun", "--no-kill", "--wait=0", *where, sys.executable, "-m",
             "tests.dataio.job.live_ranks", str(tmp_path), "3", called, given], cwd=ROOT,
            env={**slurm, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                 "SLURM_KILL_BAD_EXIT": "0", **environ},
        )  # fmt: skip

    def wait_until(holds: Callable[[], object]) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < until_s
            assert job.poll() is None, "see what srun wrote"
            time.sleep(0.02)

    job = srun("--nodes=3", "--ntasks=3")
    wait_until(lambda: len(steps_of(tmp_path, 0)) > 9)
    lab.kill("node1")
    wait_until((tmp_path / "called-0").exists)
    more = srun("--nodes=1", "--ntasks=1", FIRST="3", TONARI_LIVE_JOIN="1")
    assert (job.wait(TIMEOUT_S), more.wait(TIMEOUT_S)) == (0, 0)
    calls = check(tmp_path, 4, left=[0, 2, 3], num_samples=240)
    assert [ranks for ranks, _ in calls] == [[0, 1, 2], [0, 2], [0, 2, 3]]
    assert json.loads((tmp_path / "end-3.json").read_text())[-1] == [0, 1, 2], "a node each"
