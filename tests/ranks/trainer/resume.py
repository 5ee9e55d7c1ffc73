"""Train a small model from the newest checkpoint, if any, up to a step, and leave a checkpoint.

Arguments: report directory, checkpoint directory, shards, step to stop at.
"""

import json
import sys
from pathlib import Path

import torch

from dataio.job.launch import join
from tests.trainer.deliver.fake_loader import NUM_CLASSES, FakeLoader, whole_weights
from tests.trainer.run.alone import one_stage, step_loss
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import Progress
from tonari.trainer.checkpoint.restore import find, restore
from tonari.trainer.mesh.mesh import axis_sizes, make_mesh
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.models import SmallCNN, seeded


def main() -> None:
    report, directory, dp_shard, stop = (
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        *map(int, sys.argv[3:]),
    )
    with join(device="cpu") as job:
        rank, num_ranks = job.world.rank, job.world.world_size
        mesh = make_mesh(axis_sizes(num_ranks, dp_shard=dp_shard), device_type="cpu")
        (model,) = parallelize(seeded(lambda: SmallCNN(NUM_CLASSES, 3, 8), seed=0), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = FakeLoader(replica=rank, num_replicas=num_ranks, global_batch_size=12, steps=stop)
        found = find(directory, "auto")
        if found:
            restore(found, [model], optimizer, loader)
        pipeline = one_stage(model, mesh, batch_size=loader.batch_size)
        losses = [float(step_loss(pipeline, optimizer, loader, batch)) for batch in loader]
        with Checkpoints(directory, keep=2) as checkpoints:
            checkpoints.save([model], optimizer, loader, Progress(0, stop))
        weights = [weights.tolist() for weights in whole_weights(model)]
    (report / f"{rank}.json").write_text(json.dumps({"losses": losses, "weights": weights}))


if __name__ == "__main__":
    main()
