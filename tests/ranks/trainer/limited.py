"""Train a step of a GPT with less memory than its weights take.

Arguments: report directory, sizes of the mesh as JSON, bytes that this process may allocate.
"""

import json
import resource
import sys
from pathlib import Path

import torch

from dataio.job.launch import join
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.mesh.place import place_of
from tonari.trainer.models import GPT, StagedModel, deferred
from tonari.trainer.run.tasks import NextToken

ROWS, LENGTH = 4, 8


def build() -> StagedModel:
    """Make the model: 237 MB of weights in float32."""
    return GPT(64, LENGTH, width=640, depth=12, heads=8)


def allocated_bytes() -> int:
    """Count private memory that can be written, as ``RLIMIT_DATA`` does."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def main() -> None:
    directory, sizes, limit = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    with join(device="cpu") as job:
        rank = job.world.rank
        place = place_of(rank, sizes, schedule="1f1b", virtual=1)
        mesh = make_mesh(tuple(sizes), device_type="cpu")
        most = allocated_bytes() + limit
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        parts = parallelize(deferred(build, seed=0), mesh, place)
        pipeline = Pipeline(
            parts, place, mesh, NextToken(), schedule="1f1b", microbatches=ROWS, batch_size=ROWS,
            device=job.device,
        )  # fmt: skip
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        tokens = torch.arange(ROWS * (LENGTH + 1)).reshape(ROWS, -1)
        losses = []
        for _ in range(2):
            scored = pipeline.train({"tokens": tokens, "weight": torch.ones(ROWS)})
            optimizer.step()
            optimizer.zero_grad()
            if scored is not None:
                losses.append(float(scored.loss.mean()))
        report = {"losses": losses, "bytes": allocated_bytes()}
        (directory / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
