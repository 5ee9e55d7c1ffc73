"""Two steps of foreign models on many meshes: gradients, losses, norms, as tensors.

Arguments: report directory, cases as JSON: lists of kind, schedule, sizes of the mesh, options. The
option ``swap`` is the number of blocks of each stage that swap.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dataio.job.launch import join
from tests.trainer.foreign_models import NUM_ROWS, batch_of, make, task_of
from tests.trainer.mesh.same_weights import same_weights
from tonari.trainer.checkpoint.state import plain_name
from tonari.trainer.mesh.mesh import make_mesh
from tonari.trainer.mesh.parallelize import average_buffers, parallelize
from tonari.trainer.mesh.pipeline import Pipeline
from tonari.trainer.mesh.place import Schedule, place_of
from tonari.trainer.mesh.swap import Swap
from tonari.trainer.models import deferred
from tonari.trainer.run.step import train_step

MICROBATCHES = 4


class Losses:
    """Takes the place of a loader: keeps what is reported."""

    def __init__(self) -> None:
        self.needs_outcome = False
        self.losses: list[torch.Tensor] = []

    def report(self, batch: Any, loss: Any, correct: Any, confidence: Any) -> None:
        """Keep the losses."""
        self.losses.append(loss)


def run_case(
    rank: int, kind: str, schedule: Schedule, sizes: list[int], options: dict[str, Any]
) -> dict[str, Any]:
    """Train two steps of plain SGD; returns what this rank has."""
    place = place_of(rank, sizes, schedule=schedule, virtual=2)
    mesh = make_mesh(tuple(sizes), device_type="cpu")
    num_rows = NUM_ROWS // place.num_replicas
    rows = slice(place.replica * num_rows, (place.replica + 1) * num_rows)
    options = dict(options)
    if "swap" in options:
        options["swap"] = Swap(options["swap"], torch.device("cpu"), least_bytes=0)
    parts = parallelize(make(kind, build=deferred), mesh, place, **options)
    same = same_weights(parts, parallelize(make(kind), mesh, place, **options))
    pipeline = Pipeline(
        parts, place, mesh, task_of(kind), schedule=schedule,
        microbatches=MICROBATCHES // place.num_replicas, batch_size=num_rows,
        device=torch.device("cpu"), seed=3,
    )  # fmt: skip
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    taken, norms = Losses(), list[float]()
    gradients: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: gradients.update(_gradients(parts)))
    for step in range(2):
        batch = {name: column[rows] for name, column in batch_of(kind, step).items()}
        done = train_step(pipeline, optimizer, taken, [batch], clip=0.5, step=step)
        assert done.norm is not None
        norms.append(float(done.norm))
    for part in parts:
        average_buffers(part, mesh)
        state = part.state_dict()
        buffers |= {
            plain_name(f"0.{name}"): state[name].clone()
            for name, _ in part.named_buffers()
            if name in state
        }
    return {
        "weights": same, "replica": place.replica, "norms": norms, "gradients": gradients,
        "buffers": buffers,
        "losses": torch.cat(taken.losses) if taken.losses else None,
    }  # fmt: skip


def _gradients(parts: list[Any]) -> dict[str, torch.Tensor]:
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            grad = parameter.grad
            if grad is not None:
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                plain = plain_name(f"0.{part.first_names.get(name, name)}")
                found[plain] = whole.detach().clone()
    return found


def main() -> None:
    """Run all cases and write what this rank has."""
    directory, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    with join(device="cpu") as job:
        reports = [run_case(job.world.rank, *case) for case in cases]
    torch.save(reports, directory / f"{job.world.rank}.pt")
    (directory / f"{job.world.rank}.json").write_text("{}")


if __name__ == "__main__":
    main()
