"""The command under both launchers."""

from pathlib import Path

import pytest

from tests.multirank import launch_command, run_job
from tests.trainer.run.runs import lines

ROOT = Path(__file__).parents[3]


@pytest.mark.smoke
@pytest.mark.multirank
def test_both_launchers_train_in_the_same_order(config: Path) -> None:
    told = {}
    for launcher in ("mpiexec", "torchrun"):
        end = [str(config), f"run.directory={config.parent / launcher}", "run.epochs=2"]
        status, output = run_job(
            [*launch_command(launcher, 4), "-m", "tonari", "train", *end],
            env={"TONARI_RANKS_PER_NODE": "2", "TONARI_CACHE": str(config.parent / launcher / "c")},
            timeout_s=120,
        )
        assert status == 0, output
        assert "trained 2 epochs, 4 steps on 4 replicas, loss" in output
        told[launcher] = lines(config.parent / launcher)
    assert told["mpiexec"] == told["torchrun"]
    assert told["mpiexec"][-1]["exchanged_rows"] > 0


@pytest.mark.slow
@pytest.mark.multirank
def test_both_launchers_train_cifar10_in_the_same_order(tmp_path: Path) -> None:
    data = ROOT.parent / "shared" / "data" / "cifar10-train.parquet"
    if not data.exists():
        pytest.skip(f"{data} is not here")
    told = {}
    for launcher in ("mpiexec", "torchrun"):
        end = [f"data.train={data}", f"run.directory={tmp_path / launcher}", "run.epochs=2"]
        config = str(ROOT / "examples" / "cifar10.toml")
        status, output = run_job(
            [*launch_command(launcher, 4), "-m", "tonari", "train", config, *end],
            env={"TONARI_RANKS_PER_NODE": "2", "TONARI_CACHE": str(tmp_path / launcher / "c")},
            timeout_s=280,
        )
        assert status == 0, output
        told[launcher] = lines(tmp_path / launcher)
    assert told["mpiexec"] == told["torchrun"]
    assert told["mpiexec"][-1]["exchanged_rows"] == 4 * (12_500 // 10)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(
            "data.batch_size=60",
            "[data]: batch_size: 60 is more than a replica's share of 50 rows",
            marks=pytest.mark.nightly,
        ),
        ("mesh.tp=3", "mesh: pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 3 is 3 ranks"),
        pytest.param("data.train=absent.parquet", "absent.parquet", marks=pytest.mark.nightly),
    ],
)
def test_a_wrong_setting_ends_all_ranks(config: Path, override: str, message: str) -> None:
    command = [*launch_command("mpiexec", 2), "-m", "tonari", "train", str(config), override]
    status, output = run_job(command, env={}, timeout_s=30)
    assert status == 1, output
    assert message in output
    assert "Traceback" not in output
