"""Parcels between real ranks, beside collectives, by both drivers."""

import pytest

ROWS = 4000


@pytest.mark.multirank
@pytest.mark.parametrize("driver", ["thread", "polling"])
@pytest.mark.parametrize(("launcher", "ranks"), [("mpiexec", 2), ("mpiexec", 3), ("torchrun", 2)])
def test_rows_arrive_once_beside_the_collectives_of_training(run_ranks, launcher, ranks, driver):
    ended = run_ranks("transfer_job", ranks, driver, "none", launcher=launcher, timeout_s=90)
    for rank, report in enumerate(ended.reports):
        first = ROWS * ((rank - 1) % ranks)
        assert report["arrived"] == list(range(first, first + ROWS))
        assert report["figures"]["rows"] == ROWS
        assert report["threaded"]


@pytest.mark.multirank
@pytest.mark.parametrize("driver", ["thread", "polling"])
def test_a_rank_that_falls_silent_is_named_before_the_epoch_ends(run_ranks, driver):
    ended = run_ranks("transfer_job", 2, driver, "silent", timeout_s=40, check=False)
    assert ended.returncode != 0
    (report,) = ended.reports
    assert "rank 0: waited 1 s for rank 1 while exchanging rows" in report["error"]
