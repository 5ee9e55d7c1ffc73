"""The same over real processes: messages by MPI and by torch, shared memory, no name left."""

import json

import pytest

from tests.trainer.mesh.meshes import NUM_SAMPLES, run_mesh


@pytest.mark.multirank
@pytest.mark.parametrize(
    "launcher", [pytest.param("mpiexec", marks=pytest.mark.nightly), "torchrun"]
)
def test_processes_see_what_one_process_sees(run_ranks, tmp_path, launcher):
    one = run_mesh(tmp_path, (1, 1, 1))[0]
    expected = json.loads(json.dumps(one.steps))
    reports = run_ranks("trainer/deliver_job", 4, launcher=launcher).reports
    for mesh in ("pp2tp2", "pp4"):
        ranks = [report[mesh] for report in reports]
        assert ranks[3]["steps"] == expected
        assert ranks[0]["losses"] == one.losses
        assert [rank["rows_read"] for rank in ranks] == [NUM_SAMPLES, 0, 0, 0]
    assert reports[2]["pp2tp2"]["steps"] == expected
    pipeline = [report["pp4"] for report in reports]
    for middle in pipeline[1:3]:
        assert (middle["held_bytes"], middle["columns"]) == (0, [[]])
    # Control and slots, of the first mesh gone by now, of the second in use.
    assert pipeline[0]["mapped"] == pipeline[3]["mapped"] == 2
    assert pipeline[1]["mapped"] == pipeline[2]["mapped"] == 0
