"""A study on a real Slurm: an array over two nodes, a requeued task, a report at its end."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
