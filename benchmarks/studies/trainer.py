"""What does a step of the trainer cost beside a bare torch loop of the same model, in one process?

Both train by one batch that is in memory. Steps of all ways take turns, so that what else the
machine does hits all of them. The ways: ``bare`` is forward, mean loss, backward, SGD; ``trainer``
has the model as the trainer spreads it, on a mesh of one rank; ``unspread`` has the model as it is;
``schedule`` is unspread, by torch's own schedule of one stage and one microbatch. All but ``bare``
give each row's loss, whether it was right, and how sure the model was. Ratios are to ``bare``:
of medians, of time that passed and of time that the process computed.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.trainer [--models resnet gpt] [--repeats 40]
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.machine import describe_machine
from dataio.batch.values import Batch
from trainer.mesh.mesh import AXES, make_mesh
from trainer.mesh.parallelize import parallelize
from trainer.mesh.pipeline import Pipeline
from trainer.mesh.place import place_of
from trainer.models import GPT, ResNet, StagedModel, seeded
from trainer.run.step import train_step
from trainer.run.tasks import Classify, NextToken, Task
from trainer.watch.launch import join

ROWS = 16
LENGTH = 64
ALONE = (1,) * len(AXES)
CPU = torch.device("cpu")

Step = Callable[[], object]


class Silent:
    """Takes reports, and has nothing to score again."""

    def report(self, batch: Batch, loss: Tensor, correct: Tensor, confidence: Tensor) -> None:
        """Drop it."""

    def refresh(self) -> Iterator[Batch]:
        """Give nothing."""
        return iter(())


def make_case(name: str) -> tuple[StagedModel, Task, Batch]:
    """Make a model, what it learns, and a batch."""
    weight = torch.ones(ROWS)
    if name == "gpt":
        gpt = seeded(lambda: GPT(256, LENGTH, width=192, depth=4, heads=6), seed=0)
        return gpt, NextToken(), {
            "tokens": torch.randint(256, (ROWS, LENGTH + 1)), "weight": weight
        }  # fmt: skip
    resnet = seeded(lambda: ResNet(10, depth=20), seed=0)
    images = torch.randint(256, (ROWS, 3, 32, 32), dtype=torch.uint8)
    return resnet, Classify(), {
        "image": images, "label": torch.randint(10, (ROWS,)), "weight": weight
    }  # fmt: skip


def bare_step(model: StagedModel, task: Task, batch: Batch) -> Step:
    """Train as a loop of one's own would."""
    optimizer = _sgd(model)

    def step() -> None:
        logits, target = model(task.input(batch)), task.target(batch)
        loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def trainer_step(model: StagedModel, mesh: DeviceMesh, task: Task, batch: Batch) -> Step:
    """Train as the trainer does."""
    place = place_of(0, ALONE, schedule="1f1b", virtual=1)
    pipeline = Pipeline(
        [model], place, mesh, task, schedule="1f1b", microbatches=1, batch_size=ROWS, device=CPU
    )
    optimizer, silent = _sgd(model), Silent()
    return lambda: train_step(pipeline, optimizer, silent, [batch])


def schedule_step(model: StagedModel, mesh: DeviceMesh, task: Task, batch: Batch) -> Step:
    """Train by torch's schedule, with the same scores."""
    optimizer = _sgd(model)
    stage = PipelineStage(
        model, 0, 1, CPU, input_args=model.input_shape(ROWS), output_args=model.output_shape(ROWS),
        group=mesh["pp"].get_group(),
    )  # fmt: skip

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        losses = task.losses(logits, target)
        task.outcome(logits.detach(), target)
        return (losses * batch["weight"]).mean()

    schedule = ScheduleGPipe(stage, 1, loss_fn=loss)

    def step() -> None:
        schedule.step(task.input(batch), target=task.target(batch), return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sgd(model: StagedModel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def measure(name: str, repeats: int) -> dict[str, object]:
    """Time the ways in turns."""
    mesh = make_mesh(ALONE, device_type="cpu")
    model, task, batch = make_case(name)
    (spread,) = parallelize(copy.deepcopy(model), mesh)
    ways = {
        "bare": bare_step(copy.deepcopy(model), task, batch),
        "trainer": trainer_step(spread, mesh, task, batch),
        "unspread": trainer_step(copy.deepcopy(model), mesh, task, batch),
        "schedule": schedule_step(copy.deepcopy(model), mesh, task, batch),
    }
    wall: dict[str, list[float]] = {way: [] for way in ways}
    computed: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 3):
        for way, step in ways.items():
            started, began = time.perf_counter(), time.process_time()
            step()
            # The first turns warm up.
            if turn >= 3:
                wall[way].append(time.perf_counter() - started)
                computed[way].append(time.process_time() - began)
    figures: dict[str, object] = {
        "question": "cost of the trainer's step",
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch_size": ROWS,
        "repeats": repeats,
    }
    for unit, times in (("wall", wall), ("cpu", computed)):
        median = {way: statistics.median(values) for way, values in times.items()}
        figures[f"bare_{unit}_ms"] = 1e3 * median["bare"]
        for way in ("trainer", "unspread", "schedule"):
            figures[f"{way}_{unit}_ratio"] = median[way] / median["bare"]
    return figures


def main() -> None:
    """Print one line of JSON a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=["resnet", "gpt"], default=["resnet", "gpt"])
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    with join(device="cpu"):
        for name in args.models:
            figures = measure(name, args.repeats)
            print(json.dumps(figures | describe_machine(Path.cwd())), flush=True)


if __name__ == "__main__":
    main()
