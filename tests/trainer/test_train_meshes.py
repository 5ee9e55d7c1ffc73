"""Whole runs on several meshes: the same losses as in one process, and on from one to another."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.multirank import RunRanks
from tests.trainer.digits import write_config
from tests.trainer.test_train import stop_after
from trainer.config import load_config
from trainer.loop import train

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(600)]

GLOBAL_BATCH = 16
VIT = (
    "model.kind=vit", "model.patch=4", "model.width=8", "model.depth=4", "model.heads=2",
    "mesh.dtype=float64", "optimizer.kind=adamw", "optimizer.lr=0.01", "optimizer.clip=1.0",
    "importance.kind=kakurenbo", "importance.fraction=0.4", "importance.tau=0",
    "run.checkpoint_epochs=0",
)  # fmt: skip
MESHES = {
    "1": (1, ()),
    "dp2": (2, ("mesh.dp_shard=2",)),
    "tp2": (1, ("mesh.tp=2", "mesh.sequence_parallel=true", "mesh.loss_parallel=true")),
    "pp2": (1, ("mesh.pp=2", "mesh.microbatches=4")),
    "dp2 tp2": (2, ("mesh.tp=2",)),
    "pp2 tp2": (1, ("mesh.pp=2", "mesh.tp=2", "mesh.schedule=zbv", "mesh.microbatches=4")),
    "dp4": (4, ("mesh.dp_shard=2",)),
}
"""Replicas, and what else to set."""


def settings(root: Path, mesh: str, name: str, *more: str) -> list[str]:
    """Set a mesh, and a run directory with a cache of its own."""
    replicas, given = MESHES[mesh]
    batch = f"data.batch_size={GLOBAL_BATCH // replicas}"
    where = (f"run.directory={root / name}", f"data.cache={root / name / mesh / 'cache'}")
    return [*VIT, *given, batch, *where, *more]


def losses(directory: Path) -> list[float]:
    """Read a run's losses, step by step, and what it hid and scored at the ends of epochs."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    told: list[float] = []
    for line in lines:
        names = ("loss",) if line["kind"] == "step" else ("hidden_fraction", "evaluation_loss")
        told += [line[name] for name in names]
    return told


def alone(config: Path, mesh_settings: list[str]) -> Any:
    """Train in this process."""
    return train(load_config(config, mesh_settings))


def test_every_mesh_trains_as_one_process_and_goes_on_from_any_other(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    long = ("run.epochs=8",)

    def started(num_ranks: int, *cases: list[str]) -> Any:
        joined = ["|".join(case) for case in cases]
        return run_ranks("train_meshes", num_ranks, str(config), *joined, timeout_s=280).reports[0]

    alone(config, settings(tmp_path, "1", "1", *long))
    expected = losses(tmp_path / "1")
    assert max(json.loads(line).get("hidden_fraction", 0) for line in
               (tmp_path / "1/metrics.jsonl").read_text().splitlines()) > 0.1  # fmt: skip
    started(2, *(settings(tmp_path, mesh, mesh, *long) for mesh in ("dp2", "tp2", "pp2")))
    first = started(
        4,
        settings(tmp_path, "dp2 tp2", "dp2 tp2", *long),
        settings(tmp_path, "pp2 tp2", "pp2 tp2", *long),
        settings(tmp_path, "dp2 tp2", "moved", *long, "stop=10"),
    )
    for mesh in ("dp2", "tp2", "pp2", "dp2 tp2", "pp2 tp2"):
        assert losses(tmp_path / mesh) == pytest.approx(expected, rel=1e-9), mesh
    assert first[-1] == {"steps": 10, "finished": False}
    # ... to one process, then to four replicas, then to a pipeline
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 12)
        alone(config, settings(tmp_path, "1", "moved", *long))
    rest = started(
        4,
        settings(tmp_path, "dp4", "moved", *long, "stop=11"),
        settings(tmp_path, "pp2 tp2", "moved", *long),
    )
    assert rest[0] == {"steps": 33, "finished": False}
    assert losses(tmp_path / "moved") == pytest.approx(expected, rel=1e-9)
