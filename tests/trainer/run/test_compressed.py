"""Replicas that send each other compressed gradients stay one model, and go on bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.multirank import RunRanks
from tests.trainer.digits import write_config
from tests.trainer.run.runs import lines, run
from tonari.oracle.trace import alone, trace_step
from tonari.trainer.config.config import load_config
from tonari.trainer.errors import ConfigError
from tonari.trainer.mesh.compress import Compression
from tonari.trainer.mesh.mesh import make_mesh

SETTINGS = (
    "data.label=cls", "model.kind=vit", "model.patch=4", "model.width=8", "model.depth=2",
    "model.heads=2", "data.batch_size=4", "run.epochs=2", "run.checkpoint_steps=6",
    "run.keep_checkpoints=9", "optimizer.clip=1.0", "optimizer.accumulate=2",
    "optimizer.compress_rank=1", "optimizer.compress_warmup_steps=2",
)  # fmt: skip
RUNS = {
    "none": (),
    "powersgd": ("optimizer.compress_gradients=powersgd",),
    "powersgd on shards": (
        "optimizer.compress_gradients=powersgd", "mesh.dp_shard=2", "mesh.dtype=bfloat16",
    ),
    "bfloat16": (
        "optimizer.compress_gradients=bfloat16", "mesh.dtype=bfloat16", "mesh.microbatches=2",
        "mesh.checkpointing=full",
    ),
    "bfloat16 on shards": ("optimizer.compress_gradients=bfloat16", "mesh.dp_shard=2"),
}  # fmt: skip


@pytest.mark.multirank
@pytest.mark.timeout(600)
def test_replicas_stay_one_model_and_a_resumed_run_equals_the_uninterrupted_bit_for_bit(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    config = write_config(tmp_path, num_samples=130)
    cases = {}
    for name, given in RUNS.items():
        for kind in ("whole", "resumed"):
            directory = tmp_path / f"{name} {kind}"
            step = tmp_path / f"{name} whole/checkpoints/step-00000006"
            resume = "auto" if kind == "whole" else str(step)
            cases[name, kind] = "|".join([
                str(config), resume, *SETTINGS, *given, f"run.directory={directory}",
                f"data.cache={directory}/cache",
            ])  # fmt: skip
    apart = "|".join(f"{key}={tmp_path}/wider" for key in ("run.directory", "data.cache"))
    cases["powersgd", "wider"] = (
        f"{cases['powersgd', 'resumed']}|optimizer.compress_rank=2|{apart}/cache"
    )
    ended = run_ranks("trainer/compressed", 4, *cases.values(), timeout_s=300)
    assert "of another mesh or compress_rank" in ended.output
    reports = ended.reports
    _check_average([report["average"] for report in reports])
    for name in RUNS:
        for kind in ("whole", "resumed"):
            found = [report[cases[name, kind]] for report in reports]
            # Ranks of one shard, on both replicas.
            assert found[2:] == found[:2], name
            assert "shards" in name or len(set(found)) == 1, name
            assert found == [report[cases[name, "whole"]] for report in reports], name
    first = {name: [each["loss"] for each in lines(tmp_path / f"{name} whole")] for name in RUNS}
    assert first["powersgd"][:2] == first["none"][:2]
    assert first["powersgd"] != first["none"]


def _check_average(reports: list[dict[str, Any]]) -> None:
    """Check that what steps got and what is left are together what was given."""
    given, got, left = (
        torch.tensor([report[name] for report in reports]) for name in ("given", "got", "error")
    )
    assert torch.equal(got, got[:1].expand_as(got))
    torch.testing.assert_close(got[0] + left.mean(0), given.mean(0))
    # The mean of the last step was of low rank, and is sent whole.
    assert float(left.mean(0).abs().max()) < 1e-4
    for report in reports:
        first, *others = report["left"]
        assert first == 0
        assert min(others) > 1
        # Each compressed step begins with the factor of the one before.
        drawn, warm, *factors = report["bases"]
        assert drawn == warm != factors[0] != factors[1]
        assert report["bases"] == reports[0]["bases"]
        # No later gradient could leave by a factor of zeros.
        assert report["after_zeros"] == drawn
        assert report["bias"] == 16 * [1.5]
        assert report["unused"]
        # Sums in bfloat16 would stay at 256, and 258.
        assert report["bfloat16"] == [65.0, 3.0, -1.0]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("mesh.pp=2",), "mesh.pp"),
        (("mesh.tp=2", "run.live=true"), "mesh.tp and run.live"),
        (("mesh.offload=true",), "mesh.offload"),
        (("mesh.dtype=float64",), "mesh.dtype"),
        (("mesh.tiles=[2, 1]",), "mesh.tiles"),
    ],
)
@pytest.mark.parametrize("kind", ["bfloat16", "powersgd"])
def test_what_compression_does_not_go_with_is_refused_by_name(
    config: Path, unstaged: None, kind: str, overrides: tuple[str, ...], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf'compress_gradients is "{kind}" with {named}.*; leave'):
        run(config, "run", f"optimizer.compress_gradients={kind}", *overrides)


@pytest.mark.parametrize(("shards", "warned"), [(2, False), (4, True)])
def test_a_mesh_of_one_replica_that_compresses_nothing_is_a_warning(
    config: Path, caplog: pytest.LogCaptureFixture, shards: int, warned: bool
) -> None:
    mesh = ("data.image_size=8", f"mesh.dp_shard={shards}")
    given = ("optimizer.compress_gradients=bfloat16", *mesh)
    trace_step(load_config(config, given), world_size=4, rank=0)
    assert ("mesh.dp_replicate is 1, over which gradients are" in caplog.text) == warned


def test_a_model_without_float32_gradients_is_refused() -> None:
    layers = [nn.Linear(8, 8).double()]
    with alone(0, 2):
        mesh = make_mesh((1, 2, 1, 1, 1), device_type="cpu")
        with pytest.raises(ConfigError, match=r"trains no float32 weights.*; leave it"):
            Compression(layers, mesh, kind="powersgd", rank=1, warmup_steps=0, seed=0)
