"""Rows pulled between real ranks on two nodes: a lost cache, and a save older than the caches."""

import json
import shutil

import pytest

from tests.dataio.source.shards import numbered, write_tar

pytestmark = pytest.mark.multirank

NODES = {"TONARI_RANKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("by", "lost", "copies"),
    [
        pytest.param("uniform", True, 1, marks=pytest.mark.nightly),
        pytest.param("uniform", False, 1, marks=pytest.mark.nightly),
        pytest.param("uniform", True, 2, marks=pytest.mark.nightly),
        ("dealing", True, 1),
        ("dealing", True, 2),
    ],
)
def test_a_save_three_epochs_old_goes_on_from_what_the_nodes_hold(
    run_ranks, tmp_path, by, lost, copies
):
    for shard in range(4):
        write_tar(tmp_path / f"{shard}.tar", numbered(24, first=24 * shard, num_bytes=300))
    usual = {"source": str(tmp_path / "{0..3}.tar"), "by": by, "hides": True, "epochs": 6}
    usual |= {"cache": str(tmp_path / "cache"), "copies": copies}

    def start(**options):
        return run_ranks("loader_job", 4, json.dumps(usual | options), env=NODES).reports

    saved = str(tmp_path / "saved")
    first = start(stop=15, save=saved)
    assert first[0]["trained"][-1][0] == 2, "saved in epoch 2"
    # Ends with the caches in epoch 5
    whole = start(at=saved)
    if lost:
        (directory,) = (tmp_path / "cache").glob("*/node1")
        shutil.rmtree(directory)
    again = start(at=saved)
    for expected, found in zip(whole, again, strict=True):
        assert found["trained"] == expected["trained"]
        assert found["wrong"] == 0
    assert sum(report["stats"]["pulled_rows"] for report in again) > 0
    read = sum(report["stats"]["source_bytes"] for report in again)
    assert (read > 0) == (lost and copies == 1), "only for rows that nobody holds"
