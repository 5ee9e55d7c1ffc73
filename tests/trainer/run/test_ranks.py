"""Several ranks for real, by both launchers."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.multirank import Launcher, RunRanks
from tests.trainer.deliver.fake_loader import FakeLoader, make_models

pytestmark = pytest.mark.multirank


@pytest.mark.parametrize(
    ("num_ranks", "dp_shard", "launcher"),
    [
        pytest.param(2, 1, "mpiexec", marks=pytest.mark.nightly),
        pytest.param(2, 2, "torchrun", marks=pytest.mark.nightly),
        pytest.param(3, 1, "torchrun", marks=pytest.mark.nightly),
        (4, 2, "mpiexec"),
    ],
)
def test_gradients_equal_those_of_one_process_and_statistics_are_averaged(
    run_ranks: RunRanks, num_ranks: int, dp_shard: int, launcher: Launcher
) -> None:
    loader = FakeLoader(replica=0, num_replicas=1, global_batch_size=24, steps=1)
    batch = loader.batch(0)
    reports = run_ranks("trainer/gradients", num_ranks, str(dp_shard), launcher=launcher).reports
    assert [report["statistics"] for report in reports] == num_ranks * [[(num_ranks - 1) / 2]]
    for name, model in make_models().items():
        loss = F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")
        expected = torch.autograd.grad((loss * batch["weight"]).mean(), list(model.parameters()))
        for report in reports:
            for found, gradient in zip(report[name], expected, strict=True):
                error = (torch.tensor(found, dtype=torch.float64) - gradient).norm()
                assert error <= 1e-9 * gradient.norm()


def test_a_resumed_job_equals_the_uninterrupted_one_bit_for_bit(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    whole = run_ranks("trainer/resume", 3, str(tmp_path / "whole"), "1", "6").reports
    prefix = run_ranks("trainer/resume", 3, str(tmp_path / "cut"), "1", "2").reports
    rest = run_ranks("trainer/resume", 3, str(tmp_path / "cut"), "1", "6").reports
    for rank in range(3):
        assert prefix[rank]["losses"] + rest[rank]["losses"] == whole[rank]["losses"]
        assert rest[rank]["weights"] == whole[0]["weights"]


@pytest.mark.nightly
def test_a_checkpoint_moves_to_another_mesh(run_ranks: RunRanks, tmp_path: Path) -> None:
    whole = run_ranks("trainer/resume", 1, str(tmp_path / "whole"), "1", "4").reports[0]
    run_ranks("trainer/resume", 2, str(tmp_path / "moved"), "2", "2")
    moved = run_ranks("trainer/resume", 2, str(tmp_path / "moved"), "1", "4", launcher="torchrun")
    for found, expected in zip(moved.reports[0]["weights"], whole["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
