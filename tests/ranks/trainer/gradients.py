"""One float64 step on copies x shards of two models: reports what a rate of 1 took off the weights.

Reports also the mean of batch statistics that were each rank's number.

Arguments: report directory, shards.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from dataio.job.launch import join
from tests.trainer.deliver.fake_loader import FakeLoader, make_models, whole_weights
from tests.trainer.run.alone import one_stage
from tonari.trainer.mesh.mesh import axis_sizes, make_mesh
from tonari.trainer.mesh.parallelize import average_buffers, parallelize
from tonari.trainer.run.step import train_step


def main() -> None:
    directory, dp_shard = Path(sys.argv[1]), int(sys.argv[2])
    with join(device="cpu") as job:
        rank, num_ranks = job.world.rank, job.world.world_size
        mesh = make_mesh(axis_sizes(num_ranks, dp_shard=dp_shard), device_type="cpu")
        loader = FakeLoader(replica=rank, num_replicas=num_ranks, global_batch_size=24, steps=1)
        norm = nn.BatchNorm2d(1)
        norm.running_mean = torch.tensor([float(rank)])
        average_buffers(norm, mesh)
        report = {"statistics": norm.running_mean.tolist()}
        for name, model in make_models().items():
            (model,) = parallelize(model, mesh)
            before = whole_weights(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1)
            pipeline = one_stage(model, mesh, batch_size=loader.batch_size)
            train_step(pipeline, optimizer, loader, [loader.batch(0)])
            after = whole_weights(model)
            report[name] = [(old - new).tolist() for old, new in zip(before, after, strict=True)]
    (directory / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
