"""Rows and models exchanged side by side on one world: each as if the other were not there."""

import pytest

from dataio.world import run_threads, thread_worlds
from tests.ranks.models_beside_rows import EVERY, beside_and_alone


def check(reports):
    for report in reports:
        assert report["rows"], "batches are those of the loader alone"
        assert report["models"], "the model is that of the model exchange alone"
        assert report["exchanged"]
        assert report["rounds"] >= report["steps"] // EVERY - 1 > 3


@pytest.mark.parametrize("driver", ["thread", "polling"])
def test_rows_and_models_keep_apart_on_one_world(tmp_path, driver):
    worlds = thread_worlds([1, 1, 2], timeout_s=20)
    check(run_threads(worlds, lambda world: beside_and_alone(world, tmp_path, driver)))


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("launcher", "driver"),
    [
        ("mpiexec", "polling"),
        ("torchrun", "thread"),
        pytest.param("mpiexec", "thread", marks=pytest.mark.nightly),
    ],
)
def test_rows_and_models_keep_apart_on_real_ranks(run_ranks, tmp_path, driver, launcher):
    environment = {"TONARI_RANKS_PER_NODE": "1"}
    arguments = ("models_beside_rows", 2, str(tmp_path), driver)
    check(run_ranks(*arguments, env=environment, launcher=launcher, timeout_s=100).reports)
