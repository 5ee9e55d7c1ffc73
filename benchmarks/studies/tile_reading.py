"""What does a rank of tiles read, keep and exchange, and does a slow source feed several faster?

Each line is a job of `tonari train`, two epochs on large samples of a Zarr store: ``tiles`` parts
of the height of each sample, in ``replicas``, each of them a node. The ranks of a tile read through
a mount of their own, which counts bytes, and lets so many a second pass where there is one replica.
Bytes are those of the rank that has most: ``source`` as its loader says, ``kept`` in the files of
its cache, ``exchanged`` with the other replica, as its loader says. ``read`` is the mean over ranks
of what the mounts say. ``first_s`` is the first epoch, staging included, as the run says it.
``..._times_less``: of ranks with whole samples, over these. The jobs take turns; given are medians.

    python -m benchmarks.studies.tile_reading [--megabytes-per-s 2] [--repeats 3]
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zarr
from torch import nn

import dataio
from dataio.job.launch import join
from tests.slowfs import slowfs
from tonari.mpi import mpiexec_command
from tonari.report.machine import describe_machine
from tonari.trainer.config.config import load_config
from tonari.trainer.run.loop import train
from tonari.trainer.run.tasks import Classify

NUM_SAMPLES, SHAPE = 16, (4, 512, 512)
JOBS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
"""Replicas, and tiles of a sample."""
TIMEOUT_S = 300
SETTINGS = """
data.train = "fields.zarr"
data.batch_size = 2
data.workers.threads = 0
data.cache.path = "{directory}/cache"
shuffle.exchange = 0.5
optimizer.kind = "sgd"
{tiles}
mesh.dp_replicate = {replicas}
run.epochs = 2
run.checkpoint_epochs = 0
run.device = "cpu"
run.directory = "{directory}"
run.prometheus = "{directory}/metrics.prom"
"""


def make_model() -> nn.Module:
    """Make a model that computes next to nothing."""
    return nn.Sequential(
        nn.Conv2d(SHAPE[0], 4, 1, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 2),
    )  # fmt: skip


def run_rank(directory: str, parts: int, mounts: Sequence[str]) -> None:
    """Train as a rank of a job."""
    with join(device="cpu") as job:
        source = f"data.train={mounts[job.world.rank]}/fields.zarr"
        config = load_config(Path(directory, "run.toml"), [source])
        tiles = dataio.Tiles((1,), (parts,)) if parts > 1 else None
        fields: dict[str, dataio.Field] = {
            "x": dataio.Array("x", SHAPE, "float32", tiles=tiles), "y": dataio.Int("y")
        }  # fmt: skip
        train(
            config, model=make_model, fields=fields, task=Classify(image="x", label="y"),
            quiet=True,
        )  # fmt: skip


def run_job(source: Path, replicas: int, parts: int, *, bytes_per_s: float) -> dict[str, float]:
    """Run a job; the figures of the rank that has most of each."""
    ranks = replicas * parts
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        mounts = [
            stack.enter_context(slowfs(source, bytes_per_s=bytes_per_s, cache="direct_io"))
            for _ in range(ranks)
        ]
        tiles = f"mesh.tiles = [{parts}]" if parts > 1 else ""
        root = Path(directory)
        (root / "run.toml").write_text(
            SETTINGS.format(directory=directory, replicas=replicas, tiles=tiles)
        )
        given = json.dumps([directory, parts, [str(mount.path) for mount in mounts]])
        subprocess.run(
            [*mpiexec_command(ranks), sys.executable, "-m", __spec__.name, "--rank", given],
            check=True, timeout=TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TONARI_RANKS_PER_NODE": str(parts)},
        )  # fmt: skip
        metrics = [path.read_text() for path in root.glob("metrics-*.prom")]
        first = json.loads((root / "metrics.jsonl").read_text().splitlines()[0])
        caches = [node.rglob("*") for node in root.glob("cache/*/node*")]
        assert len(metrics) == len(caches) == ranks
        return {
            "read_bytes": sum(mount.counts()["read_bytes"] for mount in mounts) / ranks,
            "source_bytes": max(counter(each, "source_bytes") for each in metrics),
            "kept_bytes": max(sum(f.stat().st_blocks * 512 for f in files) for files in caches),
            "exchanged_bytes": max(counter(each, "exchanged_bytes") for each in metrics),
            "first_s": first["staging_s"] + first["epoch_s"],
        }


def counter(metrics: str, name: str) -> float:
    """Find a counter of a rank's loader."""
    found = re.search(rf"^tonari_loader_{name}_total\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def write(path: Path) -> None:
    """Write the samples, of which a chunk is a quarter."""
    rng = np.random.default_rng(0)
    group = zarr.open_group(path / "fields.zarr", mode="w")
    chunks = (1, SHAPE[0], SHAPE[1] // 4, SHAPE[2])
    x = group.create_array("x", shape=(NUM_SAMPLES, *SHAPE), chunks=chunks, dtype="float32")
    for at in range(NUM_SAMPLES):
        x[at] = rng.random(SHAPE, np.float32)
    group.create_array("y", data=rng.integers(0, 2, NUM_SAMPLES))


def main() -> None:
    """Print a line of JSON for each job, or be a rank of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes-per-s", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(*given.rank)
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch)
        write(source)
        rate = given.megabytes_per_s * 1e6
        turns = [
            [run_job(source, *job, bytes_per_s=rate if job[0] == 1 else 0) for job in JOBS]
            for _ in range(given.repeats)
        ]
        for at, (replicas, parts) in enumerate(JOBS):
            whole = next(i for i, job in enumerate(JOBS) if job == (replicas, 1))
            figures: dict[str, object] = {"replicas": replicas, "tiles": parts}
            for name in turns[0][at]:
                of = [turn[whole][name] / turn[at][name] if turn[at][name] else 0 for turn in turns]
                figures[name] = statistics.median(turn[at][name] for turn in turns)
                figures[f"{name.rpartition('_')[0]}_times_less"] = round(statistics.median(of), 3)
            print(json.dumps(figures | vars(given) | describe_machine(source)), flush=True)


if __name__ == "__main__":
    main()
