"""Rows exchanged, or dealt anew, on real MPI ranks: killed, and resumed."""

import json

import pytest

from tests.dataio.source.shards import numbered, write_tar

pytestmark = pytest.mark.multirank

SAMPLES = 83
EPOCHS = 4


@pytest.fixture
def shards(tmp_path):
    write_tar(tmp_path / "0.tar", numbered(SAMPLES, first=0, num_bytes=300))
    return str(tmp_path / "0.tar")


@pytest.mark.parametrize(
    ("by", "ranks", "ranks_per_node"),
    [
        pytest.param("uniform", 2, 1, marks=pytest.mark.nightly),
        ("uniform", 4, 2),
        pytest.param("dealing", 3, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    run_ranks, shards, tmp_path, by, ranks, ranks_per_node
):
    """Saved in epoch 1, killed in epoch 3: the caches are two epochs ahead, or between two."""
    environment = {"TONARI_RANKS_PER_NODE": str(ranks_per_node)}
    usual = {"source": shards, "by": by, "hides": True, "epochs": EPOCHS, "timeout_s": 20}
    usual |= {"cache": str(tmp_path / "cache")}

    def start(check=True, **options):
        return run_ranks(
            "loader_job", ranks, json.dumps(usual | options), env=environment, check=check
        ).reports

    whole = start(cache=str(tmp_path / "whole"))
    saved = str(tmp_path / "saved")
    steps = whole[0]["steps"][0][1]
    first = start(stop=steps + 2, save=saved)
    start(check=False, at=saved, killed=ranks - 1, fall_epoch=3)
    rest = start(at=saved)
    for before, after, uninterrupted in zip(first, rest, whole, strict=True):
        assert before["trained"] + after["trained"] == uninterrupted["trained"]
        assert after["wrong"] == uninterrupted["wrong"] == 0
    trained = sorted(i for report in whole for epoch, i in report["trained"] if epoch == 0)
    assert trained == list(range(SAMPLES))
