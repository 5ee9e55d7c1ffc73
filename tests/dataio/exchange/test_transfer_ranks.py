"""Parcels between real ranks, beside collectives, by both drivers."""

import pytest

ROWS = 4000


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("launcher", "ranks", "driver"),
    [
        pytest.param("mpiexec", 3, "thread", marks=pytest.mark.nightly),
        ("mpiexec", 3, "polling"),
        ("torchrun", 2, "thread"),
        pytest.param("torchrun", 2, "polling", marks=pytest.mark.nightly),
        pytest.param("mpiexec", 2, "thread", marks=pytest.mark.nightly),
        pytest.param("mpiexec", 2, "polling", marks=pytest.mark.nightly),
    ],
)
def test_rows_arrive_once_beside_the_collectives_of_training(run_ranks, launcher, ranks, driver):
    ended = run_ranks("transfer_job", ranks, driver, "none", launcher=launcher, timeout_s=90)
    for rank, report in enumerate(ended.reports):
        first = ROWS * ((rank - 1) % ranks)
        assert report["arrived"] == list(range(first, first + ROWS))
        assert report["figures"]["rows"] == ROWS
        assert report["threaded"]


@pytest.mark.multirank
@pytest.mark.parametrize("driver", [pytest.param("thread", marks=pytest.mark.nightly), "polling"])
def test_a_rank_that_falls_silent_is_named_before_the_epoch_ends(run_ranks, driver):
    ended = run_ranks("transfer_job", 2, driver, "silent", timeout_s=40, check=False)
    assert ended.returncode != 0
    (report,) = ended.reports
    assert "rank 0: waited 1 s for rank 1 while exchanging rows" in report["error"]
