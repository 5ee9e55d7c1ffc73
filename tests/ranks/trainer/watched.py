"""Train a small sharded model, a checkpoint every second step, while one rank falls in some way.

Arguments: report directory, checkpoint directory, rank that falls (-1: none), and how: kill, raise,
stop or spin.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from dataio.job.launch import join
from tests.trainer.deliver.fake_loader import NUM_CLASSES, FakeLoader, whole_weights
from tests.trainer.run.alone import one_stage, step_loss
from tonari.trainer.checkpoint.checkpoint import Checkpoints
from tonari.trainer.checkpoint.directory import Progress
from tonari.trainer.checkpoint.restore import find, restore
from tonari.trainer.mesh.mesh import axis_sizes, make_mesh, name_roles
from tonari.trainer.mesh.parallelize import parallelize
from tonari.trainer.models import SmallCNN, seeded

STEPS, FALL = 6, 3
LIMIT_S = 4.0


def spin() -> None:
    while True:
        pass


def fall(way: str, report: Path) -> None:
    (report / "fallen").touch()
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "spin":
        spin()
    raise ValueError("this model is on fire")


def main() -> None:
    report, directory, falls, way = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:5]
    with join(device="cpu", timeout_s=LIMIT_S, silent_s=LIMIT_S) as job:
        rank = job.world.rank
        (report / f"{rank}.pid").write_text(str(os.getpid()))
        sizes = axis_sizes(4, dp_shard=2)
        job.watchdog.set_roles(name_roles(sizes))
        if rank == 0:
            (report / "ranks.txt").write_text("\n".join(job.watchdog.processes()))
        mesh = make_mesh(sizes, device_type="cpu")
        (model,) = parallelize(seeded(lambda: SmallCNN(NUM_CLASSES, 3, 8), seed=0), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = FakeLoader(replica=rank, num_replicas=4, global_batch_size=12, steps=STEPS)
        found = find(directory, "auto")
        if found:
            restore(found, [model], optimizer, loader)
        pipeline = one_stage(model, mesh, batch_size=loader.batch_size)
        first = loader.step
        with Checkpoints(directory, keep=2, background=True) as checkpoints:
            for batch in loader:
                step_loss(pipeline, optimizer, loader, batch)
                job.watchdog.progress(loader.step)
                if loader.step % 2 == 0:
                    checkpoints.save([model], optimizer, loader, Progress(0, loader.step))
                    checkpoints.flush()
                if rank == int(falls) and loader.step == FALL:
                    fall(way, report)
            job.watchdog.rest()
        weights = [weights.tolist() for weights in whole_weights(model)]
    (report / f"{rank}.json").write_text(json.dumps({"first": first, "weights": weights}))


if __name__ == "__main__":
    main()
